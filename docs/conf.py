"""Sphinx: the pages of this folder and the reference, read from the docstrings. `make docs`; warnings are errors."""

project = "compopt"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # what is torch's own is documented there
autodoc_typehints = "none"  # signatures are short enough to read as they are
napoleon_custom_sections = ["State"]
myst_heading_anchors = 3
