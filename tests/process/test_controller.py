"""ipyparallel's controller dies, or its kernel does, or both; engines and what runs on them do not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

import ipyparallel as ipp
import psutil
import pytest

import nbelastic as nbe
from nbelastic.ipp.client import ControllerLostError, connect
from nbelastic.ipp.supervisor import Supervisor
from nbelastic.provision.tcp_proxy import ProxySet
from nbelastic.system.process_identity import is_alive, pid_of
from nbelastic.system.processes import disown
from tests.support.driver_lease import named, until_the_end
from tests.support.processes import alive, controller_file
from tests.support.waiting import until, until_async

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
    client = cluster.client
    # What an engine answers before the client is back is lost, and told as that.
    until(lambda: len(client._open_connections) == len(client._context.watched), what="the client to be connected")
    until(lambda: known(cluster) == len(cluster.workers), what="all engines to be known")


def known(cluster: nbe.Cluster) -> int:
    """How many engines the controller knows; -1 if it has ended before it could answer."""
    try:
        return len([name for name in cluster.client.queue_status() if name != "unassigned"])
    except ControllerLostError:
        return -1


def test_a_killed_controller_is_started_again(trains):
    """The training does not notice, a newcomer joins, results arrive; cells and ipyparallel's client work as before."""
    training = trains("localhost:2", min=1)
    training.wait_for_world(2)
    generation, numbers = training.cluster.status().generation, training.cluster.client.ids
    before = killed(training.cluster)
    again(training.cluster, before)
    assert training.cluster.status().generation == generation
    before = killed(training.cluster)
    training.cluster.add_host("localhost:3")  # its engine asks a controller that is not there
    training.wait_for_world(3)
    assert started_again(training.cluster) > before
    assert len(training.finish()) == 3
    rows = training.cluster.execute("print('here')", timeout=20)
    assert [row[1:] for row in rows] == [("here\n", "", None)] * 3
    assert training.cluster.client.ids[:2] == numbers
    view = training.cluster.client[:]
    view["x"] = 5
    assert view.pull("x", block=True) == [5, 5, 5]


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


def test_nothing_of_ours_depends_on_it(make):
    """It is stopped, and kept so: a program, with an argument and a result, and a cell run as if it were there."""
    cluster = make("localhost:2", min=2)
    with deaf(cluster):
        assert cluster.run(sorted, [2, 1]).result(timeout=20) == [[1, 2]] * 2
        rows = cluster.execute("print('here')", timeout=20)
        assert [row[1:] for row in rows] == [("here\n", "", None)] * 2


def waiting(folder: str) -> str:
    """Say that it runs, and wait for the word."""
    Path(folder, f"{os.getpid()}.waits").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return "the value"


def test_a_call_outlives_the_controller(make, tmp_path):
    """One of `%px` that runs while the controller is killed has its result, and what it prints afterwards is seen."""
    cluster = make("localhost:2", min=2)
    source = f"import os, time\nopen('{tmp_path}/' + str(os.getpid()) + '.waits', 'w')\n"
    source += f"while not os.path.exists('{tmp_path}/go'):\n    time.sleep(0.01)\nprint('done')"
    result = cluster.client[:].execute(source)
    until(lambda: len(list(tmp_path.glob("*.waits"))) == 2)
    again(cluster, killed(cluster))
    (tmp_path / "go").touch()
    result.get(timeout=30)
    until(lambda: result.stdout == ["done\n"] * 2, what="both outputs")


def test_a_lost_answer_is_an_error(make, tmp_path):
    """The controller had it, and was killed before it passed it on: whoever waits for it is told, and the next call works."""
    cluster = make("localhost:1", min=1)
    view = cluster.client[:]
    result = view.apply_async(waiting, str(tmp_path))
    until(lambda: list(tmp_path.glob("*.waits")))
    with deaf(cluster):
        (tmp_path / "go").touch()
        until(lambda: unread(json.loads(controller_file(cluster, "-engine.json"))["mux"]))
    with pytest.raises(ipp.error.CompositeError, match="ControllerLostError"):
        result.get(timeout=30)
    assert view.apply_async(sorted, [2, 1]).get(timeout=20) == [[1, 2]]


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
        self.kernel = self._run("controller_kernel.py", self.folder, lease)
        self.controller = self.kernel.stdout.readline().strip()
        self.group = [psutil.Process(pid_of(self.controller))]
        self.group += self.group[0].children(recursive=True)
        (self.folder / "profile").mkdir()
        self.uuid = (
            self._run("lone_engine.py", self.folder / "connection", self.folder / "profile").stdout.readline().strip()
        )
        return self

    def _run(self, script: str, *args: object) -> Any:
        self.processes.append(run(script, *args))
        return self.processes[-1]

    def kill_kernel(self) -> None:
        self.kernel.kill()
        self.kernel.wait()

    def caretaker(self) -> Supervisor:
        return Supervisor(self.folder / "ipython", "kept", 8.0, named(self.folder, 60.0))

    def check(self, controller: Supervisor) -> None:
        """A client of this controller finds the engine, and what it knows."""
        with closing(connect(controller.information("client"), "kept", str(self.folder / "ipython"))) as client:
            assert client.wait_for([self.uuid], 20.0)
            client[:].execute("x = globals().get('x', 0) + 1")
            client[:].execute(f"open('{self.folder}/x', 'w').write(str(x))").get(timeout=20)

    def x(self) -> str:
        return (self.folder / "x").read_text()

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
    """The kernel is killed, and perhaps the controller with it: the next kernel finds the engine, and all that it knows."""
    kept = keep(60.0)
    kept.kill_kernel()
    assert is_alive(kept.controller)
    if dies == "both":
        kept.group[0].kill()
        until(lambda: not alive(kept.group[0].pid))

    async def go_on() -> None:
        controller = kept.caretaker()
        came: asyncio.Queue[None] = asyncio.Queue()
        controller._on_restart = lambda: came.put_nowait(None)
        await controller.attach()
        assert (controller.process == kept.controller) is (dies == "kernel")
        await asyncio.to_thread(kept.check, controller)
        assert kept.x() == "1"
        os.kill(pid_of(controller.process), signal.SIGKILL)  # it may be no child of ours
        await asyncio.wait_for(came.get(), 20)
        await asyncio.to_thread(kept.check, controller)
        await controller._close()  # as the driver's process ends
        if controller._child is not None:
            disown(controller._child)
        assert is_alive(controller.process)

        last = kept.caretaker()
        await last.attach()
        await asyncio.to_thread(kept.check, last)
        assert kept.x() == "3"
        await last.stop()
        assert not is_alive(last.process)

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
    """An answer was on its way through a gate that is killed: whoever waits for it is told."""

    async def go_on() -> None:
        driver_lease = until_the_end(tmp_path)
        controller, doors = Supervisor(tmp_path / "ipython", "behind", 8.0, driver_lease), ProxySet(driver_lease)
        await controller.start()
        (tmp_path / "connection").write_text(doors.proxied_connection("127.0.0.1", controller.connection))
        (tmp_path / "profile").mkdir()
        with run("lone_engine.py", tmp_path / "connection", tmp_path / "profile") as engine, closing(engine.stdin):
            await asyncio.to_thread(_lose_an_answer, controller, doors, engine.stdout.readline().strip())
        await controller.stop()
        doors.close()

    def _lose_an_answer(controller: Supervisor, doors: ProxySet, uuid: str) -> None:
        with closing(connect(controller.information("client"), "behind", str(tmp_path / "ipython"))) as client:
            assert client.wait_for([uuid], 20.0)
            (gate,) = [pid_of(gate.process) for gate in doors.saved]
            stop(gate)
            result = client[0].apply_async(sorted, [2, 1])
            port = int(json.loads(controller.connection)["mux"])
            until(lambda: unread(port, at=2), what="something to come to the gate")
            os.kill(gate, signal.SIGKILL)
            until(lambda: not alive(gate))
            doors.restart_dead()
            with pytest.raises(ipp.RemoteError, match="ControllerLostError"):
                result.get(timeout=30)
            assert client[0].apply_async(sorted, [2, 1]).get(timeout=20) == [1, 2]

    asyncio.run(go_on())


def test_a_driver_is_killed_while_it_starts_a_controller(tmp_path):
    """The next driver finds that one, which is not there yet, and has one in the end: it takes no port from its own."""

    def of_a_driver() -> Supervisor:
        return Supervisor(tmp_path / "ipython", "half", 8.0, until_the_end(tmp_path))

    async def story() -> None:
        first = of_a_driver()
        await first.start()
        await first.kill()
        starting = asyncio.create_task(first.restart())
        await asyncio.sleep(0)  # it has begun the process, and waits for it
        starting.cancel()
        await first._close()
        half = first._child
        assert half is not None
        assert half.poll() is None
        second = of_a_driver()
        await second.attach()
        await asyncio.to_thread(half.wait, 20)  # nobody has waited for it to be there
        await until_async(lambda: is_alive(second.process) and pid_of(second.process) != half.pid)
        with closing(connect(second.information("client"), "half", str(tmp_path / "ipython"))) as client:
            assert await asyncio.to_thread(client.queue_status) == {"unassigned": 0}
        await second.stop()

    asyncio.run(story())
