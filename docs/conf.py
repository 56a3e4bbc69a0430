"""Sphinx: ``make docs``."""

from hvdplus import __version__

project, author, copyright = "hvdplus", "the developers of hvdplus", "the developers of hvdplus"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"hvdplus {__version__}"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
exclude_patterns = ["build"]
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository
nitpicky = False
