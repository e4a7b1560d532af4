"""The site: these pages, the notebooks with their saved outputs, and the docstrings. See contributing.md for the command."""

from __future__ import annotations

import os
import re
from importlib.metadata import version as version_of

from sphinx.application import Sphinx

project = "nbelastic"
author = "the authors of nbelastic"
copyright = "the authors of nbelastic, Apache-2.0"  # noqa: A001 -- Sphinx reads this name
version = release = version_of("nbelastic")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["_build", "kubernetes", "pictures"]
nitpicky = True

# Other projects' inventories are on the network, so a build links to them only if it is asked to. Their names are not checked here.
if os.environ.get("NBELASTIC_DOCS_INTERSPHINX"):
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "ipyparallel": ("https://ipyparallel.readthedocs.io/en/stable", None),
    }
nitpick_ignore_regex = [("py:.*", r"(?!nbelastic\b).*")]

# `-b linkcheck` asks other servers, so no test runs it. Addresses of this machine are examples.
linkcheck_ignore = [r"https?://(localhost|127\.0\.0\.1)\b"]
linkcheck_timeout = 20
linkcheck_retries = 2

# Pages are Markdown that a forge shows too: links go to files and to headings as a forge names them.
myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the tests run the notebooks and compare their outputs with the saved ones
nb_mime_priority_overrides = [("*", "application/vnd.jupyter.widget-view+json", None)]  # a page has no kernel

default_role = "literal"  # docstrings have code between single backticks
autodoc_typehints = "none"
autodoc_member_order = "bysource"
add_module_names = False

html_theme = "furo"
html_title = f"nbelastic {version}"
html_theme_options = {"top_of_page_buttons": []}
html_show_sphinx = False
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True


def link_inside_the_site(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Make links between pages, notebooks and pictures, which lead through the checkout, links inside the site."""
    source[0] = source[0].replace("](../docs/pictures/", "](/pictures/")
    source[0] = re.sub(
        r"\[([^\[\]{}\"]+)\]\(\.\./(notebooks/|docs/)([\w-]+)\.(?:ipynb|md)(?:#[\w-]+)?\)",
        lambda link: f"{{doc}}`{' '.join(link[1].split())} </{link[2].removeprefix('docs/')}{link[3]}>`",
        source[0],
    )


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", link_inside_the_site)
