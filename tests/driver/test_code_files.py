"""Which files of the user's own modules are found: what is imported, what `.gitignore` lists, and how much there may be."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import nbelastic as nbe
from nbelastic.client import code_files, code_sync, git_ignores
from nbelastic.client.code_files import CodeFiles
from nbelastic.client.code_sync import CodeSync
from nbelastic.client.git_ignores import GitIgnores
from nbelastic.client.imported_names import names_in_function, names_in_text
from nbelastic.protocol.requests import CodeSent


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a notebook, from which Python imports."""
    here = tmp_path / "notebook"
    here.mkdir()
    monkeypatch.syspath_prepend(here)
    before = set(sys.modules)
    yield here
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def found(folder: Path, *names: str, folders: tuple[Path, ...] = ()) -> list[str]:
    code = CodeFiles([str(folder), *map(str, folders)]).find(names).code
    return [str(Path(os.path.relpath(code.folders[file.folder], folder), file.path)) for file in code.files]


def test_what_is_imported_is_found_and_nothing_else(folder):
    """Modules that were imported here, those that a text names, and those that these import; packages as a whole."""
    put(
        folder,
        {
            "nbeown.py": "def late():\n    from nbepack import inner\n",
            "nbepack/__init__.py": "",
            "nbepack/inner.py": "import nbehelper, json",
            "nbepack/deep/data.json": "{}",
            "nbehelper.py": "",
            "nbenamed.py": "",
            "nbebare/part.py": "",
            "nbebare/weights.bin": "x",
            "unused.py": "",
            "data.csv": "1",
        },
    )
    assert found(folder) == []
    __import__("nbeown")
    assert found(folder, "nbenamed", "nbebare", "torch", "nbemissing") == [
        "nbebare/part.py",
        "nbehelper.py",
        "nbenamed.py",
        "nbeown.py",
        "nbepack/__init__.py",
        "nbepack/deep/data.json",
        "nbepack/inner.py",
    ]


def test_hidden_installed_and_foreign_files_are_not_found(folder, tmp_path):
    """No environments, hidden files, compiled files and links out of the folder; links inside it are files as any."""
    put(tmp_path, {"outside/secret.py": "", "outside/nbelinked/__init__.py": ""})
    put(
        folder,
        {
            "nbepack/__init__.py": "",
            "nbepack/.env": "KEY=1",
            "nbepack/.git/config": "",
            "nbepack/__pycache__/inner.cpython-311.pyc": "",
            "nbepack/real.py": "",
            "env/pyvenv.cfg": "",
            "env/lib/site-packages/nbeinstalled.py": "",
        },
    )
    (folder / "nbepack" / "secret.py").symlink_to(tmp_path / "outside" / "secret.py")
    (folder / "nbepack" / "alias.py").symlink_to("real.py")
    (folder / "nbepack" / "all").symlink_to(tmp_path)
    (folder / "nbelinked").symlink_to(tmp_path / "outside" / "nbelinked")
    os.mkfifo(folder / "nbepack" / "pipe.py")
    sys.path.insert(0, str(folder / "env" / "lib" / "site-packages"))
    __import__("nbeinstalled")
    sys.path.pop(0)
    assert found(folder, "nbepack", "nbelinked", "nbeinstalled") == [
        "nbepack/__init__.py",
        "nbepack/alias.py",
        "nbepack/real.py",
    ]


def test_a_package_without_init_may_have_only_packages(folder):
    """One that only cells import: its folder has no Python file of its own."""
    put(folder, {"nbespace/inner/__init__.py": "", "nbespace/inner/net.py": "import nbehelper", "nbehelper.py": ""})
    put(folder, {"nbedata/images/1.txt": ""})
    assert found(folder, "nbespace", "nbedata") == [
        "nbehelper.py",
        "nbespace/inner/__init__.py",
        "nbespace/inner/net.py",
    ]


def test_linked_folders(folder):
    """A link to a folder within the folders is a folder as any, unless it leads back or `.gitignore` lists its target."""
    put(folder, {".gitignore": "data/", "data/1.bin": "", "shared/part/net.py": "", "nbepack/__init__.py": ""})
    for name, target in {
        "part": "../shared/part",
        "data": "../data",
        "up": "..",
        "loop": "loop",
        "one": "two",
        "two": "one",
    }.items():
        (folder / "nbepack" / name).symlink_to(target)
    (folder / "shared" / "part" / "again").symlink_to("../../nbepack")
    assert found(folder, "nbepack") == ["nbepack/__init__.py", "nbepack/part/net.py"]


def test_a_name_means_what_it_means_to_python(folder, tmp_path, monkeypatch):
    """A folder without `__init__.py` is a package only if no file in any folder has the name; such folders are one package."""
    put(folder, {"nbedata.py": "", "nbedata/download.py": "", "nbetools/script.py": "", "nbefirm/team/net.py": ""})
    put(tmp_path / "library", {"nbetools.py": "", "nbefirm/other.py": "", f"nbefast{EXTENSION_SUFFIXES[0]}": ""})
    monkeypatch.syspath_prepend(tmp_path / "library")
    monkeypatch.syspath_prepend(folder)
    names = "nbedata", "nbetools", "nbefirm", "nbefast"
    assert set(found(folder, *names, folders=(tmp_path / "library",))) == {
        "nbedata.py",
        "nbefirm/team/net.py",
        f"../library/nbefast{EXTENSION_SUFFIXES[0]}",
        "../library/nbefirm/other.py",
        "../library/nbetools.py",
    }


def test_further_folders_have_to_be_named(folder, tmp_path, monkeypatch):
    """A module beside the folder is found only if its folder is named; folders keep Python's order."""
    put(tmp_path, {"lib/nbelib.py": "", "lib/nbeboth.py": "lib"})
    put(folder, {"nbeboth.py": "notebook"})
    monkeypatch.syspath_prepend(tmp_path / "lib")
    __import__("nbelib")
    assert found(folder, "nbelib") == []
    assert found(folder, "nbelib", "nbeboth", folders=(tmp_path / "lib",)) == ["../lib/nbeboth.py", "../lib/nbelib.py"]


def test_names_of_pythons_own_modules_are_not_looked_up(folder):
    """A file `json.py` beside the notebook is not what `import json` means there; nbelastic has its own version on each host."""
    put(folder, {"json.py": "", "nbelastic/__init__.py": "", "msgspec.py": ""})
    assert found(folder, "json", "nbelastic", "msgspec") == []


IGNORED = {
    ".gitignore": "*.log\nbuild/\n/top.py\n**/gen_*.py\n!kept.log\n",
    "a/.gitignore": "b/*\n!b/ok.py\n!z.log\n",
    **dict.fromkeys(("m.py", "x.log", "kept.log", "top.py", "a/top.py", "build/k.py", "a/build/k.py"), ""),
    **dict.fromkeys(("a/b/no.py", "a/b/ok.py", "a/z.log", "a/gen_1.py", "secret.py", "a/secret.py"), ""),
}


def test_ignored_files_are_those_that_git_ignores(tmp_path):
    """The nearest `.gitignore` wins, an excluded folder stays excluded, and `.git/info/exclude` counts."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    put(tmp_path, {**IGNORED, ".git/info/exclude": "secret.py\n"})
    here = GitIgnores(tmp_path / "a")
    for name in IGNORED:
        git = subprocess.run(["git", "-C", tmp_path, "check-ignore", "-q", name], check=False).returncode == 0
        assert here.excludes(tmp_path / name, is_folder=False) == git, name


def test_an_imported_module_that_is_ignored_is_named(folder):
    """It is not sent, and the search says so."""
    put(folder, {".gitignore": "nbelocal.py\nnbepack/_made.py\ndata\n", "nbelocal.py": "", "nbepack/__init__.py": ""})
    put(folder, {"nbepack/_made.py": "", "nbepack/data/big.bin": "x"})
    search = CodeFiles([str(folder)]).find(["nbelocal", "nbepack"])
    assert [file.path for file in search.code.files] == ["nbepack/__init__.py"]
    assert sorted(path.name for path in search.ignored) == ["_made.py", "nbelocal.py"]


def test_an_edit_changes_the_hash_at_once(folder):
    """Also one of the same length within the resolution of a file's time."""
    files, hashes = CodeFiles([str(folder)]), []
    for number in range(20):
        put(folder, {"nbeown.py": f"N = {number % 10}"})
        hashes.append(files.find(["nbeown"]).code.files[0].digest)
    assert len(set(hashes)) == 10


class Driver:
    """Answers as the driver does; `copies`: to which hosts a version was sent."""

    def __init__(self, tmp_path: Path, folder: Path, copies: tuple[str, ...] = ("gpu1",)) -> None:
        self.folder, self.copies, self.versions = tmp_path / "run", copies, []
        self.folder.mkdir()
        self.sync = CodeSync(self.ask, self.folder, [str(folder)])

    def ask(self, request, timeout, what):
        self.versions.append(request.version)
        return CodeSent(self.copies)


def test_each_version_is_saved_for_the_driver(folder, tmp_path):
    """Without modules nothing is sent; each content is saved once, for the owner alone; names of earlier cells stay."""
    driver = Driver(tmp_path, folder)
    assert (driver.sync.send(), driver.versions) == ("", [])
    put(folder, {"nbeown.py": "1", "nbeother.py": "1"})
    first = driver.sync.send(["nbeown"])
    assert driver.sync.send() == first
    second = driver.sync.send(["nbeother"])
    assert driver.versions == [first, first, second]
    saved = list((driver.folder / "code").iterdir())
    assert len(saved) == 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in saved)


def test_a_folder_whose_name_is_not_utf_8_is_named(folder, tmp_path):
    here = folder / os.fsdecode(b"na\xefve")
    put(here, {"nbeown.py": "1"})
    with pytest.raises(nbe.UsageError, match=r"is not UTF-8 .*na\\udcefve"):
        Driver(tmp_path, here).sync.send(["nbeown"])


def test_too_much_is_refused_with_the_largest_files(folder, tmp_path, monkeypatch):
    """A host that lacks the files cannot get them; if all hosts share them, the limit does not matter."""
    monkeypatch.setattr(code_files, "MAX_SIZE", 1000)
    put(folder, {"nbepack/__init__.py": "", "nbepack/weights.bin": "x" * 900, "nbepack/data.bin": "y" * 200})
    put(folder, {"nbepack/net.py": "N = 1"})
    driver = Driver(tmp_path, folder)
    with pytest.raises(nbe.UsageError) as caught:
        driver.sync.send(["nbepack"])
    assert f"with {folder}/nbepack/weights.bin (0.0 MiB), {folder}/nbepack/data.bin (0.0 MiB)" in str(caught.value)
    assert "in .gitignore" in str(caught.value)
    driver.copies = ()
    assert driver.sync.send(["nbepack"])
    put(folder, {".gitignore": "*.bin"})
    driver.copies = ("gpu1",)
    assert driver.sync.send(["nbepack"])


def test_too_many_python_files_are_not_sent(folder, tmp_path, monkeypatch, capsys):
    """Hosts of this machine do not need them, so nothing is refused; one line names the folder with most files."""
    for module in (code_files, code_sync):
        monkeypatch.setattr(module, "MAX_FILES", 3)
    put(folder, {"nbepack/__init__.py": "", **{f"nbepack/many/{number}.py": "" for number in range(5)}})
    driver = Driver(tmp_path, folder)
    for _ in range(2):
        assert driver.sync.send(["nbepack"]) == ""
    text = f"The hosts do not get your modules: your modules and their folders have more than 3 files, many of them in {folder}"
    assert capsys.readouterr().out.startswith(f"{text}/nbepack/many: list what")
    assert driver.versions == []


def test_a_file_that_changes_while_it_is_read(folder, tmp_path, monkeypatch):
    """The search begins again; a file that never stands still is named."""
    put(folder, {"nbeown.py": "0"})
    driver, save = Driver(tmp_path, folder), CodeSync._save_file
    edits = iter("123456")

    def edit_first(self, path, digest):
        number = next(edits)
        if number in times:
            put(folder, {"nbeown.py": number * 9})
        save(self, path, digest)

    monkeypatch.setattr(CodeSync, "_save_file", edit_first)
    times = "12"
    assert driver.sync.send(["nbeown"])
    assert (folder / "nbeown.py").read_text() == "2" * 9
    times = "456"
    put(folder, {"nbeown.py": "new"})
    with pytest.raises(nbe.UsageError, match=r"nbeown.py changes all the time\.$"):
        driver.sync.send()


def test_ignored_modules_are_noted_once(folder, tmp_path, capsys):
    put(folder, {".gitignore": "nbelocal.py", "nbelocal.py": "", "nbeown.py": "import nbelocal"})
    driver = Driver(tmp_path, folder)
    for _ in range(2):
        driver.sync.send(["nbeown"])
    assert capsys.readouterr().out == f"The hosts do not get what .gitignore lists: {folder}/nbelocal.py.\n"


def test_a_file_that_cannot_be_read_is_named(folder, tmp_path):
    put(folder, {"nbepack/__init__.py": ""})
    driver = Driver(tmp_path, folder)
    (driver.folder / "code").write_text("in the way")
    with pytest.raises(nbe.UsageError, match=r"your modules cannot be sent to the hosts: .*run/code: File exists"):
        driver.sync.send(["nbepack"])


TEXT = """
%%time
import one, two.deep as three
    from four.inner import (
        five)
x = 1; import six
try: import seven
except ImportError: pass
# import not_this
from . import not_that
import_not = "important"
import eight  # import not_this either
import nine#noqa
import ten, \\
    eleven
"""


def test_names_in_a_text():
    assert names_in_text(TEXT) == {"one", "two", "four", "six", "seven", "eight", "nine", "ten", "eleven"}


def test_a_byte_order_mark_is_no_part_of_the_text(folder):
    """Editors of Windows write one at the beginning of Python files and of `.gitignore`."""
    put(folder, {".gitignore": "\ufeffnbesecret.py", "nbeown.py": "\ufeffimport nbehelper, nbesecret"})
    put(folder, {"nbehelper.py": "", "nbesecret.py": ""})
    assert found(folder, "nbeown") == ["nbehelper.py", "nbeown.py"]


def test_names_in_a_function():
    """Of a notebook's function, of its arguments, of those that it uses, of their classes and closures."""
    namespace = {"__name__": "__main__"}
    source = """
import functools
class Base:
    def method(self):
        import nbe_one.inner
class Own(Base):
    @property
    def number(self):
        from nbe_two import x
def helper():
    return [__import__, (lambda: Own())]
def outer(value):
    @functools.wraps(helper)
    def inner():
        import nbe_three
        return value, helper
    return inner
program = outer(3)
"""
    exec(source, namespace)
    assert names_in_function(partial(print, namespace["program"])) == {"nbe_one", "nbe_two", "nbe_three"}
    assert names_in_function(os.path.join) == set()
    call = partial(print, len, (namespace["helper"],), {})  # as `cluster.run(len, helper)` makes it
    assert names_in_function(call) == {"nbe_one", "nbe_two"}
    assert names_in_function(partial(print, {"build": [namespace["helper"]]})) == {"nbe_one", "nbe_two"}


def test_what_gitignore_says_is_read_again_when_it_has_changed(tmp_path, monkeypatch):
    """A search uses what the last one has found out, but not after a change: of a file, or by a new one in a folder."""
    monkeypatch.setattr(git_ignores, "SETTLED", 0)
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("*.log\n")

    def excluded():
        found = git_ignores.ignores_of(tmp_path)
        return [
            name
            for name in ("a.log", "b.bin", "c.txt")
            if found.excludes(tmp_path / "package" / "inner" / name, is_folder=False)
        ]

    assert excluded() == ["a.log"]
    first = git_ignores.ignores_of(tmp_path)
    assert git_ignores.ignores_of(tmp_path) is first
    (tmp_path / ".gitignore").write_text("*.log\n*.bin\n")
    assert excluded() == ["a.log", "b.bin"]
    (tmp_path / "package" / ".gitignore").write_text("*.txt\n")
    assert excluded() == ["a.log", "b.bin", "c.txt"]
    (tmp_path / ".gitignore").unlink()
    assert excluded() == ["c.txt"]
