"""How a worker changes from one version of the user's modules to another one."""

from __future__ import annotations

import os
import sys
import threading
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from nbelastic.programs import user_code
from nbelastic.programs.user_code import UserCode
from nbelastic.protocol.code_messages import Code, CodeFile, PlacedCode, version_of
from nbelastic.worker.interrupts import ProgramReplaced

INIT = "nbepack/__init__.py"


class Host:
    """Places versions as a host's agent does: as copies or, with `in_place`, in the notebook's own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notebook = folder / "code", folder / "notebook"
        self.folder.mkdir()
        self.notebook.mkdir()

    def place(self, files: dict[str, str], *, in_place: bool = False) -> str:
        listed = tuple(CodeFile(0, path, sha256(text.encode()).hexdigest(), len(text)) for path, text in files.items())
        code = Code((str(self.notebook),), listed)
        version = version_of(code)
        root = self.notebook if in_place else self.folder / version / "0"
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        placed = PlacedCode((str(root),), code)
        (self.folder / f"{version}.json").write_bytes(msgspec.json.encode(placed))
        return version


@pytest.fixture
def host(tmp_path, monkeypatch):
    before, paths = set(sys.modules), list(sys.path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield Host(tmp_path)
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        if name.startswith("nbe") and not name.startswith("nbelastic"):
            del sys.modules[name]


@pytest.fixture
def names():
    """The variables of cells."""
    return {"kept": 7}


def run(source: str, names: dict) -> None:
    exec(source, names)


@pytest.mark.parametrize("in_place", [False, True])
def test_cells_get_the_new_version(host, names, in_place):
    """Modules, those that import them, and what cells imported: all are of the new version, edits within a second included."""
    code = UserCode(host.folder, {})
    outer = "from nbepack.inner import N\nimport nbepack.inner\ndef f(): return N, nbepack.inner.N\n"
    for number in range(1, 5):
        files = {"nbeouter.py": outer, INIT: "", "nbepack/inner.py": f"N = {number}\n"}
        code.use(host.place(files, in_place=in_place), names)
        if number == 1:
            run("import nbeouter, nbepack.inner as other\nfrom nbeouter import f as g", names)
        assert names["nbeouter"].f() == names["g"]() == (number, number)
        assert (names["other"].N, names["kept"]) == (number, 7)
    assert [path for path in sys.path if str(host.folder) in path] == ([] if in_place else [sys.path[0]])


def test_without_a_change_modules_stay(host, names):
    """A version with one module more, the same version again, and none at all leave what modules keep."""
    code = UserCode(host.folder, {})
    first = host.place({"nbeown.py": "cache = []"})
    code.use(first, names)
    run("import nbeown; nbeown.cache.append(1)", names)
    code.use(host.place({"nbeown.py": "cache = []", "nbemore.py": ""}), names)
    code.use("", names)
    run("import nbeown, nbemore; assert nbeown.cache == [1]", names)
    code.use(host.place({"nbeown.py": "cache = []", "nbemore.py": "N = 2"}), names)
    run("import nbemore; assert (nbeown.cache, nbemore.N) == ([], 2)", names)


def test_a_module_that_fails_changes_nothing(host, names):
    """The worker goes on with the old version; the next edit is tried anew."""
    code = UserCode(host.folder, {})
    code.use(host.place({"nbea.py": "N = 1", "nbeb.py": "N = 1"}), names)
    run("import nbea, nbeb", names)
    old = names["nbea"]
    bad = host.place({"nbea.py": "N = 2", "nbeb.py": "N = (2"})
    for _ in range(2):
        with pytest.raises(SyntaxError) as caught:
            code.use(bad, names)
        assert caught.value.filename.endswith("nbeb.py")
        assert names["nbea"] is old is sys.modules["nbea"]
    with pytest.raises(FileNotFoundError):
        code.use("0" * 64, names)
    code.use(host.place({"nbea.py": "N = 3", "nbeb.py": "N = 3"}), names)
    assert (names["nbea"].N, names["nbeb"].N) == (3, 3)


def test_modules_of_the_template_are_imported_again_if_they_have_changed(host, names, monkeypatch):
    """A fork has what the template has imported, also if the file was edited since."""
    monkeypatch.syspath_prepend(host.notebook)
    (host.notebook / "nbeown.py").write_text("N = 1")
    run("import nbeown", {})
    loaded = {name: digest for name, digest in user_code.own_modules(()).items() if name == "nbeown"}
    old = sys.modules["nbeown"]
    UserCode(host.folder, loaded).use(host.place({"nbeown.py": "N = 1"}, in_place=True), names)
    assert sys.modules["nbeown"] is old
    UserCode(host.folder, loaded).use(host.place({"nbeown.py": "N = 2"}, in_place=True), names)
    assert "nbeown" not in sys.modules


def test_only_the_users_modules_are_imported_again(tmp_path, monkeypatch):
    """Packages in a folder that `pip install --target` has made stay, and so do those of which the template has imported a module."""
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("nbeinstalled", "nbeinstalled/inner"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "nbefile.py").touch()
    run("import nbeinstalled.inner, nbefile", {})
    own = {"nbeinstalled", "nbeinstalled.inner", "nbefile"}
    assert own <= user_code.own_modules(()).keys()
    assert own & user_code.own_modules({"nbefile", "nbeinstalled.other"}).keys() == set()
    assert own & user_code.own_modules({"nbefile"}).keys() == own - {"nbefile"}
    (tmp_path / "nbeinstalled-1.0.dist-info").mkdir()
    assert not own & user_code.own_modules(()).keys()


def test_an_alias_of_an_installed_module_is_not_the_users(tmp_path, monkeypatch):
    """`requests.packages.urllib3` is a file of urllib3: its name is deeper than its folder."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    (folder / "nbealias.py").touch()
    run("import nbealias", {})
    monkeypatch.setitem(sys.modules, "nbeuser.packages.nbealias", sys.modules["nbealias"])
    assert not {"nbealias", "nbeuser.packages.nbealias"} & user_code.own_modules(()).keys()


def test_a_rejected_program_leaves_the_old_version(host, names):
    """The old program goes on with its own modules; one that was replaced does not come back."""
    code = UserCode(host.folder, {})
    first, second = host.place({"nbeown.py": "N = 1"}), host.place({"nbeown.py": "N = 2"})
    code.use(first, names)
    run("import nbeown", names)
    old = sys.modules["nbeown"]

    def run_new_program(error: BaseException, names: dict) -> None:
        with code.unless_it_fails():
            code.use(second, names)
            assert sys.modules["nbeown"] is not old
            raise error

    with pytest.raises(ValueError, match="own"):
        run_new_program(ValueError("own"), dict(names))
    assert sys.modules["nbeown"] is old
    with pytest.raises(ProgramReplaced):
        run_new_program(ProgramReplaced(None, None), names)
    assert names["nbeown"].N == 2


def test_own_copies_come_before_other_modules_of_the_name(host, names, tmp_path, monkeypatch):
    """A module of the host's own with the same name gives way to the notebook's."""
    (tmp_path / "nbeown.py").write_text("N = 'host'")
    monkeypatch.syspath_prepend(tmp_path)
    run("import nbeown", names)
    UserCode(host.folder, {}).use(host.place({"nbeown.py": "N = 'notebook'"}), names)
    assert names["nbeown"].N == "notebook"
    assert os.path.dirname(names["nbeown"].__file__) == sys.path[0]


def test_another_thread_may_import_meanwhile(host, names):
    """A thread of the worker imports what it needs while a cell's modules are looked for: the cell does not fail."""
    version, code = host.place({INIT: "x = 1"}), UserCode(host.folder, {})
    done = threading.Event()

    def import_others() -> None:
        while not done.is_set():
            for i in range(50):
                sys.modules[f"nbe_other_{i}"] = sys
            for i in range(50):
                del sys.modules[f"nbe_other_{i}"]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=import_others)
    thread.start()
    try:
        for _ in range(100):
            code.use(version, names)
            code._imported()
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
