"""What users copy from the README and from docs/ is code: it parses, and the names and options in it exist."""

from __future__ import annotations

import ast
import inspect
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbval.plugin import comment_markers

import nbelastic as nbe
from nbelastic.cli.main import _parser
from nbelastic.notebook.magic_arguments import words_of
from nbelastic.notebook.magics import ElasticMagics
from tests.support.code_blocks import PAGES, blocks, cells, example

PYTHON = blocks("python")
MAGICS = [(block, line) for block in PYTHON for line in block.magics]
COMMANDS = [(block, line) for block in blocks("bash", "console") for line in block.lines_of("nbelastic")]
OWNERS = {"nbe": nbe, "nbelastic": nbe, "cluster": nbe.Cluster, "job": nbe.Job}  # by the names that the pages use
OTHERS = {"load_ext", "px"}  # magics of IPython and ipyparallel


def test_there_are_blocks_on_the_pages():
    """The fences are found: else the tests below have nothing to look at."""
    assert {block.page for block in PYTHON} >= {page for page in PAGES if page.name in ("README.md", "state.md")}
    assert len(PYTHON) > 30
    assert len(MAGICS) > 10
    assert len(COMMANDS) > 6


def test_the_readmes_example_is_the_quickstart():
    """Line for line, but for the accuracy and the curves; and its blocks go as they are into cells."""
    outputs = [cell for cell in cells("01_quickstart.ipynb") if cell.startswith("# NBVAL_IGNORE_OUTPUT\n")]
    left_out = {line for cell in outputs for line in cell.splitlines()}
    assert [cell.splitlines()[1][:15] for cell in outputs] == ['print(f"accurac', "cluster.reports"]
    shown = [line for block in example() for line in block.code.splitlines() if line]
    run = [line for cell in cells("01_quickstart.ipynb") for line in cell.splitlines() if line]
    assert shown == [line for line in run if line not in left_out]
    assert left_out < set(run)
    assert all(not block.code.startswith("%%") or "%%" not in block.code[2:] for block in example())


def test_the_readmes_example_puts_its_data_where_the_model_is():
    """On a GPU the model is there, and each batch has to be."""
    code = "\n".join(block.code for block in example())
    assert "ddp(x.to(nbe.device())), y.to(nbe.device())" in code


def test_markers_of_nbval_stand_alone():
    """nbval takes a marker for a remark if anything else is on its line, and then compares outputs that must not be compared."""
    notebooks = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
    marked = [line for each in notebooks for cell in cells(each.name) for line in cell.splitlines() if "NBVAL" in line]
    assert marked
    assert {line.lstrip("# ") for line in marked} <= comment_markers.keys()


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_blocks_parse(block):
    """With magics left out; and as a cell, with them, IPython takes it too."""
    ast.parse(block.python, str(block))
    assert TransformerManager().check_complete(block.code.rstrip() + "\n\n")[0] != "invalid"


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_bash_blocks_parse(block):
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_toml_blocks_parse(block):
    assert tomllib.loads(block.code)


@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=str)
def test_commands_and_their_options_exist(block, line):
    """Each line of a terminal that begins with `nbelastic` is parsed as the command itself does it."""
    _, *words = shlex.split(line, comments=True)
    try:
        _parser().parse_args(words)
    except SystemExit:
        pytest.fail(f"{block} has a command that nbelastic refuses: {line}")


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_names_and_arguments_of_the_package_exist(block):
    """`nbe.name`, `cluster.name` and `job.name` are public, and take the arguments that calls give them by name."""
    tree = ast.parse(block.python)
    keywords = {
        node.func: [each.arg for each in node.keywords] for node in ast.walk(tree) if isinstance(node, ast.Call)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OWNERS):
            continue
        owner = OWNERS[node.value.id]
        where = f"{node.value.id}.{node.attr}, line {node.lineno} of {block}"
        assert node.attr in (nbe.__all__ if owner is nbe else dir(owner)), where
        if node in keywords:
            takes = inspect.signature(getattr(owner, node.attr)).parameters.values()
            anything = any(each.kind is each.VAR_KEYWORD for each in takes)
            assert anything or {*keywords[node]} <= {each.name for each in takes}, where


@pytest.mark.parametrize(("block", "line"), MAGICS, ids=str)
def test_magics_and_their_options_exist(block, line):
    """Each is parsed as the magic itself does it."""
    name, _, options = line.lstrip("%").partition(" ")
    if name in OTHERS:
        return
    kind = "cell" if line.startswith("%%") else "line"
    magics = ElasticMagics.magics[kind]
    assert name in magics, f"{block} has no such magic: {line}"
    method = getattr(ElasticMagics, magics[name])
    method.parser.parse_args(words_of(options))
