"""What a reader opens first: index.md leads to each page, install.md to each extra, and the first notebooks have a picture."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from tests.support.code_blocks import ROOT

INDEX = (ROOT / "docs" / "index.md").read_text("utf-8")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def linked() -> set[str]:
    """The targets of the links on index.md that a forge shows too: it shows no table of contents in a fence."""
    return set(re.findall(r"\]\(([^)#\s]+)", FENCE.sub("", INDEX)))


def test_the_first_page_links_to_each_page():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - linked() == set()


def test_the_first_page_links_to_each_notebook():
    assert {f"../notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")} - linked() == set()


def test_the_page_on_installing_has_each_extra():
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    rows = [row for row in (ROOT / "docs" / "install.md").read_text("utf-8").splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == extras.keys()


@pytest.mark.parametrize("name", ["01_quickstart.ipynb", "02_lose_a_worker.ipynb"])
def test_the_first_notebooks_have_a_picture(name):
    """On a page without a kernel a reader sees the dashboard too; the file of the picture exists."""
    folder = ROOT / "notebooks"
    cells = json.loads((folder / name).read_text("utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    pictures = re.findall(r"!\[[^\]]+\]\(([^)\s]+)\)", text)
    assert pictures
    assert all((folder / picture).is_file() for picture in pictures)
