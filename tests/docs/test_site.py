"""The site is built from docs/, the notebooks and the docstrings, without a warning, without the network, and without a dead link."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import nbelastic as nbe

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """The anchors of a page, the targets of its links, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.links |= {values[name] for name in ("href", "src") if values.get(name)}

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(folder / "read")]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(folder / "html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html")}


def test_each_page_and_notebook_is_on_the_site(site):
    """Sphinx warns of a page that no table of contents has, so each can be reached too."""
    sources = [*(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    expected = {
        path.relative_to(ROOT / "docs" if path.suffix == ".md" else ROOT).with_suffix(".html") for path in sources
    }
    assert {path for path in expected if not (site / path).exists()} == set()
    assert len(expected) > 20


def test_links_inside_the_site_lead_somewhere(site, pages):
    """To a file of the site and, if they name one, to an anchor of it."""
    dead = set()
    for path, page in pages.items():
        for link in page.links:
            to = urlsplit(link)
            if to.scheme or to.netloc:
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            is_dead = not target.exists()
            if target in pages and to.fragment:
                is_dead = unquote(to.fragment) not in pages[target].anchors
            if is_dead:
                dead.add(f"{path.relative_to(site)}: {link}")
    assert dead == set()
    assert sum(len(page.links) for page in pages.values()) > 500


def test_docstrings_of_all_public_names_are_there(pages):
    """On the page of the docstrings, each with an anchor for links from elsewhere."""
    (api,) = [page for path, page in pages.items() if path.name == "api.html"]
    missing = {name for name in nbe.__all__ if f"nbelastic.{name}" not in api.anchors}
    assert missing == set()
    assert nbe.rank.__doc__
    assert "NoWorldError outside an elastic function" in api.text


def test_notebooks_have_their_saved_outputs(site):
    """What was printed, and in place of a widget the text that stands for it."""
    html = (site / "notebooks" / "02_lose_a_worker.html").read_text("utf-8")
    assert "Elastic cluster of" in html
    assert "localhost/2#1 died (SIGKILL)" in html
