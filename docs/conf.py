"""Settings of the documentation site: `make docs` builds it with Sphinx, without a network."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxret.version import __version__  # noqa: E402  (the path comes first)

project = "jaxret"
author = "the jaxret authors"
copyright = "the jaxret authors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "Thumbs.db"]
root_doc = "index"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
# The commands and outputs are indented blocks, which have no language.
highlight_language = "text"
smartquotes = False  # `--flag` in prose stays as it is

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"jaxret {release}"
html_show_sourcelink = False
html_copy_source = False
