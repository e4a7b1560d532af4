"""ipyparallel's controller, its kernel or both are killed; the engines and the programs on them go on."""

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
from nbelastic.ipp import supervisor
from nbelastic.ipp.client import ControllerLostError, connect
from nbelastic.ipp.supervisor import Supervisor
from nbelastic.provision.tcp_proxy import TcpProxy
from nbelastic.system.process_identity import is_alive, pid_of
from nbelastic.system.processes import disown
from tests.process import programs
from tests.process.training import Training
from tests.support.driver_lease import named, until_the_end
from tests.support.processes import alive, controller_file
from tests.support.waiting import until, until_async

HERE = Path(__file__).parent


def controller_of(cluster: nbe.Cluster) -> int:
    """The pid of ipyparallel's controller, to which all workers are connected."""
    until(lambda: len(cluster.client.ids) == len(cluster.workers), what="all workers to be engines")
    return pid_of(controller_file(cluster, ".process"))


def kill_controller(cluster: nbe.Cluster) -> int:
    """Kill the controller; return how often it was restarted before."""
    before = count_restarts(cluster)
    os.kill(controller_of(cluster), signal.SIGKILL)
    return before


def count_restarts(cluster: nbe.Cluster) -> int:
    return sum(event.kind == "controller-started" for event in cluster.events)


def wait_for_restart(cluster: nbe.Cluster, before: int) -> None:
    """Wait until a new controller runs, the client is connected to it, and it knows all engines."""
    until(lambda: count_restarts(cluster) > before)
    client = cluster.client
    # An answer of an engine to an unconnected client is lost: the call raises ControllerLostError.
    until(lambda: len(client._open_connections) == len(client._context.watched), what="the client to be connected")
    until(lambda: count_engines(cluster) == len(cluster.workers), what="all engines to be known")


def count_engines(cluster: nbe.Cluster) -> int:
    """How many engines the controller knows; -1 if it ends before it answers."""
    try:
        return len([name for name in cluster.client.queue_status() if name != "unassigned"])
    except ControllerLostError:
        return -1


@pytest.mark.soak(share=0.2)
def test_a_killed_controller_is_restarted(make, tmp_path):
    """A killed controller is restarted; the training goes on, a newcomer joins, and results, cells and the client work."""
    cluster = make("localhost:2", min=2)  # a worker that begins to train at once is not an engine until the end
    numbers = cluster.client.ids
    training = Training(cluster, tmp_path / "steps", programs.train)
    training.wait_for_world(2)
    generation = cluster.status().generation
    before = kill_controller(training.cluster)
    wait_for_restart(training.cluster, before)
    assert training.cluster.status().generation == generation
    before = kill_controller(training.cluster)
    training.cluster.add_host("localhost:3")  # it wants to become an engine while no controller runs
    training.wait_for_world(3)
    until(lambda: count_restarts(training.cluster) > before)
    assert len(training.finish()) == 3
    rows = training.cluster.execute("print('here')", timeout=20)
    assert [row[1:] for row in rows] == [("here\n", "", None)] * 3
    assert training.cluster.client.ids[:2] == numbers
    view = training.cluster.client[:]
    view["x"] = 5
    assert view.pull("x", block=True) == [5, 5, 5]


def suspend_process(victim: int) -> None:
    os.kill(victim, signal.SIGSTOP)
    until(lambda: psutil.Process(victim).status() == psutil.STATUS_STOPPED)


@contextmanager
def stopped_controller(cluster: nbe.Cluster) -> Iterator[None]:
    """Stop the controller in this block, and kill it afterwards: all that is sent to it is lost."""
    victim = controller_of(cluster)
    suspend_process(victim)
    yield
    os.kill(victim, signal.SIGKILL)


def has_unread_data(port: int, at: int = 1) -> bool:
    """Whether a process has unread data that was sent to this port (`at=2`: from this port)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[at].endswith(f":{port:04X}") and not row[4].endswith(":00000000") for row in rows)


def test_jobs_and_cells_do_not_need_the_controller(make):
    """While the controller is stopped, a job gets its argument and returns its result, and a cell runs."""
    cluster = make("localhost:2", min=2)
    with stopped_controller(cluster):
        assert cluster.run(sorted, [2, 1]).result(timeout=20) == [[1, 2]] * 2
        rows = cluster.execute("print('here')", timeout=20)
        assert [row[1:] for row in rows] == [("here\n", "", None)] * 2


def wait_for_go(folder: str) -> str:
    """Touch a file to show that this call runs, and wait for the file `go`."""
    Path(folder, f"{os.getpid()}.waits").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return "the value"


def test_a_call_outlives_the_controller(make, tmp_path):
    """A call of `%px` that runs while the controller is killed returns its result and its later output."""
    cluster = make("localhost:2", min=2)
    source = f"import os, time\nopen('{tmp_path}/' + str(os.getpid()) + '.waits', 'w')\n"
    source += f"while not os.path.exists('{tmp_path}/go'):\n    time.sleep(0.01)\nprint('done')"
    result = cluster.client[:].execute(source)
    until(lambda: len(list(tmp_path.glob("*.waits"))) == 2)
    wait_for_restart(cluster, kill_controller(cluster))
    (tmp_path / "go").touch()
    result.get(timeout=30)
    until(lambda: result.stdout == ["done\n"] * 2, what="both outputs")


def test_a_lost_answer_is_an_error(make, tmp_path):
    """When the controller is killed with an answer in it, the call raises ControllerLostError; the next call works."""
    cluster = make("localhost:1", min=1)
    view = cluster.client[:]
    result = view.apply_async(wait_for_go, str(tmp_path))
    until(lambda: list(tmp_path.glob("*.waits")))
    with stopped_controller(cluster):
        (tmp_path / "go").touch()
        until(lambda: has_unread_data(json.loads(controller_file(cluster, "-engine.json"))["mux"]))
    with pytest.raises(ipp.error.CompositeError, match="ControllerLostError"):
        result.get(timeout=30)
    assert view.apply_async(sorted, [2, 1]).get(timeout=20) == [[1, 2]]


@pytest.mark.soak(seconds=10)
def test_the_next_controller_knows_no_lost_engine(make):
    """The next controller and the client do not know an engine that is lost while no controller runs."""
    cluster = make("localhost:2", min=1)
    victim = cluster.workers[0]
    with stopped_controller(cluster):
        before = count_restarts(cluster)
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: all(w.id != victim.id for w in cluster.workers))
    until(lambda: count_restarts(cluster) > before)
    cluster.wait(2)
    until(
        lambda: count_engines(cluster) == len(cluster.client.ids) == 2, what="both engines to be known"
    )  # one engine registers again
    assert sorted(cluster.client[:].apply_sync(os.getpid)) == sorted(w.pid for w in cluster.workers)


@pytest.mark.soak(share=0.2)
def test_a_killed_heart_monitor_ends_the_controller(make):
    """When the heart monitor is killed, the controller ends too, and both are restarted."""
    cluster = make("localhost:1", min=1)
    before = controller_of(cluster)
    (monitor,) = psutil.Process(before).children()
    monitor.kill()
    wait_for_restart(cluster, 0)
    assert not alive(before)


def run(script: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / script), *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class KeptController:
    """A controller whose kernel is a separate process, and an engine that outlives both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        self.group: list[psutil.Process] = []  # the controller and its children

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

    def supervisor(self) -> Supervisor:
        return Supervisor(self.folder / "ipython", "kept", 8.0, named(self.folder, 60.0))

    def check(self, controller: Supervisor) -> None:
        """Check that a client of this controller finds the engine and its variables."""
        with closing(connect(controller.information("client"), "kept", str(self.folder / "ipython"))) as client:
            assert not client.wait_for([self.uuid], 20.0)
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
        (self.folder / "driver").unlink(
            missing_ok=True
        )  # the controller's group ends when it sees that the driver has ended
        until(lambda: not [process for process in self.group if alive(process.pid)], 5)


@pytest.fixture
def keep(tmp_path):
    """Start a controller that outlives its kernel: `keep(lease)`. The fixture ends all its processes."""
    started = []

    def start(lease: float) -> KeptController:
        started.append(KeptController(tmp_path))
        return started[-1].start(lease)

    yield start
    for kept in started:
        kept.close()


@pytest.mark.parametrize("dies", [pytest.param("kernel", marks=pytest.mark.soak(seconds=5)), "both"])
def test_the_next_kernel_attaches_to_the_controller(keep, dies):
    """When the kernel is killed, alone or with the controller, the next kernel finds the engine and its variables."""
    kept = keep(60.0)
    kept.kill_kernel()
    assert is_alive(kept.controller)
    if dies == "both":
        kept.group[0].kill()
        until(lambda: not alive(kept.group[0].pid))

    async def story() -> None:
        controller = kept.supervisor()
        restarted: asyncio.Queue[None] = asyncio.Queue()
        controller._on_restart = lambda: restarted.put_nowait(None)
        await controller.attach()
        assert (controller.process == kept.controller) is (dies == "kernel")
        await asyncio.to_thread(kept.check, controller)
        assert kept.x() == "1"
        os.kill(pid_of(controller.process), signal.SIGKILL)  # it may not be a child of this process
        await asyncio.wait_for(restarted.get(), 20)
        await asyncio.to_thread(kept.check, controller)
        await controller._close()  # as when the driver's process ends
        if controller._child is not None:
            disown(controller._child)
        assert is_alive(controller.process)

        last = kept.supervisor()
        await last.attach()
        await asyncio.to_thread(kept.check, last)
        assert kept.x() == "3"
        await last.stop()
        assert not is_alive(last.process)

    asyncio.run(story())


@pytest.mark.soak(share=0.2)
def test_a_controller_without_a_kernel_ends_with_its_lease(keep):
    """When no kernel attaches, all processes of the controller end within the lease, here of 2 s."""
    kept = keep(2.0)
    assert all(alive(process.pid) for process in kept.group)
    died = time.monotonic()
    kept.kill_kernel()
    until(lambda: not [process for process in kept.group if alive(process.pid)], 10)
    assert time.monotonic() - died > 0.5


def test_a_controller_shows_no_secret(keep):
    """The controller has no key in its arguments or environment, and only the owner can read its files."""
    kept = keep(60.0)
    files = [path for path in (kept.folder / "ipython").rglob("*") if path.is_file() and path.suffix != ".log"]
    (keys,) = [json.loads(path.read_text()) for path in files if path.suffix == ".keys"]
    seen = "".join(str(process.cmdline()) + str(process.environ()) for process in kept.group)
    assert keys["key"] not in seen
    assert keys["secret"] not in seen
    security = [path for path in files if path.parent.name == "security"]
    assert len(security) == 4
    assert {path.stat().st_mode & 0o777 for path in security} == {0o600}


@pytest.mark.soak(share=0.2)
def test_an_answer_that_a_tcp_proxy_loses_is_an_error(tmp_path):
    """When a TCP proxy is killed with an answer in it, the call raises ControllerLostError; the next call works."""

    async def story() -> None:
        driver_lease = until_the_end(tmp_path)
        controller = Supervisor(tmp_path / "ipython", "behind", 8.0, driver_lease)
        await controller.start()
        information = json.loads(controller.connection)
        proxy = TcpProxy("127.0.0.1", information["mux"], tmp_path / "ports", driver_lease)
        proxy.start()
        (tmp_path / "connection").write_text(json.dumps({**information, "mux": proxy.port}))
        (tmp_path / "profile").mkdir()
        with run("lone_engine.py", tmp_path / "connection", tmp_path / "profile") as engine, closing(engine.stdin):
            await asyncio.to_thread(_lose_an_answer, controller, proxy, engine.stdout.readline().strip())
        await controller.stop()
        proxy.close()

    def _lose_an_answer(controller: Supervisor, proxy: TcpProxy, uuid: str) -> None:
        with closing(connect(controller.information("client"), "behind", str(tmp_path / "ipython"))) as client:
            assert not client.wait_for([uuid], 20.0)
            pid = pid_of(proxy.saved.process)
            suspend_process(pid)
            result = client[0].apply_async(sorted, [2, 1])
            port = int(json.loads(controller.connection)["mux"])
            until(lambda: has_unread_data(port, at=2), what="an answer to reach the TCP proxy")
            os.kill(pid, signal.SIGKILL)
            until(lambda: not alive(pid))
            assert proxy.restart_if_dead(time.monotonic())
            with pytest.raises(ipp.RemoteError, match="ControllerLostError"):
                result.get(timeout=30)
            assert client[0].apply_async(sorted, [2, 1]).get(timeout=20) == [1, 2]

    asyncio.run(story())


def test_a_controller_that_is_stopped_while_it_starts_is_replaced(tmp_path, monkeypatch):
    """SIGSTOP before it can serve: it is killed after some checks, and another one starts."""
    monkeypatch.setattr(supervisor, "FROZEN_INTERVAL", 0.02)

    async def story() -> None:
        controller = Supervisor(tmp_path / "ipython", "stopped", 8.0, until_the_end(tmp_path))
        starting = asyncio.create_task(controller.start())
        await until_async(lambda: controller.process)
        victim = controller.process
        os.kill(pid_of(victim), signal.SIGSTOP)
        await asyncio.wait_for(starting, 30)
        assert not is_alive(victim)
        assert is_alive(controller.process)
        await controller.stop()

    asyncio.run(story())


@pytest.mark.soak(share=0.2)
def test_a_driver_is_killed_while_it_starts_a_controller(tmp_path):
    """The next driver gets a controller; the unfinished one of the killed driver ends, and takes none of its ports."""

    def supervisor_of_a_driver() -> Supervisor:
        return Supervisor(tmp_path / "ipython", "half", 8.0, until_the_end(tmp_path))

    async def story() -> None:
        first = supervisor_of_a_driver()
        await first.start()
        await first.kill()
        starting = asyncio.create_task(first.restart())
        await asyncio.sleep(0)  # `restart` has started the process, and waits until it is ready
        starting.cancel()
        await first._close()
        half = first._child
        assert half is not None
        assert half.poll() is None
        second = supervisor_of_a_driver()
        await second.attach()
        await asyncio.to_thread(half.wait, 20)  # no driver waited until it was ready, so it ends
        await until_async(lambda: is_alive(second.process) and pid_of(second.process) != half.pid)
        with closing(connect(second.information("client"), "half", str(tmp_path / "ipython"))) as client:
            assert await asyncio.to_thread(client.queue_status) == {"unassigned": 0}
        await second.stop()

    asyncio.run(story())
