"""The scan beside the prepare kernel on the GPU, waiting for a few chunks at a time.

Calls that do so by default are in `test_gdn.py`.
"""

from __future__ import annotations

from tests.conformance.test_gdn_beside import *  # noqa: F403  (collects them again, here)
