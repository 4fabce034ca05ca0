"""Without a CUDA device nothing below tests/gpu is collected."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_report_header() -> str | None:
    if torch.cuda.is_available():
        return f"tests/gpu: on {torch.cuda.get_device_name()}"
    return "tests/gpu: no CUDA device, not collected"
