"""What an agent does with the user's modules: which lists it refuses, what it requests, and what it writes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from nbelastic.agent.code_store import CodeStore
from nbelastic.protocol import agent_messages
from nbelastic.protocol.code_messages import (
    BATCH,
    MAX_FILES,
    MAX_SIZE,
    PIECE,
    Code,
    CodeFile,
    CodePiece,
    CodeStored,
    FetchCode,
    PlacedCode,
    StoreCode,
    version_of,
    why_refused,
)
from nbelastic.transport.keys import Keys
from nbelastic.transport.server import Server
from tests.agent.test_agent import ALONE, configured
from tests.support.waiting import files_in, until_async

ELSEWHERE = "/not/on/this/host"


def listed(files: dict[str, bytes], folder: str = ELSEWHERE) -> Code:
    return Code(
        (folder,), tuple(CodeFile(0, path, sha256(data).hexdigest(), len(data)) for path, data in files.items())
    )


def order(code: Code, keep: tuple[str, ...] = ()) -> StoreCode:
    return StoreCode(version_of(code), code, keep)


class Host:
    """A store, and the driver that it fetches from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "agent" / "code"
        self.store = CodeStore("a", self.folder)
        self.requests: list[FetchCode] = []

    def get(self, files: dict[str, bytes], keep: tuple[str, ...] = (), folder: str = ELSEWHERE) -> CodeStored:
        code = listed(files, folder)
        answers = self.store.handle(order(code, keep))
        while isinstance(answers[0], FetchCode):
            self.requests.append(answers[0])
            answers = self.send(answers[0], list(files.values()))
        (stored,) = answers
        return stored

    def send(self, request: FetchCode, contents: list[bytes]) -> list[object]:
        answers: list[object] = []
        for file, offset, length in request.pieces:
            assert not answers
            data = contents[file][offset : offset + length]
            answers = self.store.handle(CodePiece(request.version, file, offset, data))
        return answers

    def imported(self, version: str) -> dict[str, bytes]:
        placed = msgspec.json.decode((self.folder / f"{version}.json").read_bytes(), type=PlacedCode)
        return {file.path: Path(placed.folders[file.folder], file.path).read_bytes() for file in placed.code.files}

    def written(self) -> list[Path]:
        return [path for path in self.folder.parent.rglob("*") if path.is_file()]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "agent").mkdir(mode=0o700)
    return Host(tmp_path)


BAD_PATHS = [
    *("/etc/passwd", "..", "../evil.py", "a/../../evil.py", "a/..", ".", "./a.py", "a//b.py", "a/", "/", ""),
    *("a\0b.py", "a\nb.py", "x" * 256, "/".join(["long"] * 300), "a/./b.py", "\udc80.py"),
]


@pytest.mark.parametrize("path", BAD_PATHS, ids=ascii)
def test_a_path_that_leads_elsewhere_writes_nothing(host: Host, tmp_path: Path, path: str) -> None:
    """A list with one bad path is refused as a whole, also if the rest is good."""
    code = Code((ELSEWHERE,), (*listed({"good.py": b"1"}).files, CodeFile(0, path, sha256(b"").hexdigest(), 0)))
    try:
        name = version_of(code)
    except UnicodeEncodeError:  # it cannot come over the link
        return
    (answer,) = host.store.handle(StoreCode(name, code))
    assert "code version that is refused" in answer.problem
    assert not host.written()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent"]


GOOD = listed({"a.py": b"1"})
FILE = GOOD.files[0]


@pytest.mark.parametrize(
    "bad",
    [
        replace(order(GOOD), version="0" * 64),
        replace(order(GOOD), version="../0"),
        replace(order(GOOD), keep=("../..",)),
        order(replace(GOOD, files=(FILE, FILE))),
        order(replace(GOOD, files=(FILE, replace(FILE, path="a.py/b.py")))),
        order(replace(GOOD, files=(replace(FILE, folder=1),))),
        order(replace(GOOD, files=(replace(FILE, folder=-1),))),
        order(replace(GOOD, files=(replace(FILE, digest="../../evil"),))),
        order(replace(GOOD, files=(replace(FILE, size=-1), replace(FILE, path="b.py", size=9)))),
        order(replace(GOOD, files=(replace(FILE, size=MAX_SIZE + 1),))),
        order(replace(GOOD, files=tuple(replace(FILE, path=f"{n}.py") for n in range(MAX_FILES + 1)))),
        order(replace(GOOD, folders=("/x",) * 65)),
    ],
)
def test_a_list_that_no_driver_makes_is_refused(host: Host, bad: StoreCode) -> None:
    """Wrong names, hashes, folders and sizes, files that are folders too, and lists that are too long."""
    assert why_refused(bad)
    (answer,) = host.store.handle(bad)
    assert answer.problem
    assert not host.written()


def test_a_version_is_fetched_in_pieces_and_placed(host: Host) -> None:
    """Long files come in several requests, empty and equal ones cost nothing, and only the user can read the files."""
    files = {"m.py": b"x = 1", "p/__init__.py": b"", "p/data.bin": b"d" * (BATCH + PIECE + 5), "p/same.py": b"x = 1"}
    stored = host.get(files)
    assert (stored.problem, stored.is_copied) == ("", True)
    assert host.imported(stored.version) == files
    assert len(host.requests) == 2
    assert sum(length for request in host.requests for _, _, length in request.pieces) == BATCH + PIECE + 5 + 5
    assert all(path.stat().st_mode & 0o077 == 0 for path in host.folder.rglob("*"))
    assert not host.store.is_fetching


def test_only_what_is_new_is_requested(host: Host) -> None:
    """After an edit, the agent requests the edited file alone. Versions that are not needed are removed."""
    first = host.get({"a.py": b"1", "b.py": b"2"})
    second = host.get({"a.py": b"1", "b.py": b"3"}, keep=(first.version,))
    assert [len(request.pieces) for request in host.requests] == [2, 1]
    assert host.imported(first.version)["b.py"] == b"2"
    third = host.get({"a.py": b"4"}, keep=(second.version,))
    assert sorted(path.stem for path in host.folder.glob("*.json")) == sorted((second.version, third.version))
    assert not (host.folder / first.version).exists()
    assert len(list((host.folder / "files").iterdir())) == 3


def test_a_file_that_a_worker_has_changed_is_requested_again(host: Host) -> None:
    """A module may write into its package's folder. The next version has the notebook's file all the same."""
    first = host.get({"p/net.py": b"1", "p/cache.json": b"{}"})
    (host.folder / first.version / "0" / "p" / "cache.json").write_bytes(b"[]")
    second = host.get({"p/net.py": b"2", "p/cache.json": b"{}"}, keep=(first.version,))
    assert host.imported(second.version) == {"p/net.py": b"2", "p/cache.json": b"{}"}
    assert host.imported(first.version)["p/cache.json"] == b"[]"


def test_a_host_with_the_same_files_gets_no_copy(host: Host, tmp_path: Path) -> None:
    """Files count as shared if their content is the same, not their name; after an edit elsewhere the agent fetches them."""
    here = tmp_path / "shared"
    here.mkdir()
    (here / "a.py").write_bytes(b"1")
    stored = host.get({"a.py": b"1"}, folder=str(here))
    assert (stored.is_copied, host.requests) == (False, [])
    assert host.imported(stored.version) == {"a.py": b"1"}
    edited = host.get({"a.py": b"2"}, folder=str(here))
    assert (edited.is_copied, host.imported(edited.version)) == (True, {"a.py": b"2"})
    (here / "a.py").unlink()
    (here / "a.py").symlink_to("/dev/zero")
    assert host.get({"a.py": b"3"}, folder=str(here)).is_copied


def test_pieces_that_were_not_requested_are_dropped(host: Host) -> None:
    """Pieces of another version, out of order, twice or of another length change nothing; wrong content is never placed."""
    code = listed({"a.py": b"12", "b.py": b"34"})
    (request,) = host.store.handle(order(code))
    good = CodePiece(request.version, 0, 0, b"12")
    for bad in (
        replace(good, version="0" * 64),
        replace(good, file=1),
        replace(good, offset=1),
        replace(good, data=b"1"),
    ):
        assert host.store.handle(bad) == []
    assert host.store.handle(good) == host.store.handle(good) == []
    (answer,) = host.store.handle(CodePiece(request.version, 1, 0, b"xx"))
    assert answer.problem == "it cannot store your code: b.py arrived damaged"
    assert not (host.folder / f"{request.version}.json").exists()
    assert host.store.handle(good) == []


def test_a_new_driver_asks_again(host: Host) -> None:
    """An order that comes twice is answered once; what has arrived is not requested again."""
    code, contents = listed({"a.py": b"12", "b.py": b"34"}), [b"12", b"34"]
    (first,) = host.store.handle(order(code))
    host.store.handle(CodePiece(first.version, 0, 0, b"12"))
    (second,) = host.store.handle(order(code))
    assert second.pieces == ((1, 0, 2),)
    (stored,) = host.send(second, contents)
    assert stored.is_copied
    assert stored.received == 2
    assert host.store.handle(order(code)) == [replace(stored, received=0)]


def test_versions_are_fetched_one_after_the_other(host: Host) -> None:
    """The job's version and a newer one: no worker starts before both are there."""
    one, two = listed({"a.py": b"1"}), listed({"a.py": b"2"})
    (first,) = host.store.handle(order(one))
    assert host.store.handle(order(two, keep=(first.version,))) == []
    stored, second = host.send(first, [b"1"])
    assert (stored.version, host.store.is_fetching) == (version_of(one), True)
    (last,) = host.send(second, [b"2"])
    assert (last.version, host.store.is_fetching) == (version_of(two), False)


def test_a_version_that_is_not_needed_any_more_is_given_up(host: Host) -> None:
    """A driver that does not know the version that is on its way would never send the rest of it."""
    host.store.handle(order(listed({"a.py": b"1"})))
    assert host.get({"a.py": b"2"}).is_copied
    assert not host.store.is_fetching


def test_a_full_disk_is_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer says why, and the store goes on."""
    with monkeypatch.context() as full:
        full.setattr("nbelastic.agent.code_store.replace_private", fail)
        problem = host.get({"a.py": b"1"}).problem
    assert problem == "it cannot store your code: No space left on device: /tmp/x"
    assert host.get({"a.py": b"1"}).problem == ""


def test_an_old_version_that_cannot_be_removed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent lives on, and the next order removes it."""
    first = host.get({"a.py": b"1"})
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "unlink", lambda *_, **__: fail(Path(), ""))
        host.get({"a.py": b"2"})
    assert (host.folder / f"{first.version}.json").exists()
    host.get({"a.py": b"3"})
    assert not (host.folder / f"{first.version}.json").exists()


def fail(path: Path, pieces: object) -> None:
    raise OSError(28, "No space left on device", "/tmp/x")


def test_an_agent_refuses_a_path_that_leads_elsewhere(tmp_path: Path) -> None:
    """A real agent gets such a list over its link: it answers with a problem, writes nothing, and lives on."""

    async def story() -> None:
        received: list[object] = []
        server = Server(Keys.make(), lambda _, message: received.append(message), 0.1)
        await server.start()
        config = configured(tmp_path, driver=server.address, keys=server._keys.for_clients())
        with subprocess.Popen([sys.executable, "-c", ALONE], stdin=subprocess.PIPE) as agent:  # noqa: ASYNC220
            try:
                agent.stdin.write(msgspec.json.encode(config) + b"\n")
                agent.stdin.flush()
                await until_async(lambda: received)
                bad = listed({"good.py": b"", "../../../evil.py": b""})
                for code in (bad, listed({"good.py": b""})):
                    server.send("agent/a~1", order(code))
                await until_async(lambda: len([m for m in received if isinstance(m, CodeStored)]) == 2)
                refused, stored = [m for m in received if isinstance(m, CodeStored)]
                assert (refused.version, stored.version) == (version_of(bad), version_of(code))
                assert "'../../../evil.py' is not a path below a folder" in refused.problem
                assert (stored.problem, stored.is_copied) == ("", True)
                assert [path.name for path in files_in(tmp_path) if path.name.endswith(".py")] == ["good.py"]
                assert not [path for path in tmp_path.parent.iterdir() if path.name == "evil.py"]
                server.send("agent/a~1", agent_messages.StopAgent())
                assert await asyncio.to_thread(agent.wait, 20.0) == 0
            finally:
                agent.kill()
                await server.stop()

    asyncio.run(story())
