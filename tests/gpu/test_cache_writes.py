"""The cache writes of tests/conformance, on the GPU."""

from tests.conformance.test_cache_writes import *  # noqa: F403
