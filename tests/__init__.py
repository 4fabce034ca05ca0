"""Tests; `tests/gpu` runs on a GPU only, `tests/conformance` holds the cases that every tier takes."""
