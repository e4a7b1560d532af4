"""An agent's process, as the driver starts and watches it."""

import asyncio
import errno
import fcntl
import os
import queue
import select
import subprocess
import sys
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

import pytest

import nbelastic as nbe
from nbelastic.driver import connection_files
from nbelastic.driver.request_answers import has_ready_workers
from nbelastic.protocol.exit_codes import CONNECTION_LOST
from nbelastic.provision import batch, process_agent
from nbelastic.provision.process_agent import ProcessAgent
from nbelastic.provision.tunnelled_agent import TunnelledAgent
from tests.driver.fakes import DriverWithFakes, run_story


def ended_process(*args, **kwargs):
    """Start a process and wait until it has ended, without reaping it."""
    process = Popen(*args, **kwargs)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process


@pytest.mark.parametrize("size", [1, 200_000])
def test_a_process_that_ends_before_it_reads_is_reported(tmp_path, monkeypatch, size):
    """The end of a process that reads no configuration is reported once, with its output; a kill has no effect."""
    monkeypatch.setattr(process_agent, "Popen", ended_process)

    async def story():
        ends = asyncio.Queue()
        command = ["sh", "-c", "echo refused; exit 255"]
        agent = ProcessAgent(command, tmp_path / "log", lambda code, output: ends.put_nowait(f"{code}: {output}"))
        agent.start({"host": "h1" * size})  # the second size exceeds a pipe's buffer, and no process reads it
        assert await asyncio.wait_for(ends.get(), 10) == "255: refused\n"
        agent.kill()
        assert ends.empty()

    asyncio.run(story())


def test_an_agent_can_read_its_configuration_from_its_start_on(tmp_path, monkeypatch):
    """A new agent finds its configuration in its input, so it never waits for a driver that was killed."""
    readable = []

    def started(*args, stdin, **kwargs):
        readable.extend(select.select([stdin], [], [], 0)[0])
        return Popen(*args, stdin=stdin, **kwargs)

    monkeypatch.setattr(process_agent, "Popen", started)

    async def story():
        ends = asyncio.Queue()
        agent = ProcessAgent(["head", "-n", "1"], tmp_path / "log", lambda _, output: ends.put_nowait(output))
        agent.start({"host": "h1"})
        assert await asyncio.wait_for(ends.get(), 10) == '{"host": "h1"}\n'

    asyncio.run(story())
    assert readable


@pytest.mark.parametrize("size", [100, 10_000, 2_000_000])
def test_a_user_with_many_pipes_can_start_agents(tmp_path, monkeypatch, size):
    """With some hundred hosts behind ssh, Linux gives this user pipes of one page. A longer configuration does not block the driver."""
    make_pipe = os.pipe

    def small_pipe():
        reader, writer = make_pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        return reader, writer

    async def story():
        ends = asyncio.Queue()
        code = "from nbelastic.system.first_line import *; line = read_first_line(); print(len(line), line[-3:])"
        agent = ProcessAgent([sys.executable, "-c", code], tmp_path / "log", lambda _, output: ends.put_nowait(output))
        with monkeypatch.context() as changed:
            changed.setattr(os, "pipe", small_pipe)
            agent.start({"host": "h" * size})
        assert await asyncio.wait_for(ends.get(), 10) == f"{size + 13} b'\"}}\\n'\n"

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(story())
    assert len(os.listdir("/proc/self/fd")) == before


def test_programs_that_ssh_starts_get_the_environment_of_the_driver(tmp_path):
    """A ProxyCommand may be written in Python, as gcloud is, and import what lies beside it: PYTHONSAFEPATH would forbid that."""

    async def story():
        ends = asyncio.Queue()
        command = ["sh", "-c", "echo ${PYTHONSAFEPATH-not set}"]
        agent = ProcessAgent(command, tmp_path / "log", lambda _, output: ends.put_nowait(output))
        agent.start({"host": "h1"})
        assert await asyncio.wait_for(ends.get(), 10) == "not set\n"

    asyncio.run(story())


class Settings(NamedTuple):
    """What a tunnel needs of a cluster's settings."""

    run_folder: Path
    driver_lease: tuple[str, float, str, str] = ("", 60.0, "", "")


@pytest.mark.parametrize("fails", ["Popen", "pidfd_open"])
def test_a_machine_without_a_free_process_reaches_its_hosts_later(tmp_path, monkeypatch, fails):
    """If all connections break at once, this machine may not have what the new ones need. It tries again."""
    started, failures = [], [OSError(errno.EAGAIN, "Resource temporarily unavailable") for _ in range(3)]
    pidfd_open = os.pidfd_open

    def start(command, **options):
        if fails == "Popen" and started and failures:
            raise failures.pop()
        started.append(Popen(["sh", "-c", "exit 3" if started else f"exit {CONNECTION_LOST}"], **options))
        return started[-1]

    def watch(pid):
        if fails == "pidfd_open" and len(started) > 1 and failures:
            raise failures.pop()
        return pidfd_open(pid)

    monkeypatch.setattr(process_agent, "Popen", start)
    monkeypatch.setattr(os, "pidfd_open", watch)

    async def story():
        ends, breaks = asyncio.Queue(), []
        explain = lambda code, _: f"exit code {code}"
        calls = {"on_stop": ends.put_nowait, "on_disconnect": breaks.append}
        agent = TunnelledAgent(["ssh"], Settings(tmp_path), tmp_path / "log", explain, **calls)
        agent.start({"host": "h1"})
        assert await asyncio.wait_for(ends.get(), 20) == "exit code 3"
        assert breaks == [
            f"exit code {CONNECTION_LOST}",
            *["no connection to it can be opened here: Resource temporarily unavailable"] * 3,
        ]
        assert all(child.returncode is not None for child in started)

    asyncio.run(story())


async def failing(spec, *_):
    raise ValueError(f"{spec.name} is odd")


class DriverWithoutHosts(DriverWithFakes):
    """A driver that can locate no host."""

    async def locate(self, spec, launcher):
        return await failing(spec)


def test_a_host_that_cannot_be_launched_is_lost_with_the_reason(tmp_path):
    """Any error of a launch makes the host lost with that reason: it does not stay "starting"."""

    async def story():
        async with DriverWithoutHosts(tmp_path, "gpu9") as fakes:
            with pytest.raises(nbe.HostError, match=r"gpu9: its agent cannot be started: gpu9 is odd"):
                has_ready_workers(fakes.driver.cluster, 1)

    run_story(story)


class OddHost(DriverWithFakes):
    """A driver whose host answers with control characters."""

    async def locate(self, spec, launcher):
        raise ValueError("\x1b[2J\x1b]0;title\x07odd\n" + 100_000 * "x")


def test_the_reason_of_a_lost_host_is_a_printable_line(tmp_path):
    """It may have words of the host, such as the last lines of a batch job: the event log has no control characters of it."""

    async def story():
        async with OddHost(tmp_path, "gpu9") as fakes:
            await fakes.settle()
            (text,) = [record.text for record in fakes.driver.event_log.kept()[0] if record.kind == "host-lost"]
            assert text.isprintable()
            assert "cannot be started: odd xxx" in text
            assert len(text) < 1100

    run_story(story)


def test_an_error_while_a_connection_file_is_made_is_raised(start_hostless, monkeypatch):
    """Any error while a connection file is made is raised by the call."""
    monkeypatch.setattr(connection_files, "driver_address_towards", failing)
    with pytest.raises(nbe.HostError, match="the connection file cannot be made: gpu9 is odd"):
        start_hostless().connection_file("gpu9")


BANNER = "Welcome to node 6 of the cluster\n--> Checking the allocation (A-3)... OK\n"


@pytest.mark.parametrize(
    ("launcher", "printed"),
    [
        ("slurm", "Submitted batch job 17"),
        ("slurm", f"{BANNER}Submitted batch job 17 on cluster c3"),
        ("slurm", "17;c3"),  # --parsable in the user's options
        ("sge", f'{BANNER}Your job 17 ("nbelastic-h3") has been submitted'),
        ("pbs", "17.server2"),
    ],
)
def test_the_number_of_a_job_is_found_behind_a_banner(launcher, printed):
    """Another number would be the job of another host: its end would be taken for the end of this one, and it would be cancelled."""
    assert batch._make_launcher(launcher, {}).parse_job_id(printed) == "17"


def test_a_python_in_the_home_folder_of_a_node(tmp_path, monkeypatch):
    """`--python ~/venv/bin/python` is the same for a batch job as behind ssh: the home folder is that of the node."""
    scripts = queue.Queue()
    monkeypatch.setattr(batch.BatchAgent, "_submit", lambda self, texts, _: scripts.put(texts[self._script]))
    python = tmp_path / "my venv" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho python of the home folder\n")
    python.chmod(0o755)

    async def story():
        batch.BatchAgent("slurm", "s0", tmp_path, {}, print, number=1).start({}, {}, "~/my venv/python", None)

    asyncio.run(story())
    command = ["/bin/sh", "-c", scripts.get(timeout=10)]
    done = subprocess.run(command, env={"HOME": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("python of the home folder\n", "")


def test_a_user_may_say_where_a_job_s_number_is():
    """As launcher option."""
    assert batch._make_launcher("slurm", {"job_id_regexp": r"\d+$"}).parse_job_id("3 jobs: 17") == "17"
