"""Split sequences of `gdn_chunk_prefill` on the GPU, in segments of a few chunks.

Those that are split by default are in `test_gdn.py`.
"""

from __future__ import annotations

from tests.conformance.test_gdn_split import *  # noqa: F403  (collects them again, here)
