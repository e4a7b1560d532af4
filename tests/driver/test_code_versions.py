"""The driver passes the user's modules on: to all hosts before it answers, and to hosts that join before their workers start."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from nbelastic.agent.code_store import CodeStore
from nbelastic.driver.code_versions import CodeVersions
from nbelastic.errors import UsageError
from nbelastic.protocol import agent_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.code_messages import Code, CodeFile, CodePiece, CodeStored, FetchCode, StoreCode, version_of
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.requests import CodeSent, SendCode
from tests.driver.fakes import DriverWithFakes, FakeAgent, run_story


@pytest.fixture(autouse=True)
def stores(tmp_path, monkeypatch):
    """Fake agents with a real store each, by host. A host in `broken` cannot store anything."""
    found: dict[str, CodeStore] = {}
    receive = FakeAgent.receive

    def receive_code(self, message):
        if not isinstance(message, StoreCode | CodePiece):
            receive(self, message)
            return
        name = self.spec.name
        store = found.setdefault(name, CodeStore(name, tmp_path / f"agent-{name}"))
        answers = [CodeStored(name, message.version, "no space")] if name == "broken" else store.handle(message)
        for answer in answers:
            self.send(answer)

    monkeypatch.setattr(FakeAgent, "receive", receive_code)
    return found


def save(folder: Path, files: dict[str, str]) -> str:
    """Save a version as a client does."""
    code = folder / "run" / "code"
    code.mkdir(parents=True, exist_ok=True)
    listed = []
    for path, text in files.items():
        digest = sha256(text.encode()).hexdigest()
        (code / digest).write_text(text)
        listed.append(CodeFile(0, path, digest, len(text)))
    version = Code(("/not/on/this/host",), tuple(listed))
    (code / f"{version_of(version)}.json").write_bytes(msgspec.json.encode(version))
    return version_of(version)


def texts(fakes: DriverWithFakes, kind: str) -> list[str]:
    return [event.text for event in fakes.driver.event_log.kept()[0] if event.kind == kind]


def test_the_answer_comes_when_all_hosts_have_the_version(tmp_path, stores):
    """Each host requests what it lacks. One event names the hosts; the same version again costs nothing."""

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:1,b:1", min=1) as fakes:
            version = save(tmp_path, {"one.py": "1", "two.py": "2"})
            sent = fakes.driver.request(SendCode(version))
            assert not sent.done()
            await fakes.settle()
            assert sent.result() == CodeSent(("a", "b"))
            second = save(tmp_path, {"one.py": "1", "two.py": "3"})
            fakes.driver.request(SendCode(second))
            await fakes.settle()
            assert texts(fakes, "code-sent") == ["a, b have your modules: 2 files, 0.0 kB sent"] * 2
            pieces = [message for _, message in fakes.sent if isinstance(message, CodePiece)]
            assert [piece.data for piece in pieces] == [b"1", b"2"] * 2 + [b"3"] * 2
            count = len(fakes.sent)
            again = fakes.driver.request(SendCode(second))
            assert again.result() == CodeSent(("a", "b"))
            assert not [m for _, m in fakes.sent[count:] if isinstance(m, StoreCode | CodePiece)]

    run_story(story)


def test_a_host_that_joins_has_the_modules_before_its_workers_start(tmp_path, stores):
    """The order comes before the first worker's, also the job's version if it is not the newest."""

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:1", min=1) as fakes:
            version = save(tmp_path, {"one.py": "1"})
            fakes.driver.request(SendCode(version))
            await fakes.settle()
            fakes.driver.post(ev.HostAdded(HostSpec("late", 1), "you"))
            await fakes.advance_time(1.0)
            kinds = [type(m) for peer, m in fakes.sent if peer.startswith("agent/late~")]
            assert kinds.index(StoreCode) < kinds.index(agent_messages.Spawn)
            assert texts(fakes, "code-sent")[-1] == "late has your modules: 1 files, 0.0 kB sent"

    run_story(story)


def test_hosts_that_are_lost_are_not_waited_for(tmp_path, stores):
    """A host that cannot store the modules is lost with the reason; one that dies meanwhile delays no one."""

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:1,broken:1,dying:1", min=1, cooldown=(99, 99)) as fakes:
            fakes.silent.add("dying")
            sent = fakes.driver.request(SendCode(save(tmp_path, {"one.py": "1"})))
            await fakes.settle()
            assert not sent.done()
            await fakes.advance_time(30.0)
            assert sent.result() == CodeSent(("a",))
            assert "no space" in fakes.driver.cluster.hosts["broken"].reason

    run_story(story)


def test_hosts_that_have_left_are_forgotten(tmp_path, stores):
    """Autoscaling gives each host a new name: the driver keeps nothing of the modules of hosts that have left."""

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:1", min=1) as fakes:
            for number in range(5):
                fakes.driver.post(ev.HostAdded(HostSpec(f"spot-{number}", 1)))
                await fakes.advance_time(1.0)
                fakes.driver.post(ev.HostRemoved(f"spot-{number}", now=True))
                await fakes.advance_time(5.0)
            assert list(fakes.driver._components.code_versions._hosts) == ["a", "spot-4"]

    run_story(story)


def test_old_versions_are_removed(tmp_path, stores):
    """Of many edits only the newest versions stay, here and on the hosts, with the files that they need."""

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:1", min=1) as fakes:
            for number in range(10):
                version = save(tmp_path, {"same.py": "x", "one.py": str(number)})
                fakes.driver.request(SendCode(version))
                await fakes.settle()
            waiting = save(tmp_path, {"two.py": "of another client"})
            fakes.driver.request(SendCode(version))
            for folder, contents in ((tmp_path / "run" / "code", 3 + 4 + 2), (tmp_path / "agent-a", 3 + 3 + 1)):
                assert len(list(folder.iterdir())) == contents
                assert (folder / f"{version}.json").exists()
            sent = fakes.driver.request(SendCode(waiting))
            await fakes.settle()
            assert sent.result() == CodeSent(("a",))

    run_story(story)


def test_a_version_that_is_not_there_is_refused(tmp_path, stores):
    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:1", min=1) as fakes:
            for version in ("0" * 64, "../../state"):
                with pytest.raises(UsageError, match="your code cannot be sent to the hosts"):
                    fakes.driver.request(SendCode(version)).result()

    run_story(story)


def test_a_request_for_other_files_gets_nothing(tmp_path, stores):
    """A holder of the client key can ask for the files of a version, in short pieces, and for nothing else."""

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:1", min=1) as fakes:
            version = save(tmp_path, {"one.py": "1"})
            fakes.driver.request(SendCode(version))
            await fakes.settle()
            count = len(fakes.sent)
            for wanted in ((1, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, 1 << 30)):
                fakes.deliver("agent/a~1", FetchCode("a", version, (wanted,)))
            fakes.deliver("agent/a~1", FetchCode("a", "../state", ((0, 0, 1),)))
            await fakes.settle()
            assert not [m for _, m in fakes.sent[count:] if isinstance(m, CodePiece)]
            assert not texts(fakes, "internal-error")

    run_story(story)


def test_the_next_driver_knows_the_versions(tmp_path, stores):
    """It reads those that the last one has saved; a list that is gone or damaged is left out."""

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:1", min=1) as fakes:
            first, second = (save(tmp_path, {"one.py": text}) for text in "12")
            for version in (first, second):
                fakes.driver.request(SendCode(version))
            await fakes.settle()
            writer, agents = fakes.driver._snapshot_writer, fakes.driver._components.agents
            assert writer.code == (first, second)
            (tmp_path / "run" / "code" / f"{first}.json").write_text("{}")

            def make() -> CodeVersions:
                return CodeVersions(
                    tmp_path / "run" / "code",
                    agents,
                    None,
                    writer,
                    lambda: "",
                    save=lambda: None,
                    record=lambda _: None,
                )

            assert make().newest == second
            (tmp_path / "run" / "code" / f"{second}.json").unlink()
            assert make().newest == ""

    run_story(story)
