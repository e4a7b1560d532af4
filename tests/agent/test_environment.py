"""Environments for requirements: what names them, who makes them, and when they are removed. No test needs the network."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nbelastic.agent import environment_maker
from nbelastic.agent.environment import READY, Environment, environments_folder, lock_of, making_lock_of, name_of
from tests.support.waiting import until
from tests.support.wheels import make_wheel

pytest.importorskip("uv")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    return environments_folder()


@pytest.fixture
def wheels(tmp_path):
    """A folder with wheels, and lines that have uv look nowhere else."""
    folder = tmp_path / "wheels"
    make_wheel(folder, "only-there", "1.0", "WORD = 'there'\n", requires=("torch>=2", "psutil"))
    make_wheel(folder, "psutil", "0.0.1", "WORD = 'older'\n")
    return [f"--no-index\n--find-links {folder}"]


def made(environment, timeout=60.0):
    """Whether it was made; `text` says why not."""
    environment.begin()
    answers = []

    def ended():
        answers.append(environment.check())
        return answers[-1] is not None

    until(ended, timeout)
    return answers[-1]


def in_it(environment, code):
    python = environment._folder / "bin" / "python"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def settings():
    """What `use` changes in this process."""
    from multiprocessing import spawn

    before = sys.path[:], spawn.get_executable(), os.environ["PATH"]
    yield before[0]
    sys.path[:], os.environ["PATH"] = before[0], before[2]
    spawn.set_executable(before[1])


def test_an_environment_has_the_hosts_packages_and_what_is_missing_there(wheels, cache, settings, monkeypatch):
    """uv installs the package, but not torch that it needs. A second agent uses the same environment at once."""
    monkeypatch.setattr("nbelastic.agent.environment.forkserver.ensure_running", lambda: None)
    environment = Environment([*wheels, "only-there"])
    assert not environment.use()
    assert made(environment), environment.text
    assert environment.packages == {"only_there": "1.0"}
    words = in_it(environment, "import only_there, psutil, torch; print(only_there.WORD, psutil.__version__)").split()
    import psutil

    assert words == ["there", psutil.__version__]
    assert in_it(environment, "import importlib.metadata as m; print(m.version('torch'), m.version('only-there'))")
    folder = environment._folder
    assert sorted(os.listdir(cache)) == sorted(path.name for path in (folder, lock_of(folder), making_lock_of(folder)))
    sys.path[:] = settings  # another agent's
    again = Environment([*wheels, "only-there"])
    assert again.use()
    assert again.packages == environment.packages
    sys.path[:] = settings
    assert not Environment([*wheels, "only-there", "psutil"]).use()


def test_a_version_that_the_requirements_name_goes_before_the_hosts(wheels, settings, monkeypatch):
    """The host's own package stays as it is."""
    monkeypatch.setattr("nbelastic.agent.environment.forkserver.ensure_running", lambda: None)
    environment = Environment([*wheels, "psutil==0.0.1"])
    assert made(environment), environment.text
    assert environment.packages == {"psutil": "0.0.1"}
    assert in_it(environment, "import psutil; print(psutil.WORD)") == "older"
    assert subprocess.run([sys.executable, "-c", "import psutil; psutil.pids"], check=False).returncode == 0


def test_a_failure_has_uvs_words_and_leaves_nothing(wheels, cache):
    """The text names the package."""
    environment = Environment([*wheels, "not-anywhere==3"])
    assert made(environment) is False
    assert environment.text.startswith("uv: No solution found")
    assert "not-anywhere" in environment.text
    assert "\n" not in environment.text
    assert os.listdir(cache) == [making_lock_of(environment._folder).name]


def test_a_user_without_a_home_folder_has_uv(monkeypatch):
    """Where a container's user has no account, uv is found beside Python or in the PATH, and in no folder named `~`."""
    places = []
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(
        environment_maker.shutil, "which", lambda name, path=None: places.append(path) or (path and f"/there/{name}")
    )
    assert environment_maker._uv() == ["/there/uv"]
    assert places == [None, os.path.join(sys.prefix, "bin")]


def test_without_uv_the_text_says_how_to_get_it(wheels, monkeypatch, tmp_path):
    """There is no uv in the PATH, in the home folder, or for this Python."""
    monkeypatch.setattr(environment_maker.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(environment_maker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(environment_maker.NotMadeError, match=r"uv is missing: `\S+ -m pip install uv` there"):
        environment_maker._uv()


NOT_FOUND = (
    "No solution found when resolving dependencies: Because a was not found and you require a, they are unsatisfiable."
)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            [
                "× No solution found when resolving dependencies:",
                "╰─▶ Because a was not found and you require",
                "a, they are unsatisfiable.",
            ],
            NOT_FOUND,
        ),
        (
            [
                "Resolved 3 packages in 2ms",
                "error: No solution found when resolving dependencies",
                "cause: Because a was not found and you require a, they are unsatisfiable.",
            ],
            NOT_FOUND,
        ),
        (
            ["error: Failed to fetch: `https://host/a`", "Caused by: timed out"],
            "Failed to fetch: `https://host/a`: timed out",
        ),
        (["waits", "and ends"], "waits and ends"),
        ([], ""),
    ],
)
def test_what_uv_prints_about_a_failure_becomes_one_line(lines, text):
    assert environment_maker.in_one_line(lines) == text


def test_a_uv_that_is_killed_is_named(tmp_path):
    """As where a pod's memory is full: what uv has printed before does not say why."""
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho Resolved 12 packages\nkill -9 $$\n")
    uv.chmod(0o755)
    with pytest.raises(
        environment_maker.NotMadeError, match=r"^uv was killed by signal 9: perhaps no memory was left$"
    ):
        environment_maker._run([str(uv)], tmp_path, "")


def test_a_file_of_the_agents_folder_hides_no_module_of_python(tmp_path, monkeypatch):
    """The agent's folder may be the notebook's, which has any files."""
    (tmp_path / "enum.py").write_text("WORD = 1\n")
    monkeypatch.chdir(tmp_path)
    assert environment_maker._paths_in(Path(sys.prefix), sys.executable)


def test_a_package_whose_metadata_cannot_be_read_is_not_lent(tmp_path):
    """Old packages have author names that are not UTF-8. The other packages of the host are there for uv."""
    for name in ("old", "other"):
        folder = tmp_path / "host" / f"{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        author = b"Author: J\xf6rg\n" if name == "old" else b""
        (folder / "METADATA").write_bytes(
            b"Metadata-Version: 1.1\nName: " + name.encode() + b"\nVersion: 1.0\n" + author
        )
    modules = tmp_path / "modules"
    modules.mkdir()
    environment_maker._borrow(modules, [str(tmp_path / "host")])
    assert os.listdir(modules) == ["other-1.0.dist-info"]


def test_passwords_in_addresses_are_not_shown(capsys):
    environment_maker._say("uv: https://me:word@host/simple failed, and https://token@host/x")
    assert capsys.readouterr().out == "uv: https://***@host/simple failed, and https://***@host/x\n"
    environment_maker._say(
        "https://me:pass@word@host/simple, git+https://me:a@b@host/repository.git@v1, and me@mail.example"
    )
    assert (
        capsys.readouterr().out
        == "https://***@host/simple, git+https://***@host/repository.git@v1, and me@mail.example\n"
    )


def test_a_maker_that_is_killed_leaves_no_environment_and_the_next_one_cleans_up(wheels, cache, settings, monkeypatch):
    """Kill the maker while uv runs: uv ends with it, and the next maker begins anew."""
    monkeypatch.setattr("nbelastic.agent.environment.forkserver.ensure_running", lambda: None)
    environment = Environment([*wheels, "only-there"])
    environment.begin()
    until(lambda: list(cache.glob(".*/environment")))
    environment.close()
    assert not environment.is_ready
    left = list(cache.glob(".*"))
    assert left
    assert not environment.use()
    assert made(environment), environment.text
    assert not list(cache.glob(".*"))


def test_one_process_at_a_time_makes_an_environment(wheels, cache, settings, monkeypatch):
    """A second agent waits for the first one's maker, and says so. It does not wait until the first one has used the environment."""
    monkeypatch.setattr("nbelastic.agent.environment.forkserver.ensure_running", lambda: None)
    first, second = (Environment([*wheels, "only-there"]) for _ in range(2))
    assert made(first), first.text
    with open(making_lock_of(first._folder), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second.begin()
        until(lambda: second.check() is None and second.text == "another agent makes it")
    until(lambda: second.check() is not None)
    assert second.is_ready


def test_an_environment_that_was_removed_is_made_again(wheels, settings, monkeypatch):
    """An agent that finds none does not keep others, or its own maker, from it."""
    monkeypatch.setattr("nbelastic.agent.environment.forkserver.ensure_running", lambda: None)
    environment = Environment([*wheels, "only-there"])
    folder = environment._folder
    lock_of(folder).touch()
    folder.mkdir()
    read = Path.read_bytes
    (folder / READY).touch()

    def removed(path):
        monkeypatch.setattr(Path, "read_bytes", read)
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", removed)
    assert not environment.use()
    with open(lock_of(folder), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("left", [b"", b"\0" * 20], ids=["empty", "zeros"])
def test_an_environment_that_a_crash_of_the_machine_has_damaged_is_made_again(wheels, settings, monkeypatch, left):
    """File systems may lose what was written last. The agent did not start."""
    monkeypatch.setattr("nbelastic.agent.environment.forkserver.ensure_running", lambda: None)
    environment = Environment([*wheels, "only-there"])
    environment._folder.mkdir(parents=True)
    (environment._folder / READY).write_bytes(left)
    assert not environment.use()
    assert made(environment), environment.text
    assert environment.packages == {"only_there": "1.0"}


def test_an_environment_that_no_one_has_used_for_long_is_removed(cache):
    """One that an agent uses stays, however old its last use."""
    old, used, new = (cache / name for name in ("old", "used", "new"))
    for folder in (old, used, new, cache / ".old-left"):
        folder.mkdir(parents=True)
    past = time.time() - environment_maker.UNUSED - 60
    for folder in (old, used, new):
        for file in (lock_of(folder), making_lock_of(folder)):
            file.touch()
            os.utime(file, (past, past))
    os.utime(lock_of(new))
    with open(lock_of(used), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        environment_maker.remove_unused(cache)
    left = ["new", "new.lock", "new.making", "used", "used.lock", "used.making"]
    assert sorted(os.listdir(cache)) == left
    with open(making_lock_of(new), "ab") as lock:
        os.utime(lock_of(new), (past, past))
        fcntl.flock(lock, fcntl.LOCK_EX)
        environment_maker.remove_unused(cache)  # now the used one goes, and the other one is being made
    assert sorted(os.listdir(cache)) == left[:3]


def test_use_counts_as_use(cache, settings):
    """Each use renews the 30 days."""
    environment = Environment(["one"])
    folder = environment._folder
    folder.mkdir(parents=True)
    (folder / READY).write_text(json.dumps({"packages": {}, "paths": []}))
    lock_of(folder).touch()
    os.utime(lock_of(folder), (1.0, 1.0))
    assert environment.use()
    assert time.time() - lock_of(folder).stat().st_mtime < 60


def test_a_name_stands_for_requirements_python_and_the_hosts_packages(tmp_path, monkeypatch):
    """Another package on the host, or another version of one, makes another environment."""
    path = [str(tmp_path), "", str(tmp_path / "missing.zip")]
    names = {name_of(["a"], path), name_of(["b"], path), name_of(["a", "b"], path)}
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    names.add(name_of(["a"], path))
    (tmp_path / "torch-2.13.0.dist-info").rename(tmp_path / "torch-2.14.0.dist-info")
    names.add(name_of(["a"], path))
    monkeypatch.setattr(sys, "prefix", "/another")
    names.add(name_of(["a"], path))
    assert len(names) == 6
    assert name_of(["a"], path) in names


def test_an_environment_in_a_folder_of_others_is_not_used(cache):
    """Another user could have put it there."""
    environment = Environment(["one"])
    environment._folder.mkdir(parents=True)
    (environment._folder / READY).write_text(json.dumps({"packages": {}, "paths": []}))
    cache.chmod(0o777)
    assert not environment.use()
    assert made(environment) is False
    assert environment.text == (
        f"{cache}: all users can write to {cache}, and could put other code there: `chmod go-w {cache}`; "
        "--env XDG_CACHE_HOME=FOLDER names another place"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes folders of other users")
@pytest.mark.parametrize("name", ["nbelastic", "uv"])
def test_nothing_is_made_in_a_folder_that_another_user_made_first(tmp_path, wheels, name):
    """A cache folder for all users, as /tmp is: the one who made its subfolder could swap what is in that later."""
    theirs = tmp_path / "cache" / name
    theirs.mkdir(parents=True)
    theirs.parent.chmod(0o1777)
    os.chown(theirs, 65534, 65534)
    environment = Environment([*wheels, "only-there"])
    assert made(environment) is False
    assert (
        f": {theirs} belongs to another user ({pwd.getpwuid(65534).pw_name}), who could put other code there; --env"
        in environment.text
    )


def test_an_environment_made_before_is_not_used_once_a_parent_is_open(tmp_path, cache):
    """Each start checks the folder and all its parents."""
    environment = Environment(["one"])
    environment._folder.mkdir(parents=True)
    (environment._folder / READY).write_text(json.dumps({"packages": {}, "paths": []}))
    (tmp_path / "cache").chmod(0o777)
    assert not environment.use()


def test_a_link_in_the_path_is_followed_once(tmp_path, monkeypatch, wheels, settings):
    """The environment is used at the place that was checked, wherever the link leads later."""
    monkeypatch.setattr("nbelastic.agent.environment.forkserver.ensure_running", lambda: None)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    environment = Environment([*wheels, "only-there"])
    assert made(environment), environment.text
    assert environment._folder.is_relative_to(tmp_path / "real")


def test_without_requirements_nothing_is_made(cache):
    environment = Environment(())
    assert environment.use()
    assert (environment.is_ready, environment.sentinels, environment.packages) == (True, [], {})
    assert not Path(cache).exists()
