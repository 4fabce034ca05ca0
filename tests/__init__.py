"""Tests; `tests/gpu` needs a GPU, `tests/conformance` holds the cases of every tier."""
