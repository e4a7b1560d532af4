"""ipyparallel's controller dies, or its kernel does, or both; engines and what runs on them do not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

import ipyparallel as ipp
import psutil
import pytest

import nbelastic as nbe
from nbelastic.driver.engines import Engines
from nbelastic.driver.gate import Doors
from nbelastic.presence import identity, lives, pid_of
from tests.process.observing import alive, controller_file, until

HERE = Path(__file__).parent


def controller_of(cluster: nbe.Cluster) -> int:
    """The controller's."""
    return pid_of(controller_file(cluster, ".process"))


def killed(cluster: nbe.Cluster) -> int:
    """Kill the controller; how many have been started again so far."""
    before = started_again(cluster)
    os.kill(controller_of(cluster), signal.SIGKILL)
    return before


def started_again(cluster: nbe.Cluster) -> int:
    return sum(event.kind == "controller-started" for event in cluster.events)


def again(cluster: nbe.Cluster, before: int) -> None:
    """Wait until there is another one, which our client has met and which knows all workers."""
    until(lambda: started_again(cluster) > before)
    until(lambda: known(cluster) == len(cluster.workers), what="all engines to be known")


def known(cluster: nbe.Cluster) -> int:
    return len([name for name in cluster.client.queue_status() if name != "unassigned"])


def test_a_killed_controller_is_started_again(trains):
    """The training does not notice, a newcomer joins, results arrive; cells and ipyparallel's client work as before."""
    training = trains("localhost:2", min=1)
    training.runs(2)
    epoch, numbers = training.cluster.status().epoch, training.cluster.client.ids
    before = killed(training.cluster)
    again(training.cluster, before)
    assert training.cluster.status().epoch == epoch
    before = killed(training.cluster)
    training.cluster.add_host("localhost:3")  # its engine asks a controller that is not there
    training.runs(3)
    assert started_again(training.cluster) > before
    assert len(training.finish()) == 3
    rows = training.cluster.execute("print('here')", timeout=20)
    assert [row[1:] for row in rows] == [("here\n", "", None)] * 3
    assert training.cluster.client.ids[:2] == numbers
    view = training.cluster.client[:]
    view["x"] = 5
    assert view.pull("x", block=True) == [5, 5, 5]


def test_a_cell_outlives_the_controller(make, tmp_path):
    """One that runs while the controller is killed has its result, and what it prints afterwards is seen."""
    cluster = make("localhost:2", min=2)
    go = tmp_path / "go"
    source = f"import os, time\nopen('{tmp_path}/' + str(os.getpid()), 'w')\n"
    source += f"while not os.path.exists('{go}'):\n    time.sleep(0.01)\nprint('done')"
    rows: list[Any] = []
    asking = threading.Thread(target=lambda: rows.extend(cluster.execute(source, timeout=30)))
    asking.start()
    until(lambda: len(list(tmp_path.glob("[0-9]*"))) == 2)
    again(cluster, killed(cluster))
    go.touch()
    asking.join()
    assert [row[1:] for row in rows] == [("done\n", "", None)] * 2


def stop(victim: int) -> None:
    os.kill(victim, signal.SIGSTOP)
    until(lambda: psutil.Process(victim).status() == psutil.STATUS_STOPPED)


@contextmanager
def deaf(cluster: nbe.Cluster) -> Iterator[None]:
    """What is sent to the controller in here is lost: it is stopped, and killed afterwards."""
    victim = controller_of(cluster)
    stop(victim)
    yield
    os.kill(victim, signal.SIGKILL)


def unread(port: int, at: int = 1) -> bool:
    """Whether something has come to this port (`at=2`: from this port) that a process has not read."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[at].endswith(f":{port:04X}") and not row[4].endswith(":00000000") for row in rows)


def port_of(cluster: nbe.Cluster, side: str) -> int:
    """Of the controller, for programs and cells (`client`) or for what becomes of them (`engine`)."""
    if side == "client":
        return int(cluster.client._config["mux"].rpartition(":")[2])
    return int(json.loads(controller_file(cluster, "-engine.json"))["mux"])


def finishing(folder: str) -> str:
    """Say so, and give back something."""
    with open(f"{folder}/{os.getpid()}", "a") as file:
        file.write("ran\n")
    return "the value"


def waiting(folder: str) -> str:
    Path(folder, f"{os.getpid()}.waits").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return finishing(folder)


def test_a_lost_result_is_asked_for_again(make, tmp_path):
    """The controller had it, and was killed before it passed it on: the job has its results all the same."""
    cluster = make("localhost:1", min=1)
    job = cluster.run(waiting, str(tmp_path))
    until(lambda: list(tmp_path.glob("*.waits")))
    with deaf(cluster):
        (tmp_path / "go").touch()
        until(lambda: unread(port_of(cluster, "engine")))
    assert job.result(timeout=30) == ["the value"]


def test_a_lost_program_is_sent_again(make, tmp_path):
    """The controller had it, and was killed before it passed it on: it runs, and once."""
    cluster = make("localhost:1", min=1)
    with deaf(cluster):
        job = cluster.run(finishing, str(tmp_path))
        until(lambda: unread(port_of(cluster, "client")))
    assert job.result(timeout=30) == ["the value"]
    assert (tmp_path / str(cluster.workers[0].pid)).read_text() == "ran\n"


def test_a_lost_answer_of_a_cell_is_an_error(make, tmp_path):
    """Whether it ran is not known: it is not run again, and nobody waits for ever."""
    cluster = make("localhost:1", min=1)
    rows: list[Any] = []
    asking = threading.Thread(target=lambda: rows.extend(cluster.execute("1 + 1", timeout=30)))
    with deaf(cluster):
        asking.start()
        until(lambda: unread(port_of(cluster, "client")))
    asking.join()
    assert ["ControllerLostError" in row[3] for row in rows] == [True]  # with a traceback
    assert [row[3] for row in cluster.execute("1 + 1", timeout=20)] == [None]


def test_the_next_controller_has_no_ghosts(make):
    """An engine that dies while there is no controller is not among those that the next one knows, nor the client's."""
    cluster = make("localhost:2", min=1)
    victim = cluster.workers[0]
    with deaf(cluster):
        before = started_again(cluster)
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: all(w.id != victim.id for w in cluster.workers))
    until(lambda: started_again(cluster) > before)
    cluster.wait(2)
    until(lambda: known(cluster) == len(cluster.client.ids) == 2, what="both engines to be known")  # one says so again
    assert sorted(cluster.client[:].apply_sync(os.getpid)) == sorted(w.pid for w in cluster.workers)


def test_the_heart_monitor_is_part_of_it(make):
    """Killed alone, it takes the controller along, and both are started again."""
    cluster = make("localhost:1", min=1)
    before = controller_of(cluster)
    (monitor,) = psutil.Process(before).children()
    monitor.kill()
    again(cluster, 0)
    assert not alive(before)


def run(script: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / script), *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Kept:
    """A controller whose kernel is a process of its own, and an engine that belongs to neither."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        self.group: list[psutil.Process] = []  # the controller's

    def start(self, lease: float) -> Self:
        self.kernel = self._run("kept_kernel.py", self.folder, lease)
        self.controller = self.kernel.stdout.readline().strip()
        self.group = [psutil.Process(pid_of(self.controller))]
        self.group += self.group[0].children(recursive=True)
        (self.folder / "profile").mkdir()
        self.uuid = (
            self._run("lone_engine.py", self.folder / "connection", self.folder / "profile").stdout.readline().strip()
        )
        until((self.folder / "begun").exists)
        return self

    def _run(self, script: str, *args: object) -> Any:
        self.processes.append(run(script, *args))
        return self.processes[-1]

    def kill_kernel(self) -> None:
        self.kernel.kill()
        self.kernel.wait()

    def engines(self) -> Engines:
        (self.folder / "driver").write_text(identity(os.getpid()))
        self.there: asyncio.Queue[str] = asyncio.Queue()
        keep = (self.folder / "driver", 60.0)
        return Engines(str(self.folder / "ipython"), "kept", 8.0, self.there.put_nowait, keep=keep)

    async def check(self, engines: Engines) -> None:
        """All that the kernel before has begun is known and can be gone on with."""
        assert await asyncio.wait_for(self.there.get(), 20) == self.uuid
        assert engines.knows(self.uuid)
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        engines.await_outcome(self.uuid, "job-1", outcome.set_result)
        assert await asyncio.wait_for(outcome, 20) == ("ok", 7, "")
        unknown: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        engines.await_outcome(self.uuid, "job-0", unknown.set_result)
        assert await asyncio.wait_for(unknown, 20) == ("error", "this worker has not run job-0", "")
        cell: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        engines.execute(self.uuid, "print(x + y)", cell.set_result)
        assert (await asyncio.wait_for(cell, 20)).stdout == "12\n"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        (self.folder / "driver").unlink(missing_ok=True)  # what is left ends with its next look
        until(lambda: not [process for process in self.group if alive(process.pid)], 5)


@pytest.fixture
def keep(tmp_path):
    """Start one: `keep(lease)`. Nothing of it is left."""
    started = []

    def start(lease: float) -> Kept:
        started.append(Kept(tmp_path))
        return started[-1].start(lease)

    yield start
    for kept in started:
        kept.close()


@pytest.mark.parametrize("dies", ["kernel", "both"])
def test_another_kernel_goes_on(keep, dies):
    """The kernel is killed, and perhaps the controller with it: the next kernel finds the engine and what became of its job."""
    kept = keep(60.0)
    kept.kill_kernel()
    assert lives(kept.controller)
    if dies == "both":
        kept.group[0].kill()
        until(lambda: not alive(kept.group[0].pid))

    async def go_on() -> None:
        engines = kept.engines()
        await engines.attach(kept.controller)
        assert (engines.process == kept.controller) is (dies == "kernel")
        (kept.folder / "go").touch()
        await kept.check(engines)
        os.kill(pid_of(engines.process), signal.SIGKILL)  # it may be no child of ours
        assert await asyncio.wait_for(kept.there.get(), 20) == kept.uuid
        kept.there.put_nowait(kept.uuid)
        await kept.check(engines)
        await engines.detach()
        assert lives(engines.process)

        last = kept.engines()
        await last.attach()
        await kept.check(last)
        await last.stop()
        assert not lives(last.process)

    asyncio.run(go_on())


def test_it_ends_when_nobody_comes(keep):
    """Within its lease, here of 2 s, and all of its group."""
    kept = keep(2.0)
    assert all(alive(process.pid) for process in kept.group)
    died = time.monotonic()
    kept.kill_kernel()
    until(lambda: not [process for process in kept.group if alive(process.pid)], 10)
    assert time.monotonic() - died > 0.5


def test_it_shows_no_secret(keep):
    """Neither its arguments nor its environment have a key, and its files are for their owner alone."""
    kept = keep(60.0)
    files = [path for path in (kept.folder / "ipython").rglob("*") if path.is_file() and path.suffix != ".log"]
    (keys,) = [json.loads(path.read_text()) for path in files if path.suffix == ".keys"]
    seen = "".join(str(process.cmdline()) + str(process.environ()) for process in kept.group)
    assert keys["key"] not in seen
    assert keys["secret"] not in seen
    security = [path for path in files if path.parent.name == "security"]
    assert len(security) == 4
    assert {path.stat().st_mode & 0o777 for path in security} == {0o600}


def test_what_a_broken_connection_takes_along(tmp_path):
    """It was on its way through a gate that is killed: a cell fails, a program runs, once, and is heard of."""

    async def go_on() -> None:
        there: asyncio.Queue[str] = asyncio.Queue()
        engines, doors = Engines(str(tmp_path / "ipython"), "behind", 8.0, there.put_nowait), Doors()
        await engines.start()
        (tmp_path / "connection").write_text(doors.lead_engines("127.0.0.1", engines.connection))
        (tmp_path / "profile").mkdir()
        with run("lone_engine.py", tmp_path / "connection", tmp_path / "profile") as engine, closing(engine.stdin):
            uuid = await asyncio.wait_for(there.get(), 20)
            (gate,) = [pid_of(gate.process) for gate in doors.saved]
            stop(gate)
            cell: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            engines.execute(uuid, "1 + 1", cell.set_result)
            outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            source = f"with open('{tmp_path}/ran', 'a') as file:\n    file.write('ran ')\n7"
            engines.run_cell(uuid, "job-1", str(tmp_path), (source, None), outcome.set_result)
            port = int(json.loads(engines.connection)["mux"])
            until(lambda: unread(port, at=2), what="something to come to the gate")
            os.kill(gate, signal.SIGKILL)
            until(lambda: not alive(gate))
            doors.mend()
            assert await asyncio.wait_for(outcome, 30) == ("ok", 7, "")
            assert (tmp_path / "ran").read_text() == "ran "
            with pytest.raises(ipp.RemoteError, match="ControllerLostError"):
                (await asyncio.wait_for(cell, 30)).get()
        await engines.stop()
        doors.close()

    asyncio.run(go_on())
