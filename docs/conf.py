"""How `make docs` builds the book: from the whole repository, so that links work here and on a forge."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

from mini_engine import __version__  # noqa: E402

project, version, author = "mini-engine", __version__, "The mini-engine maintainers"
copyright = "Apache-2.0"
root_doc = "docs/index"

extensions = ["myst_nb", "sphinx.ext.autodoc", "book", "dial", "front", "hosting"]
include_patterns = [
    "docs/*.md", "docs/concepts/*.md", "labs/lab-*/README.md", "labs/lab-*/AFTER.md", "notebooks/*.ipynb",
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md",
]  # fmt: skip
# Named for the walk as well: it would look into each of them.
exclude_patterns = [
    "docs/_build", "docs/examples", ".*", "out", "build", "dist", "mini_engine", "labs/.state", "labs/kit",
    "**/.ipynb_checkpoints", "**/__pycache__", "node_modules",
]  # fmt: skip
suppress_warnings = [
    "myst.header",  # a notebook's first cell may begin below level 1
    "mystnb.unknown_mime_type",  # widgets; their text stands in for them
]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "off"  # `pytest --nbval notebooks` runs them; the book shows what is saved
nb_ipywidgets_js = {}  # would be loaded from another host
nb_output_stderr = "remove"

default_role = "literal"  # as docstrings have it
autodoc_member_order = "bysource"

html_theme = "sphinx_book_theme"
html_title = "mini-engine"
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = ["quiz.js", "filter.js", "play.js"]
html_copy_source = html_show_sourcelink = False
html_show_sphinx = False
html_domain_indices = False  # of modules: the API reference has them all
html_theme_options = {
    "use_download_button": False, "use_fullscreen_button": False, "navigation_with_keys": False,
    "show_navbar_depth": 1, "show_toc_level": 2, "extra_footer": "",
    "primary_sidebar_end": [],  # a place for advertisements
}  # fmt: skip
