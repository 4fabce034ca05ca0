"""The invariants of tests/conformance, on the GPU."""

from tests.conformance.test_decode_invariants import *  # noqa: F403
