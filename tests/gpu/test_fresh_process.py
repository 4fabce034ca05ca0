"""Captures as the first thing that a process does on its device."""

from __future__ import annotations

import subprocess
import sys

_UNFUSED = """
import torch, torch_attn_tiers
decode = torch.ops.attn_tiers.decode
query = torch.randn(1, 4, 1, 64, device="cuda")
cache = torch.randn(1, 2, 9, 64, device="cuda")
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        decode(query, cache, cache, tier="unfused")
except torch_attn_tiers.ColdCaptureError as error:
    assert "prepare(" in str(error)
else:
    raise SystemExit("the first cuBLAS product of a process went into a capture")
torch.cuda.synchronize()
explanation = torch_attn_tiers.prepare("decode", query, cache, cache, tier="unfused")
assert explanation.verdicts[-1].ready
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = decode(query, cache, cache, tier="unfused")
query.copy_(torch.randn(1, 4, 1, 64))
graph.replay()
torch.testing.assert_close(y, decode(query, cache, cache, tier="unfused"))
"""


def test_unfused_is_captured_in_a_process_that_has_multiplied_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _UNFUSED], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
