"""The widget's files: their own tests, their types, and the text that they make together."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from nbelastic.notebook.widget_files import widget_text

WIDGETS = Path(__file__).parents[2] / "widgets"
MODULES = sorted((WIDGETS / "src").glob("*.js"))
TYPESCRIPT = WIDGETS / "node_modules" / ".bin" / "tsc"


def run_in_widgets(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=WIDGETS, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_widgets_own_tests_pass():
    """`node --test` in widgets/ passes."""
    run_in_widgets("node", "--test")


@pytest.mark.skipif(not TYPESCRIPT.exists(), reason="needs TypeScript: `npm ci --prefix widgets`")
def test_the_types_of_the_widget_are_right():
    """TypeScript finds no error in the modules, whose types come from JSDoc and from the contract with Python."""
    run_in_widgets(TYPESCRIPT)


def test_the_contract_is_up_to_date():
    """`python widgets/write_contract.py` would change nothing."""
    written = runpy.run_path(str(WIDGETS / "write_contract.py"))["typescript"]()
    assert (WIDGETS / "src" / "contract.d.ts").read_text() == written


def test_modules_can_share_one_scope():
    """Each name at the top level of a module is unique, and each import keeps the name of what it imports."""
    names = [
        name
        for module in MODULES
        for name in re.findall(
            r"^(?:export )?(?:async )?(?:const|let|class|function) (\w+)", module.read_text(), re.MULTILINE
        )
    ]
    assert sorted(names) == sorted(set(names))
    assert [
        path.name for path in MODULES if re.search(r"^import (?:\* |\w|[^;]* as )", path.read_text(), re.MULTILINE)
    ] == []


@pytest.mark.parametrize("kind", ["js", "css"])
def test_one_text_has_all_files(kind):
    """The module and the style sheet for anywidget contain each file once, and no import of another one."""
    text = widget_text(f"dashboard.{kind}")
    for path in (WIDGETS / "src").glob(f"*.{kind}"):
        last = next(line for line in reversed(path.read_text().splitlines()) if line.strip("};)"))
        assert path.stem == "dashboard" or text.count(re.sub(r"^export ", "", last)) >= 1, path.name
    assert re.findall(r"^(?:import|@import|export (?!default)).*", text, re.MULTILINE) == []


def test_the_widget_knows_failures_by_existing_kinds():
    """Each word by which the widget recognizes a failure is part of a kind that docs/reference.md lists."""
    (words,) = re.findall(r"^export const FAILURE = /(.*)/;$", (WIDGETS / "src" / "tones.js").read_text(), re.MULTILINE)
    table = (WIDGETS.parent / "docs" / "reference.md").read_text().partition("| kind | when |")[2].partition("\n\n")[0]
    kinds = re.findall(r"`([a-z-]+)`", table)
    assert [word for word in words.split("|") if not any(word in kind for kind in kinds)] == []
