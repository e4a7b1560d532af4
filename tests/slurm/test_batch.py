"""Agents as batch jobs in a real Slurm."""

import asyncio
import os
import stat
import time
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest

from nbelastic.protocol import agent_messages
from nbelastic.transport.keys import Keys
from nbelastic.transport.server import Server
from tests.slurm.held import PATIENCE, Held, ended, is_, job, until


@asynccontextmanager
async def driver():
    """A hub, and what agents say to it."""
    keys, heard = Keys.make(), []
    server = Server(keys, lambda peer, message: heard.append((peer, message)))
    await server.start()
    try:
        yield server, keys, heard
    finally:
        await server.stop()


def config_of(held, server, keys):
    """What the driver tells an agent on another machine."""
    return {
        "host": held.host,
        "number": 1,
        "driver": server.address,
        "keys": msgspec.to_builtins(keys.for_clients()),
        "driver_lease": None,
        "lease": 30.0,
        "heartbeat": 1.0,
        "address": "",
        "nics": [],
        "path": [],
        "run_folder": "",
        "log_dir": str(held.run_folder / "logs"),
        "preload": [],
        "threads": "",
        "environment": {},
        "cwd": "",
        "settings": {"backend": "gloo", "slots": "2"},
    }


async def hello(held, server, keys, heard):
    """Start the real agent and wait until it speaks; its name on the link."""
    held.config = config_of(held, server, keys)
    held.start()

    async def spoken():
        await held.agent.state()
        assert not held.stops, held.agent.output()
        return [(peer, m.pid) for peer, m in heard if isinstance(m, agent_messages.AgentHello)]

    ((peer, pid),) = await until(spoken, what="AgentHello")
    assert peer.startswith("agent/node1")
    return peer, pid


def test_an_agent_speaks_from_its_job_and_retires(slurm, tmp_path):
    """One job named after the host; no key in a command line or the batch script; nothing is left at the end."""

    async def story():
        async with driver() as (server, keys, heard):
            held = Held(tmp_path)
            peer, pid = await hello(held, server, keys, heard)
            assert slurm("squeue", "-h", "-o", "%j %D %C %T").split() == ["nbelastic-node1", "1", "2", "RUNNING"]
            assert await held.agent.state() == "running"
            assert held.left() == [held.file("sh").name]  # the agent has read its keys, and removed the file
            assert stat.S_IMODE(held.file("sh").stat().st_mode) == 0o600
            assert stat.S_IMODE(held.run_folder.stat().st_mode) == 0o700
            (number,) = slurm.jobs()
            seen = held.file("batch").read_text() + slurm("scontrol", "write", "batch", number, "-")
            seen += "".join(" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
            secrets = [keys.client_secret, keys.server_public, keys.client_public]
            assert [secret for secret in secrets if secret in seen] == []
            assert held.file("sh").name in seen
            server.send(peer, agent_messages.StopAgent())
            assert await ended(held) == 0
            assert "COMPLETED" in held.agent.output()
            assert held.left() == []
            await until(lambda: not psutil.pid_exists(pid))

    asyncio.run(story())


def test_a_killed_agent(slurm, tmp_path):
    """`kill()` returns at once; the job, the agent and its files are gone soon, and it is told once."""

    async def story():
        async with driver() as (server, keys, heard):
            held = Held(tmp_path)
            _, pid = await hello(held, server, keys, heard)
            held.agent.kill()
            held.agent.kill()
            assert held.stops == []
            await until(lambda: held.stops and not slurm.jobs() and not psutil.pid_exists(pid))
            assert held.stops == [None]
            assert held.left() == []

    asyncio.run(story())


def test_a_job_that_fails_before_the_agent_speaks(slurm, tmp_path, stand_in):
    """Its exit code, what Slurm calls it and its last lines are told, once."""

    async def story():
        held = Held(tmp_path)
        held.start(python=stand_in("echo no torch here >&2; exit 3"))
        assert await ended(held) == 3
        assert held.agent.output().splitlines() == [f"Slurm job {job(held)}: FAILED (NonZeroExitCode)", "no torch here"]
        assert held.left() == []
        assert await held.agent.state() == ""
        assert held.stops == [3]

    asyncio.run(story())


def test_without_python_on_the_node(slurm, tmp_path):
    """What the shell says about it is told."""

    async def story():
        held = Held(tmp_path)
        held.start(python="/opt/nowhere/python")
        assert await ended(held) == 127
        assert "/opt/nowhere/python" in held.agent.output()

    asyncio.run(story())


def test_environment_and_folder(slurm, tmp_path, stand_in):
    """The agent has the environment that was asked for, whatever the batch system passes on, and the folder."""
    (tmp_path / "a folder").mkdir()

    async def story():
        held = Held(tmp_path, options="--export=NONE")
        python = stand_in(f'env > "{tmp_path}/env"; pwd >> "{tmp_path}/env"; echo "$2" >> "{tmp_path}/env"')
        held.start({"TOKEN": "it's $secret\n2"}, python, str(tmp_path / "a folder"))
        assert await ended(held) == 0
        lines = (tmp_path / "env").read_text().splitlines()
        assert lines[-2:] == [str(tmp_path / "a folder"), "from nbelastic.agent.start import main; main()"]
        assert [line for line in lines if line.startswith(f"NBELASTIC_AGENT={held.run_folder}/agent-node1-")]
        assert lines[lines.index("TOKEN=it's $secret") + 1] == "2"
        assert "secret" not in held.file("batch").read_text()

    asyncio.run(story())


def test_a_job_that_waits_for_its_turn(slurm, tmp_path, stand_in):
    """It says why it waits, and can be cancelled before it has begun."""

    async def story():
        first = Held(tmp_path / "first", options="--nodes=2 --ntasks=2 --exclusive")
        first.start(python=stand_in("sleep 1000"))
        await until(lambda: is_(first, "running"))
        held = Held(tmp_path)
        held.start(python=stand_in("sleep 1000"))
        await until(lambda: is_(held, "queued (Resources)"))
        held.agent.kill()
        await until(lambda: slurm.jobs() == [job(first)])
        await until(lambda: held.stops)
        assert held.stops == [None]
        assert held.left() == []
        first.agent.kill()
        await until(lambda: not slurm.jobs())

    asyncio.run(story())


def test_a_job_that_an_administrator_cancels(slurm, tmp_path, stand_in):
    """Even one that has not begun is told as a failure."""

    async def story():
        held = Held(tmp_path, options="--begin=now+1hour")
        held.start(python=stand_in("sleep 1000"))
        await until(lambda: is_(held, "queued (BeginTime)"))
        slurm("scancel", job(held))
        assert await ended(held) == 1
        assert held.agent.output() == f"Slurm job {job(held)}: CANCELLED (BeginTime)"

    asyncio.run(story())


def test_a_submission_that_is_refused(slurm, tmp_path):
    """What sbatch says is told."""

    async def story():
        held = Held(tmp_path, queue="nope")
        held.start()
        assert await ended(held) == 1
        assert "invalid partition specified: nope" in held.agent.output()
        assert held.left() == []
        held.agent.kill()
        await asyncio.sleep(0)
        assert held.stops == [1]

    asyncio.run(story())


def test_a_kill_while_the_submission_is_under_way(slurm, tmp_path, stand_in):
    """The job is cancelled as soon as its number is known, though nobody waits for it any more."""
    os.mkfifo(tmp_path / "gate")
    slow = stand_in(f'cat "{tmp_path}/gate"; sbatch "$@" | tee "{tmp_path}/number"', "slow-sbatch")

    async def story():
        held = Held(tmp_path, submit_command=slow)
        held.start(python=stand_in("sleep 1000"))
        await until(lambda: held.file("batch"))
        held.agent.kill()
        await until(lambda: held.stops)

    asyncio.run(story())
    (tmp_path / "gate").write_text("go")  # the loop has ended by now
    deadline = time.monotonic() + PATIENCE
    number = ""
    while not number or slurm.jobs():
        assert time.monotonic() < deadline
        number = (tmp_path / "number").read_text().split()[-1:] if (tmp_path / "number").exists() else ""
        time.sleep(0.05)
    assert "CANCELLED" in slurm("scontrol", "show", "job", *number)
    assert list((tmp_path / "run").glob("*.json")) == []


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, ["NumCPUs=2", "NumNodes=1", "Partition=main", "Requeue=0"]),
        (
            {"queue": "gpu", "timelimit": "10", "options": "--gres=gpu:1"},
            ["Partition=gpu", "TimeLimit=00:10:00", "gpu:1"],
        ),
        ({"options": "--cpus-per-task=3 --job-name=mine"}, ["NumCPUs=3", "JobName=mine"]),
    ],
    ids=str,
)
def test_options(slurm, tmp_path, stand_in, options, shown):
    """One node and `slots` CPUs if nothing else is said; what the user says goes before."""

    async def story():
        held = Held(tmp_path, **options)
        held.start(python=stand_in("sleep 1000"))
        await until(lambda: is_(held, "running"))
        said = slurm("scontrol", "-d", "show", "job", job(held))
        assert [each for each in shown if each not in said] == []
        held.agent.kill()
        await until(lambda: not slurm.jobs())

    asyncio.run(story())


def test_a_template_of_the_users_own(slurm, tmp_path, stand_in):
    """It gets what ipyparallel's templates get, and the slots and the job's name."""
    template = "#!/bin/sh\n#SBATCH -c {slots} -J x-{job_name} -o {output_file}\necho mine\nexec {program_and_args}\n"

    async def story():
        held = Held(tmp_path, batch_template=template)
        held.start(python=stand_in("squeue -h -o %j; exit 4"))
        assert await ended(held) == 4
        assert held.agent.output().splitlines()[1:] == ["mine", "x-nbelastic-node1"]

    asyncio.run(story())


def test_the_next_agent_of_a_host(slurm, tmp_path, stand_in):
    """It may start while the first one is still being cancelled: neither touches the other's files or output."""

    async def story():
        held, after = Held(tmp_path), Held(tmp_path)
        held.start(python=stand_in("echo first; sleep 1000", "first"))
        await until(lambda: is_(held, "running"))
        await until(lambda: held.agent.output() == "first")
        after.start(python=stand_in("echo second; sleep 1000", "second"))
        held.agent.kill()
        await until(lambda: is_(after, "running"))
        await until(lambda: slurm.jobs() == [job(after)])
        await until(lambda: after.agent.output() == "second")
        assert len(after.left()) == 2
        after.agent.kill()
        await until(lambda: not slurm.jobs())
        assert after.left() == []

    asyncio.run(story())
