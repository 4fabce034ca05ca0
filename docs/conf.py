"""Sphinx configuration: `make docs` builds the pages and takes a warning for an error."""

from __future__ import annotations

import torch_attn_tiers

project = "torch-attn-tiers"
author = "the torch-attn-tiers authors"
release = torch_attn_tiers.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False

myst_heading_anchors = 3
nitpicky = False
default_role = "literal"  # docstrings use Markdown's single backticks

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"


def keep_colons(app, what, name, obj, options, lines):
    """Stops Napoleon from reading `word: rest` in an attribute's comment as a type."""
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # an empty comment


def setup(app):
    app.connect("autodoc-process-docstring", keep_colons, priority=100)
