"""Agents as batch jobs of a real Slurm."""

import asyncio
import os
import stat
import time
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest

from nbelastic.agent.time_limit import seconds_left
from nbelastic.protocol import agent_messages
from nbelastic.provision.slurm_reasons import advice_for
from nbelastic.provision.ssh import TUNNELLED_AGENT
from nbelastic.provision.tcp_proxy import TcpProxy
from nbelastic.provision.tunnel_ports import TunnelPorts, ports_file
from nbelastic.transport.keys import Keys
from nbelastic.transport.server import Server
from tests.slurm.batch_agents import TIMEOUT, ObservedAgent, exit_code_of, job_of, reach_state, until
from tests.support.driver_lease import until_the_end


@asynccontextmanager
async def driver(folder):
    """A server, its keys, and the messages that it received. Jobs reach it through a TCP proxy, at the port `server.proxy`."""
    keys, received = Keys.make(), []
    server = Server(keys, lambda peer, message: received.append((peer, message)))
    await server.start()
    port = int(server.address.rpartition(":")[2])
    TunnelPorts(folder, keys.client_secret).open([port])
    proxy = TcpProxy("127.0.0.1", port, ports_file(folder), until_the_end(folder))
    try:
        proxy.start()
        server.proxy = proxy.port
        yield server, keys, received
    finally:
        proxy.close()
        await server.stop()


def config_of(observed, server, keys):
    """The configuration that the driver sends to an agent on another machine."""
    return {
        "host": observed.host,
        "number": 1,
        "driver": server.address,
        "dial": ["127.0.0.1", server.proxy],
        "cluster": "1",
        "towards": "127.0.0.1",
        "keys": msgspec.to_builtins(keys.for_clients()),
        "driver_lease": None,
        "lease": 30.0,
        "notice": 30.0,
        "heartbeat": 1.0,
        "address": "",
        "nics": [],
        "path": [],
        "run_folder": "",
        "log_dir": str(observed.run_folder / "logs"),
        "preload": [],
        "threads": "",
        "environment": {},
        "defaults": {},
        "cwd": "",
        "settings": {"slots": "2"},
    }


async def start_real_agent(observed, server, keys, received):
    """Start the real agent and wait for its AgentHello; return its name as a peer, and its pid."""
    observed.config = config_of(observed, server, keys)
    observed.start()

    async def find_hello():
        await observed.agent.state()
        assert not observed.stops, observed.agent.output()
        return [(peer, m.pid) for peer, m in received if isinstance(m, agent_messages.AgentHello)]

    ((peer, pid),) = await until(find_hello, what="AgentHello")
    assert peer.startswith("agent/node1")
    return peer, pid


def test_an_agent_runs_in_a_job_until_it_is_stopped(slurm, tmp_path):
    """The job is named after the host. No command line or batch script has a key. At the end no file is left."""

    async def story():
        async with driver(tmp_path) as (server, keys, received):
            observed = ObservedAgent(tmp_path)
            peer, pid = await start_real_agent(observed, server, keys, received)
            assert slurm("squeue", "-h", "-o", "%j %D %C %T").split() == ["nbelastic-node1", "1", "2", "RUNNING"]
            assert await observed.agent.state() == "running"
            # The agent has read its configuration, and removed the file.
            assert observed.secret_files() == [observed.file("sh").name]
            assert stat.S_IMODE(observed.file("sh").stat().st_mode) == 0o600
            assert stat.S_IMODE(observed.run_folder.stat().st_mode) == 0o700
            (number,) = slurm.jobs()
            public_text = observed.file("batch").read_text() + slurm("scontrol", "write", "batch", number, "-")
            public_text += "".join(" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
            secrets = [keys.client_secret, keys.server_public, keys.client_public]
            assert [secret for secret in secrets if secret in public_text] == []
            assert observed.file("sh").name in public_text
            server.send(peer, agent_messages.StopAgent())
            assert await exit_code_of(observed) == 0
            assert "COMPLETED" in observed.agent.output()
            assert observed.secret_files() == []
            await until(lambda: not psutil.pid_exists(pid))

    asyncio.run(story())


@pytest.mark.soak(share=0.2)
def test_a_killed_agent(slurm, tmp_path):
    """`kill()` returns at once; job, agent and files are removed soon after. The end is reported once."""

    async def story():
        async with driver(tmp_path) as (server, keys, received):
            observed = ObservedAgent(tmp_path)
            _, pid = await start_real_agent(observed, server, keys, received)
            observed.agent.kill()
            observed.agent.kill()
            assert observed.stops == []
            await until(lambda: observed.stops and not slurm.jobs() and not psutil.pid_exists(pid))
            assert observed.stops == [None]
            assert observed.secret_files() == []

    asyncio.run(story())


def test_a_job_that_fails_before_the_agent_connects(slurm, tmp_path, fake_program):
    """The exit code, Slurm's state and the last lines of output are reported, once."""

    async def story():
        observed = ObservedAgent(tmp_path)
        observed.start(python=fake_program("echo no torch here >&2; exit 3"))
        assert await exit_code_of(observed) == 3
        assert observed.agent.output().splitlines() == [
            f"Slurm job {job_of(observed)}: FAILED (NonZeroExitCode)",
            "no torch here",
        ]
        assert observed.secret_files() == []
        assert await observed.agent.state() == ""
        assert observed.stops == [3]

    asyncio.run(story())


def test_without_python_on_the_node(slurm, tmp_path):
    """The shell's message is reported."""

    async def story():
        observed = ObservedAgent(tmp_path)
        observed.start(python="/opt/nowhere/python")
        assert await exit_code_of(observed) == 127
        assert "/opt/nowhere/python" in observed.agent.output()

    asyncio.run(story())


def test_environment_and_folder(slurm, tmp_path, fake_program):
    """The agent has the given environment and folder, whatever the batch system passes on."""
    (tmp_path / "a folder").mkdir()

    async def story():
        observed = ObservedAgent(tmp_path, options="--export=NONE")
        python = fake_program(f'env > "{tmp_path}/env"; pwd >> "{tmp_path}/env"; echo "$1 $3" >> "{tmp_path}/env"')
        observed.start({"TOKEN": "it's $secret\n2"}, python, str(tmp_path / "a folder"))
        assert await exit_code_of(observed) == 0
        lines = (tmp_path / "env").read_text().splitlines()
        assert lines[-2:] == [str(tmp_path / "a folder"), f"-P {TUNNELLED_AGENT}"]
        assert [line for line in lines if line.startswith(f"NBELASTIC_AGENT={observed.run_folder}/agent-node1-")]
        assert lines[lines.index("TOKEN=it's $secret") + 1] == "2"
        assert "secret" not in observed.file("batch").read_text()

    asyncio.run(story())


def test_a_queued_job(slurm, tmp_path, fake_program):
    """Its state has the reason why it waits, and it can be cancelled before it has begun."""

    async def story():
        first = ObservedAgent(tmp_path / "first", options="--nodes=2 --ntasks=2 --exclusive")
        first.start(python=fake_program("sleep 1000"))
        await reach_state(first, "running")
        observed = ObservedAgent(tmp_path)
        observed.start(python=fake_program("sleep 1000"))
        await reach_state(observed, "queued (Resources)")
        observed.agent.kill()
        await until(lambda: slurm.jobs() == [job_of(first)])
        await until(lambda: observed.stops)
        assert observed.stops == [None]
        assert observed.secret_files() == []
        first.agent.kill()
        await until(lambda: not slurm.jobs())

    asyncio.run(story())


def test_a_job_that_an_administrator_cancels(slurm, tmp_path, fake_program):
    """Also a job that has not begun is reported as a failure."""

    async def story():
        observed = ObservedAgent(tmp_path, options="--begin=now+1hour")
        observed.start(python=fake_program("sleep 1000"))
        await reach_state(observed, "queued (BeginTime)")
        slurm("scancel", job_of(observed))
        assert await exit_code_of(observed) == 1
        assert observed.agent.output() == f"Slurm job {job_of(observed)}: CANCELLED (BeginTime)"

    asyncio.run(story())


def test_a_time_limit_of_the_partition_that_leaves_no_time_for_a_successor(slurm, tmp_path, fake_program):
    """The job is cancelled before it starts, with the limit and what to do. It would be replaced again and again."""

    async def story():
        observed = ObservedAgent(tmp_path, partition="short", options="--begin=now+1hour")
        observed.config["successor"] = 300.0
        observed.start(python=fake_program("sleep 1000"))
        assert await exit_code_of(observed) == 1
        advice = "Choose a limit of at least 420 s, or a lower successor in timeouts."
        assert observed.agent.problem.startswith(
            "was cancelled by nbelastic: its time limit is 00:03:00: a job's successor"
        )
        assert observed.agent.problem.endswith(advice)
        await until(lambda: not slurm.jobs())
        assert observed.secret_files() == []

    asyncio.run(story())


def test_a_job_that_the_partition_never_starts(slurm, tmp_path, fake_program):
    """Slurm takes it, and leaves it in the queue. Its state has advice."""

    async def story():
        observed = ObservedAgent(tmp_path, partition="short", time="10")
        observed.start(python=fake_program("sleep 1000"))
        await reach_state(observed, "queued (PartitionTimeLimit)")
        assert "ask for less with time=" in advice_for(await observed.agent.state())
        observed.agent.kill()
        await until(lambda: not slurm.jobs())

    asyncio.run(story())


def test_the_time_that_a_job_has_left(slurm, tmp_path, fake_program):
    """Slurm says it, also after a change of the limit. It is not known for a job without a limit."""

    async def story():
        observed = ObservedAgent(tmp_path, time="2-0")
        observed.start(python=fake_program("sleep 1000"))
        await reach_state(observed, "running")
        job = {"SLURM_JOB_ID": job_of(observed)}
        assert 172_000 < seconds_left(job) <= 172_800
        slurm("scontrol", "update", f"jobid={job_of(observed)}", "timelimit=10")
        assert 500 < seconds_left(job) <= 600
        slurm("scontrol", "update", f"jobid={job_of(observed)}", "timelimit=UNLIMITED")
        assert seconds_left({**job, "SLURM_JOB_END_TIME": "1"}) is None
        observed.agent.kill()
        await until(lambda: not slurm.jobs())

    asyncio.run(story())


def test_a_submission_that_is_refused(slurm, tmp_path):
    """The message of sbatch is reported."""

    async def story():
        observed = ObservedAgent(tmp_path, queue="nope")
        observed.start()
        assert await exit_code_of(observed) == 1
        assert "invalid partition specified: nope" in observed.agent.output()
        assert observed.agent.problem.startswith("could not be submitted: sbatch: error: invalid partition")
        assert observed.secret_files() == []
        observed.agent.kill()
        await asyncio.sleep(0)
        assert observed.stops == [1]

    asyncio.run(story())


def test_a_kill_during_the_submission(slurm, tmp_path, fake_program):
    """The job is cancelled as soon as its number is known, though the driver's loop has ended."""
    os.mkfifo(tmp_path / "fifo")
    slow = fake_program(f'cat "{tmp_path}/fifo"; sbatch "$@" | tee "{tmp_path}/number"', "slow-sbatch")

    async def story():
        observed = ObservedAgent(tmp_path, submit_command=slow)
        observed.start(python=fake_program("sleep 1000"))
        await until(lambda: observed.file("batch"))
        observed.agent.kill()
        await until(lambda: observed.stops)

    asyncio.run(story())
    (tmp_path / "fifo").write_text("go")  # the driver's loop has ended by now
    deadline = time.monotonic() + TIMEOUT
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
        (
            {"partition": "gpu", "time": "10", "gres": "gpu:1", "cpus_per_task": "4", "options": "--job-name=mine"},
            ["Partition=gpu", "TimeLimit=00:10:00", "gpu:1", "NumCPUs=4", "JobName=mine"],
        ),
        ({"options": "--cpus-per-task=3 --job-name=mine"}, ["NumCPUs=3", "JobName=mine"]),
    ],
    ids=str,
)
def test_options(slurm, tmp_path, fake_program, options, shown):
    """By default a job has one node and `slots` CPUs; the user's options take precedence."""

    async def story():
        observed = ObservedAgent(tmp_path, **options)
        observed.start(python=fake_program("sleep 1000"))
        await reach_state(observed, "running")
        output = slurm("scontrol", "-d", "show", "job", job_of(observed))
        assert [each for each in shown if each not in output] == []
        observed.agent.kill()
        await until(lambda: not slurm.jobs())

    asyncio.run(story())


def test_a_signal_before_the_agent_handles_it(slurm, tmp_path, fake_program):
    """Slurm's signal before a time limit may come while the job starts: it does not end the job."""

    async def story():
        observed = ObservedAgent(tmp_path)
        observed.start(python=fake_program("kill -USR1 $$; exit 4"))
        assert await exit_code_of(observed) == 4

    asyncio.run(story())


def test_a_custom_template(slurm, tmp_path, fake_program):
    """It gets the variables of ipyparallel's templates, the slots, and the job's name."""
    template = "#!/bin/sh\n#SBATCH -c {slots} -J x-{job_name} -o {output_file}\necho mine\nexec {program_and_args}\n"

    async def story():
        observed = ObservedAgent(tmp_path, batch_template=template)
        observed.start(python=fake_program("squeue -h -o %j; exit 4"))
        assert await exit_code_of(observed) == 4
        assert observed.agent.output().splitlines()[1:] == ["mine", "x-nbelastic-node1"]

    asyncio.run(story())


def test_the_next_agent_of_a_host(slurm, tmp_path, fake_program):
    """It may start while the first one is being cancelled: each has its own files and output."""

    async def story():
        observed, second = ObservedAgent(tmp_path), ObservedAgent(tmp_path)
        observed.start(python=fake_program("echo first; sleep 1000", "first"))
        await reach_state(observed, "running")
        await until(lambda: observed.agent.output() == "first")
        second.start(python=fake_program("echo second; sleep 1000", "second"))
        observed.agent.kill()
        await reach_state(second, "running")
        await until(lambda: slurm.jobs() == [job_of(second)])
        await until(lambda: second.agent.output() == "second")
        assert len(second.secret_files()) == 2
        second.agent.kill()
        await until(lambda: not slurm.jobs())
        assert second.secret_files() == []

    asyncio.run(story())
