"""The code blocks of the README and of docs/, with what they are made of."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """`language` as the page names it; `line` is the one after the fence."""

    page: Path
    line: int
    language: str
    code: str

    @property
    def magics(self) -> list[str]:
        """Its lines that IPython takes as magics, with their percent signs."""
        return [line.strip() for line in self.code.splitlines() if line.lstrip().startswith("%")]

    def lines_of(self, command: str) -> list[str]:
        """Its lines that run this command, without a prompt."""
        lines = [line.removeprefix("$ ") for line in self.code.splitlines()]
        return [line for line in lines if line.split(" ")[0] == command]

    @property
    def python(self) -> str:
        """The rest. Each magic becomes an empty line, so that line numbers stay."""
        lines = self.code.splitlines()
        return "\n".join("" if line.lstrip().startswith("%") else line for line in lines) + "\n"

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(*languages: str, pages: list[Path] = PAGES) -> list[Block]:
    found = []
    for page in pages:
        text = page.read_text("utf-8")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 2
            found.append(Block(page, line, match["language"], textwrap.dedent(match["code"])))
    return [block for block in found if block.language in languages]


def example() -> list[Block]:
    """Of the README: the blocks that are the quickstart, which end where the cluster is stopped."""
    readme = blocks("python", pages=[ROOT / "README.md"])
    end = next(index for index, block in enumerate(readme) if "%elastic_stop" in block.magics)
    return readme[: end + 1]


def cells(notebook: str) -> list[str]:
    """The code cells of a notebook in notebooks/."""
    read = json.loads((ROOT / "notebooks" / notebook).read_text("utf-8"))
    return ["".join(cell["source"]) for cell in read["cells"] if cell["cell_type"] == "code"]
