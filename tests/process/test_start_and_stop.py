"""Start and stop of a cluster: its sockets, files and processes, and that a stop removes all of them."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pytest

import nbelastic as nbe
from nbelastic.driver.driver_snapshot import DriverSnapshot
from nbelastic.system.folder_paths import user_folder
from tests.process import programs
from tests.process.kernel_process import MARK, marked
from tests.support import warm_agents
from tests.support.processes import agent_of_worker, alive, driver_pid, leftovers, processes_of, run_folder
from tests.support.waiting import until, until_none

ROOT = Path(__file__).parents[2]


def test_nothing_is_left_after_a_stop(make):
    """A stop leaves no run folder, lock or process, not even of the user's code. A second stop has no effect."""
    cluster = make("localhost:2,127.0.0.2:1", min=3)
    assert len(cluster.client.ids) == 3
    pids = processes_of(cluster)
    rows = cluster.execute("import subprocess; p = subprocess.Popen(['sleep', '1000']); print(p.pid)", timeout=20)
    pids |= {int(row[1]) for row in rows}
    assert len(pids) > 9
    cluster.stop()
    until(lambda: not [pid for pid in pids if alive(pid)], 2)
    assert not leftovers()
    assert not run_folder(cluster).exists()
    assert not run_folder(cluster).with_suffix(".lock").exists()
    cluster.stop()
    with pytest.raises(nbe.ClusterStoppedError, match="start it"):
        cluster.run(print)
    assert cluster.status().phase == "finished"


def test_a_stop_while_workers_start_or_train(make, tmp_path):
    """A stop while workers start or train leaves no process, and the job raises JobStoppedError."""
    cluster = make("localhost:2", wait=False)
    cluster.stop()
    cluster = make("localhost:2")
    job = cluster.run(programs.train, str(tmp_path))
    until(lambda: cluster.status().step > 3)
    cluster.stop()
    with pytest.raises(nbe.JobStoppedError, match="stopped"):
        job.result(timeout=1)
    assert not leftovers()


def test_requests_to_a_driver_that_dies(make):
    """A request to a driver that dies fails, or the next driver answers it; no request waits without end."""
    cluster = make("localhost:1", wait=False)
    driver, stacks = psutil.Process(driver_pid(cluster)), []
    driver.suspend()
    cluster.ask_stacks(stacks.append)
    with ThreadPoolExecutor() as threads:
        run, file = (threads.submit(ask) for ask in (lambda: cluster.run(os.getpid), cluster.connection_file))
        assert not wait([run, file], 0.2).done
        driver.kill()
        with pytest.raises(nbe.DriverLostError, match=r"has ended unexpectedly before it answered; .* try again"):
            run.result(10)
        assert file.result(20).exists(), "this request can be repeated"
    until(lambda: stacks == [[]])
    cluster.stop()
    until_none(leftovers, 15)


def test_a_stopped_cluster_can_start_again(make):
    """A stopped cluster can start again; the results of its old jobs stay."""
    cluster = make("localhost:1")
    job = cluster.run(os.getpid)
    (pid,) = job.result(timeout=20)
    cluster.stop()
    cluster.start(timeout=30)
    assert job.result() == [pid]
    another = cluster.run(os.getpid)
    assert another.result(timeout=20) != [pid]
    assert (job.name, another.name) == ("job-1", "job-2")


def test_names_are_unique(make):
    """A second cluster of the same name, and a second start, are refused with what to do."""
    name = f"only-{os.getpid()}"  # two runs of the tests may use this machine
    cluster = make("localhost:1", name=name)
    with pytest.raises(nbe.UsageError, match=f"'{name}' is running already .process"):
        nbe.Cluster("localhost:1", name=name).start()
    with pytest.raises(nbe.UsageError, match="running already"):
        cluster.start()
    assert cluster.run(os.getpid).result(timeout=20) == [cluster.workers[0].pid]


def test_everything_listens_on_loopback_only(make, tmp_path):
    """While a job runs, no socket of any process of the cluster accepts anything from another machine.

    A connected datagram socket, such as a query to a name server, accepts only its peer's answer.
    """
    cluster = make("localhost:2,127.0.0.2:1", min=3)
    job = cluster.run(programs.train, str(tmp_path))
    until(lambda: cluster.status().step > 3)
    seen = set()
    for pid in {*processes_of(cluster), os.getpid()}:
        for connection in psutil.Process(pid).net_connections("inet"):
            open_datagrams = connection.type != socket.SOCK_STREAM and not connection.raddr
            if connection.status == psutil.CONN_LISTEN or open_datagrams:
                seen.add(connection.laddr.ip)
    assert seen
    assert all(ip.startswith("127.") or ip in ("::1", "::ffff:127.0.0.1", "::ffff:127.0.0.2") for ip in seen), seen
    job.stop()


def test_keys_are_kept(make):
    """No key is in a command line or in the workers' environment; only the owner can read the files."""
    cluster = make("localhost:2", min=2, keep=True)  # so that the driver snapshot has the keys
    assert len(cluster.client.ids) == 2
    keys = DriverSnapshot.read(run_folder(cluster)).keys
    secrets = [keys.server_secret, keys.client_secret, keys.client_public]
    rows = cluster.execute("import subprocess; p = subprocess.Popen(['sleep', '1000']); print(p.pid)", timeout=20)
    children = {int(row[1]) for row in rows}
    files = [file for file in run_folder(cluster).rglob("*") if file.is_file()]
    engine_keys = [
        line.split('"')[3]
        for file in files
        if file.name.endswith("-engine.json") or "security" in file.parts
        for line in file.read_text().splitlines()
        if '"key"' in line or '"curve_' in line
    ]
    assert len(set(engine_keys)) >= 2
    read = 0
    agent = agent_of_worker(cluster.workers[0])
    for pid in {*processes_of(cluster), *children, agent.pid, *(child.pid for child in agent.children())}:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            assert not [secret for secret in secrets + engine_keys if secret in command + environment]
            read += 1
    assert read > 7
    inside = cluster.execute("import os; print(dict(os.environ))", timeout=20)
    shown = "".join(row[1] for row in inside)
    assert not [secret for secret in secrets + engine_keys if secret in shown]
    assert "IPP_CONNECTION_INFO" not in shown
    assert stat.S_IMODE(run_folder(cluster).stat().st_mode) == 0o700
    assert stat.S_IMODE(run_folder(cluster).parent.stat().st_mode) == 0o700
    for file in files:
        text = file.read_text(errors="replace")
        if any(secret in text for secret in secrets + engine_keys):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    logs = [file for file in files if file.suffix == ".log"]
    assert len(logs) >= 2, "of an agent and of ipyparallel's controller"
    for file in (*logs, *cluster.log_dir.rglob("*")):
        assert stat.S_IMODE(file.stat().st_mode) == (0o700 if file.is_dir() else 0o600), file


def test_what_torch_compiles_is_private(make, monkeypatch):
    """Workers keep it in this user's folder for later clusters, unless the user names another folder."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    for given, expected in (({}, user_folder() / "inductor"), ({"TORCHINDUCTOR_CACHE_DIR": "/mine"}, "/mine")):
        cluster = make("localhost:1", env=given)
        row = cluster.execute("import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])", timeout=20)[0]
        assert row[1].strip() == str(expected)
        cluster.stop()


KERNEL = """
import sys, time
import nbelastic as nbe
from tests.process import programs

if __name__ == "__main__":
    cluster = nbe.Cluster("localhost:2,127.0.0.2:1", min=3, log_dir=sys.argv[1]).start()
    if sys.argv[2] == "busy":
        assert len(cluster.client.ids) == 3
        cluster.run(programs.train, sys.argv[1])
        while cluster.status().step < 5:
            time.sleep(0.05)
    print("up", flush=True)
    if sys.argv[2] != "leaves":
        time.sleep(1000)
"""


@pytest.fixture
def start_kernel(tmp_path, monkeypatch):
    """Start a kernel with a cluster. It has the mark `tmp_path`, and so has all that it starts."""
    monkeypatch.setenv(MARK, str(tmp_path))
    return lambda how, **options: subprocess.Popen(
        [sys.executable, "-c", KERNEL, str(tmp_path), how], stdout=subprocess.PIPE, **options
    )


@pytest.mark.parametrize("how", ["idle", pytest.param("busy", marks=[pytest.mark.cold, pytest.mark.soak(share=0.2)])])
def test_a_killed_kernel_leaves_nothing(tmp_path, start_kernel, how):
    """Within 10 s after SIGKILL of the kernel, its driver, agents, templates, workers and any controller have ended."""
    with start_kernel(how) as kernel:
        try:
            assert kernel.stdout.readline() == b"up\n"
            assert len(marked(str(tmp_path))) > 7
        finally:
            kernel.kill()
    until_none(lambda: marked(str(tmp_path)), 10)


def test_a_script_that_ends_leaves_nothing(tmp_path, start_kernel):
    """A program that forgets to stop its cluster ends soon, without an error, and its cluster ends with it."""
    errors = tmp_path / "stderr"
    with errors.open("w") as stderr, start_kernel("leaves", stderr=stderr) as kernel:
        assert kernel.stdout.readline() == b"up\n"
        assert len(marked(str(tmp_path))) > 7
        assert kernel.wait(timeout=5) == 0
    assert errors.read_text() == ""  # it ended without an error
    until_none(lambda: marked(str(tmp_path)), 5)


@pytest.fixture
def interruptible():
    """Let Ctrl-C interrupt this process, even in the background of a shell that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_does_not_end_a_start(make, interruptible):
    """An interrupt of a waiting `start()` or `wait()` raises, and the cluster goes on starting."""
    cluster = make("localhost:2", wait=False)

    def interrupted(call):
        begun, me = run_folder(cluster) / "agent-localhost.log", os.getpid()
        wait = f"until [ -e {begun} ] || ! kill -0 {me}; do sleep 0.1; done; sleep 0.3"
        with pytest.raises(KeyboardInterrupt), subprocess.Popen(["sh", "-c", f"{wait}; kill -INT {me}"]):
            call()  # the interrupt may come at any point of the call, or just after it

    interrupted(lambda: cluster.wait(7, timeout=20))
    cluster.wait(2, timeout=20)
    job = cluster.run(time.sleep, 1.5)
    interrupted(lambda: job.result(timeout=20))
    interrupted(lambda: cluster.wait(7, timeout=20))
    assert job.result(timeout=20) == [None, None]
    assert all(worker.restarts == 0 for worker in cluster.workers)
    cluster.stop()
    interrupted(lambda: cluster.start(timeout=30))
    cluster.wait(2, timeout=20)
    assert len(cluster.run(os.getpid).result(timeout=20)) == 2


def test_a_wait_that_fails_names_the_reason(make):
    """A wait that cannot succeed raises with the reason; the cluster stays, so that the user can repair it."""
    cluster = make("localhost:1", min=2, wait=False)
    cluster.wait(1, timeout=20)
    with pytest.raises(nbe.WaitTimeoutError, match=r"1 of min 2 workers ready; add a host or lower min"):
        cluster.wait(2, timeout=0.3)
    cluster.add_host("127.0.0.2:1")
    cluster.wait(2, timeout=20)


def test_logs_are_never_overwritten(trains):
    """A restarted worker writes to a new file; the file of the lost one stays, with all that it printed."""
    training = trains("localhost:2", min=1, program=_print_and_train)
    victim = training.wait_for_world(2)[1]
    folder = training.cluster.log_dir / training.job.name
    name = victim.id.replace("/", "-").replace("#", "-")
    training.signal_worker(victim)
    training.wait_for_world(2)
    training.finish()
    assert (folder / f"{name}.out").read_text() == f"I am {victim.pid}\n"
    assert (folder / f"{name}.err").read_text() == f"and complain {victim.pid}\n"
    replacement = next(w for w in training.cluster.workers if w.slot == victim.slot)
    other = replacement.id.replace("/", "-").replace("#", "-")
    assert (folder / f"{other}.out").read_text() == f"I am {replacement.pid}\n"


def _print_and_train(folder):
    print(f"I am {os.getpid()}")
    print(f"and complain {os.getpid()}", file=sys.stderr)
    return programs.train(folder)


def test_logs_begin_with_the_first_byte(make):
    """The log files have output from before a worker is connected, here a warning about a preloaded module."""
    cluster = make("localhost:1", preload=["no_such_module_at_all"])
    assert cluster.workers[0].state == "ready"
    agents = list(run_folder(cluster).glob("agent-*.log"))
    assert any("no_such_module_at_all" in file.read_text() for file in agents)
    assert {file.suffix for file in (cluster.log_dir / "idle").iterdir()} == {".out", ".err"}


@pytest.mark.cold  # it tests the environment with which a process starts
@pytest.mark.soak(share=0.2)
def test_no_variable_is_set_beside_threads(make):
    """No variable is set while a worker has several threads: `getenv` of C in another thread would crash the process."""
    cluster = make("localhost:1", preload=["tests.process.record_environment"])
    ((_, out, _, error),) = cluster.execute(
        "from tests.process import record_environment; print(record_environment.added)"
    )
    assert (out, error) == ("[]\n", None)


def test_the_agents_of_these_tests_are_forks_of_a_warm_process(make):
    """Else each agent would take seconds of processor time, and no test would notice."""
    assert agent_of_worker(make("localhost:1").workers[0]).pid in warm_agents.process.family()


SHADOWED = """
import os, sys
import nbelastic as nbe
if __name__ == "__main__":
    with nbe.Cluster("localhost:1", log_dir=sys.argv[1], preload=["of_the_user", "nbval"]) as cluster:
        print(cluster.run(lambda: (__import__("of_the_user").VALUE, "PYTHONSAFEPATH" in os.environ)).result(timeout=60))
        print(cluster.run(lambda: __import__("nbval").VALUE).result(timeout=60))
        print(cluster.client[0].apply_sync(os.getcwd) == os.getcwd())
"""


@pytest.mark.cold  # it tests the folders with which processes start
@pytest.mark.soak(share=0.2)
def test_files_of_the_user_may_have_the_names_of_standard_modules(tmp_path):
    """In the notebook's folder, as in its kernel. The user's modules are found there, before installed ones."""
    for name in ("json", "queue", "random", "selectors", "socket", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a module of the user')")
    for name in ("of_the_user", "nbval"):
        (tmp_path / f"{name}.py").write_text("VALUE = 5")
    (tmp_path / "program.py").write_text(SHADOWED)
    done = subprocess.run(
        [sys.executable, "-P", "program.py", str(tmp_path / "logs")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["[(5, False)]", "[5]", "True"], done.stderr


@pytest.mark.soak(share=0.2)
def test_a_worker_that_cannot_be_forked_ends_no_other(make):
    """If the limit of processes is reached, a worker is not replaced at once. The others of its host run on."""
    cluster = make("localhost:3", preload=["tests.process.failing_forks"])
    lost, *others = [worker.pid for worker in cluster.wait(3, timeout=60).workers]
    os.kill(lost, signal.SIGKILL)
    until(lambda: any("could not fork" in event.text for event in cluster.events), 30, "the fork to fail")
    workers = until(lambda: len(found := cluster.wait(3, timeout=60).workers) == 3 and found)
    assert {worker.pid for worker in workers} > set(others)
    assert not [event for event in cluster.events if event.kind == "host-lost"]


LIMITED = """
import resource, sys
import nbelastic as nbe

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 700))
    with nbe.Cluster("localhost:1", log_dir=sys.argv[1]) as cluster:
        print(cluster.run(resource.getrlimit, resource.RLIMIT_NOFILE).result(timeout=60))
"""


@pytest.mark.cold  # it tests the limits with which a process starts
def test_workers_may_open_as_many_files_as_the_host_allows(tmp_path):
    """Workers may open as many files as the host allows, whatever limit the notebook was started with."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[(700, 700)]\n"
