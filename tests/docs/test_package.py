"""The package that people install: what is in it, and that it needs nothing but what it declares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import nbelastic as nbe
from tests.support.code_blocks import ROOT, example

IMPORTED = """
import sys
import nbelastic
from importlib.metadata import version
from nbelastic.notebook.dashboard import Dashboard
assert nbelastic.__file__.startswith(sys.prefix), nbelastic.__file__
assert version("nbelastic") == nbelastic.__version__
assert "torch" not in sys.modules
assert len(Dashboard._esm) > 10_000 and len(Dashboard._css) > 10_000, "the dashboard's files are not in the wheel"
"""
ALL_NAMES = "assert all(getattr(nbelastic, name) is not None for name in nbelastic.__all__)"
CELLS = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.load(sys.stdin):
    shell.run_cell(cell).raise_error()
"""
NO_HOST = """
import nbelastic as nbe
try:
    nbe.Cluster("nowhere.invalid:2", min=1, cooldown=(0, 0)).start(timeout=60)
except nbe.HostError as error:
    print(error)
"""


def run(*command: object, cwd: Path, text: str = "") -> str:
    """The standard output of a command that must succeed, in the environment of its own interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needs(requirement: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Add the distribution that a requirement names, and all that it needs, to `found`."""
    wanted = Requirement(requirement)
    key = f"{wanted.name}[{','.join(sorted(wanted.extras))}]"
    if key not in found:
        found[key] = distribution(wanted.name)
        for each in map(Requirement, found[key].requires or ()):
            extras = ["", *wanted.extras]
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                needs(str(each), found)
    return found


def link(distributions: list[Distribution], packages: Path) -> None:
    """Link what they have installed. A folder that several of them share is linked file by file."""
    owners: dict[str, set[Distribution]] = {}
    files = [(one, file.parts) for one in distributions for file in one.files or () if ".." not in file.parts]
    for one, parts in files:
        owners.setdefault(parts[0], set()).add(one)
    links = {(one.locate_file(""), parts if len(owners[parts[0]]) > 1 else parts[:1]) for one, parts in files}
    for folder, parts in links:
        source, target = Path(folder, *parts), Path(packages, *parts)
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


def environment(folder: Path, wheel: Path, requirements: list[str]) -> Path:
    """The interpreter of an environment with the wheel, these requirements and all that they need, and nothing else."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    found: dict[str, Distribution] = {}
    for requirement in requirements:
        needs(requirement, found)
    link(list({one.name: one for one in found.values()}.values()), packages)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    run(*pip, wheel, cwd=folder)
    return python


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with sdist and wheel; the wheel is built from the sdist, as an index's user may do."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def declared(wheel) -> list[str]:
    """The requirements of the wheel, each with the marker of its extra, if any."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().split("\n\n")[0].splitlines()
    return [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]


def without_extra(declared: list[str], *extras: str) -> list[str]:
    wanted = [(each, Requirement(each).marker) for each in declared]
    return [
        each
        for each, marker in wanted
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def shorter(code: str) -> str:
    """The quickstart's program with half as many epochs, which are enough for its accuracy, and without its pauses."""
    return code.replace("range(state.epoch, 30)", "range(state.epoch, 15)").replace("time.sleep(0.01)", "pass")


def test_an_index_would_take_both(built):
    """`twine check` finds no fault in the metadata."""
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


def test_the_wheel_has_the_package_and_the_dashboard_and_nothing_else(wheel):
    """Every module, the marker of types, the widget's files; no tests, pages or notebooks."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "nbelastic").rglob("*.py")}
    assert sources | {"nbelastic/py.typed"} <= names
    assert {
        f"nbelastic/notebook/static/{each.name}" for each in (ROOT / "widgets" / "src").glob("dashboard.*")
    } <= names
    assert {name.split("/")[0] for name in names} == {"nbelastic", f"nbelastic-{nbe.__version__}.dist-info"}


def test_the_sdist_has_what_a_build_needs(built):
    """The sources and the texts that the metadata names; no tests, pages or notebooks."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert tops - {".gitignore", "PKG-INFO"} == {
        *("nbelastic", "widgets", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
    }


@pytest.mark.soak(share=0.2)
def test_it_runs_with_what_it_declares(wheel, declared, tmp_path):
    """In an empty environment: all names can be imported, and the quickstart trains to its accuracy."""
    python = environment(tmp_path / "env", wheel, without_extra(declared, "demo"))
    run(python, "-c", IMPORTED + ALL_NAMES, cwd=tmp_path)
    assert "usage: nbelastic" in run(python.parent / "nbelastic", "--help", cwd=tmp_path)
    quickstart = [shorter(block.code) for block in example() if "%elastic_add" not in block.code]
    assert "all ranks agree: True" in run(python, "-c", CELLS, cwd=tmp_path, text=json.dumps(quickstart))


def test_a_notebook_needs_no_torch_if_all_hosts_are_elsewhere(wheel, declared, tmp_path):
    """Without torch, kernel and driver start, reach for a host over ssh, and report why it does not start."""
    requirements = [each for each in without_extra(declared) if Requirement(each).name != "torch"]
    python = environment(tmp_path / "env", wheel, requirements)
    run(python, "-c", IMPORTED, cwd=tmp_path)
    assert "nowhere.invalid is an unknown name" in run(python, "-c", NO_HOST, cwd=tmp_path)


def test_the_page_names_what_a_notebook_without_torch_needs(declared):
    """docs/install.md lists all dependencies but torch."""
    page = (ROOT / "docs" / "install.md").read_text()
    (listed,) = [line.split()[2:] for line in page.splitlines() if line.startswith("pip install anywidget")]
    assert listed == sorted({Requirement(each).name for each in without_extra(declared)} - {"torch"})
