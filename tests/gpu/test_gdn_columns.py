"""The scan with 16, 32 and 64 columns of S a program on the GPU, by force if others are taken.

Calls that have them by default are in `test_gdn.py`.
"""

from __future__ import annotations

from tests.conformance.test_gdn_columns import *  # noqa: F403  (collects them again, here)
