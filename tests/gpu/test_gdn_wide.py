"""The scan with 64 columns of S a program on the GPU, forced where calls do not take it by default.

Calls that do are in `test_gdn.py`.
"""

from __future__ import annotations

from tests.conformance.test_gdn_wide import *  # noqa: F403  (collects them again, here)
