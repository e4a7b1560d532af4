"""The widget's files: their own tests, their types, and the bundle that they make."""

from __future__ import annotations

import gzip
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from nbelastic.notebook.widget_files import widget_text

WIDGETS = Path(__file__).parents[2] / "widgets"
TYPESCRIPT = WIDGETS / "node_modules" / ".bin" / "tsc"
ESBUILD = TYPESCRIPT.with_name("esbuild")
BIOME = TYPESCRIPT.with_name("biome")


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


@pytest.mark.skipif(not BIOME.exists(), reason="needs Biome: `npm ci --prefix widgets`")
def test_the_linter_finds_nothing():
    """`npm run lint` in widgets/ finds nothing in the modules, the style sheets and the tests."""
    run_in_widgets("npm", "run", "--silent", "lint")


def test_the_contract_is_up_to_date():
    """`python widgets/write_contract.py` would change nothing."""
    written = runpy.run_path(str(WIDGETS / "write_contract.py"))["typescript"]()
    assert (WIDGETS / "src" / "contract.d.ts").read_text() == written


@pytest.mark.skipif(not ESBUILD.exists(), reason="needs esbuild: `npm ci --prefix widgets`")
def test_the_bundle_is_up_to_date(tmp_path):
    """`npm run build` in widgets/ would change nothing, so users need no Node."""
    run_in_widgets("npm", "run", "--silent", "bundle", "--", f"--outdir={tmp_path}")
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "dashboard.css",
        "dashboard.js",
        "page.html",
        "page.js",
    ]
    assert [path.name for path in tmp_path.iterdir() if path.read_text() != widget_text(path.name)] == []


@pytest.mark.parametrize("kind", ["js", "css"])
def test_the_bundle_is_one_file_that_loads_nothing(kind):
    """The module and the style sheet have no import, and no address of a server."""
    text = widget_text(f"dashboard.{kind}")
    assert re.findall(r"\bimport\b|\bfetch\(|url\(|https?://(?!www\.w3\.org/)", text) == []


def test_the_bundle_is_small():
    """At most 60 kB, compressed as a web server would."""
    assert sum(len(gzip.compress(widget_text(f"dashboard.{kind}").encode())) for kind in ("js", "css")) <= 60_000


def test_the_widget_knows_failures_by_existing_kinds():
    """Each word by which the widget recognizes a failure is part of a kind that docs/reference.md lists."""
    (words,) = re.findall(r"^export const FAILURE = /(.*)/;$", (WIDGETS / "src" / "tones.js").read_text(), re.MULTILINE)
    table = (WIDGETS.parent / "docs" / "reference.md").read_text().partition("| kind | when |")[2].partition("\n\n")[0]
    kinds = re.findall(r"`([a-z-]+)`", table)
    assert [word for word in words.split("|") if not any(word in kind for kind in kinds)] == []
