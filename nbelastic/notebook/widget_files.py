"""The files of the dashboard's widget. anywidget takes one module and one style sheet, and no build tool makes them."""

from __future__ import annotations

import re
from pathlib import Path

_IMPORT = re.compile(r'^(?:import [^;]*? from|@import) "\./([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default )", re.MULTILINE)


def widget_text(name: str) -> str:
    """Return a module or style sheet with all files that it imports in one text, each before the files that import it.

    All of them share one scope, so names at the top level of a module must differ from those of other modules.
    """
    folder = _folder()
    joined: dict[str, str] = {}

    def join(file: str) -> None:
        text = (folder / file).read_text(encoding="utf-8")
        for imported in _IMPORT.findall(text):
            if imported not in joined:
                join(imported)
        joined[file] = _EXPORT.sub("", _IMPORT.sub("", text))

    join(name)
    return "\n".join(joined.values())


def _folder() -> Path:
    """A wheel has the widget's files in static/, a checkout in widgets/src/."""
    here = Path(__file__).parent
    packaged = here / "static"
    return packaged if packaged.exists() else here.parents[1] / "widgets" / "src"
