"""Sphinx configuration: `make docs` builds the pages and takes a warning for an error."""

from __future__ import annotations

import importlib.metadata

project = "torch-attn-tiers"
author = "the torch-attn-tiers authors"
release = importlib.metadata.version("torch-attn-tiers")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"

myst_heading_anchors = 3
nitpicky = False
default_role = "literal"  # docstrings use Markdown's single backticks

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
