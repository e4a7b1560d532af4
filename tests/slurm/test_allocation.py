"""Hosts from a Slurm allocation."""

import asyncio
import re
import sys

import pytest

import nbelastic as nbe
from nbelastic.provision import discovery
from nbelastic.provision import slurm as slurm_discovery
from tests.slurm.local_slurm import until

JOB = """JobId=7 JobName=x NodeList=evil
   JobState=RUNNING Reason=None Dependency=(null)
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList={nodes}
   NumNodes={n} NumCPUs={total} NumTasks={tasks} CPUs/Task={cpus} ReqB:S:C:T=0:0:*:*
   TRES=cpu=64,node=2,billing=64
   Socks/Node=* NtasksPerN:B:S:C={each}:0:*:* CoreSpec=*
   JOB_GRES=(null)
     Nodes={nodes} CPU_IDs={ids} Mem=0 GRES={gres}
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
"""


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["-N2", "--exclusive"], ["n1:4", "n2:4"]),
        (["-N2", "--ntasks-per-node=3"], ["n1:3", "n2:3"]),
        (["-N2", "--ntasks-per-node=1", "--cpus-per-task=2"], ["n1:1", "n2:1"]),
        (["-N2", "-n6"], ["n1:4", "n2:2"]),
        (["-N2", "-n6", "--exclusive"], ["n1:3", "n2:3"]),
        (["-N1", "-n1", "-c2", "-w", "n2"], ["n2:1"]),
        (["-N1", "-p", "gpu", "--gres=gpu:2"], ["g1:2"]),
        (["-N1", "-p", "gpu", "--gres=gpu:1", "--ntasks-per-node=3"], ["g1:1"]),
    ],
    ids=" ".join,
)
def test_slots_are_the_jobs_gpus_or_tasks_or_cpus(slurm, options, found):
    """A node has as many slots as the job has GPUs there, else tasks, else CPUs."""
    with slurm.allocation(*options) as find_hosts:
        assert find_hosts() == found


def test_a_drained_node_is_left_out_until_it_is_resumed(slurm):
    """An administrator drains a node while the job runs."""
    with slurm.allocation("-N2", "--ntasks-per-node=2") as find_hosts:
        assert find_hosts() == ["n1:2", "n2:2"]
        slurm("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
        assert find_hosts() == ["n1:2"]
        slurm("scontrol", "update", "nodename=n2", "state=resume")
        until(lambda: find_hosts() == ["n1:2", "n2:2"])


def test_a_job_that_shrinks(slurm):
    """A node that the job has given back is left out."""
    with slurm.allocation("-N2", "--ntasks-per-node=2") as find_hosts:
        assert find_hosts() == ["n1:2", "n2:2"]
        (job,) = slurm.jobs()
        slurm("scontrol", "update", f"jobid={job}", "nodelist=n2")
        assert find_hosts() == ["n2:2"]


IN_A_TASK = """
import asyncio, os, pathlib, time
from nbelastic.provision.slurm import SlurmDiscovery
own = os.environ["SLURM_ARRAY_TASK_ID"]
pathlib.Path("runs-" + own).touch()
while not (pathlib.Path("runs-1").exists() and pathlib.Path("runs-2").exists()):
    time.sleep(0.1)
try:
    found = " ".join(host.name for host in asyncio.run(SlurmDiscovery().hosts()))
except Exception as error:
    found = repr(error)
pathlib.Path("new-" + own).write_text(os.environ["SLURMD_NODENAME"] + " has " + found)
pathlib.Path("new-" + own).rename("found-" + own)
while not pathlib.Path("done").exists():
    time.sleep(0.1)
"""


@pytest.mark.parametrize("tasks", ["1-2", "1-3"])
def test_a_task_of_an_array_has_its_own_nodes(slurm, tmp_path, tasks):
    """The number of one task's job is also that of the array. The nodes of the other tasks are not its own; one may be queued."""
    (tmp_path / "task.py").write_text(IN_A_TASK)
    job = slurm("sbatch", "--parsable", f"--array={tasks}", "-N1", "--exclusive", f"--chdir={tmp_path}",
                "--output=/dev/null", f"--wrap={sys.executable} task.py").strip()  # fmt: skip
    until(lambda: len(list(tmp_path.glob("found-*"))) == 2, 30, "both tasks to find their hosts")
    found = sorted(file.read_text() for file in tmp_path.glob("found-*"))
    (tmp_path / "done").touch()
    slurm("scancel", job)
    until(slurm.idle, 30, "the nodes to be idle")
    assert found == ["n1 has n1", "n2 has n2"]


def test_a_suspended_job_is_an_error(slurm):
    """A discovery that fails leaves the known hosts as they are."""
    with slurm.allocation("-N1") as find_hosts:
        assert find_hosts() == ["n1:1"]
        (job,) = slurm.jobs()
        slurm("scontrol", "suspend", job)
        assert "SUSPENDED" in " ".join(find_hosts())
        slurm("scontrol", "resume", job)
        assert find_hosts() == ["n1:1"]


def test_the_controller_is_queried_seldom(slurm):
    """The discovery is polled each second, and queries Slurm's controller each 5 s (here: 1000 s)."""
    with slurm.allocation("-N2", every=1000.0) as find_hosts:
        assert find_hosts() == ["n1:1", "n2:1"]
        slurm("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
        assert find_hosts() == ["n1:1", "n2:1"]
        slurm("scontrol", "update", "nodename=n2", "state=resume")


def test_outside_an_allocation(monkeypatch):
    """The error says what to do."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(nbe.DiscoveryError, match=r"not in a Slurm job .*salloc or sbatch"):
        discovery.find_discovery("slurm", None)


def test_an_allocation_of_2000_nodes(tmp_path, monkeypatch):
    """For each node Slurm prints about 1.2 kB."""
    job = JOB.format(nodes="a[1-2000]", n=2000, total=8000, tasks=2000, cpus=1, each=4, ids="0-3", gres="")
    program = tmp_path / "scontrol"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nnames = [f'a{{n}}' for n in range(1, 2001)]\n"
        f"if 'job' in sys.argv: print({job!r})\n"
        "elif 'hostnames' in sys.argv: print(*names)\n"
        "else: print(*(f\"NodeName={name} State=ALLOCATED Comment={'x' * 1200}\" for name in names), sep='\\n')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    hosts = asyncio.run(slurm_discovery.SlurmDiscovery().hosts())
    assert len(hosts) == 2000
    assert {host.slots for host in hosts} == {4}


def test_the_name_slurm_is_known(slurm, monkeypatch):
    """`--discover slurm` finds the discovery. A job that Slurm does not know is an error with Slurm's message."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    found = discovery.find_discovery("slurm", 3)
    assert isinstance(found, slurm_discovery.SlurmDiscovery)
    with pytest.raises(nbe.DiscoveryError, match="Invalid job id"):
        asyncio.run(found.hosts())


def test_without_slurm(monkeypatch):
    """The error names scontrol."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(nbe.DiscoveryError, match="scontrol cannot be run"):
        asyncio.run(slurm_discovery.SlurmDiscovery().hosts())


@pytest.mark.parametrize(
    ("asked", "slots"),
    [
        ({"gres": "gpu:a100:4(IDX:0-3)"}, 4),
        ({"gres": "gpu:7g.80gb:2(IDX:0-1),gpu:1(IDX:4)"}, 3),
        ({"gres": "gpu:8,nic:2"}, 8),
        ({"gres": "shard:6(0/6)"}, 16),
        ({"each": 5}, 5),
        ({"tasks": 7, "n": 2}, 4),
        ({"tasks": 16, "n": 2, "total": 16}, 16),
        ({"tasks": 2, "n": 2}, 16),
        ({"cpus": 3}, 5),
        ({"tasks": 100, "n": 2, "cpus": 4}, 4),
    ],
    ids=str,
)
def test_slots_from_the_output_of_scontrol(asked, slots):
    """Without Slurm: typed GPUs, MIG slices, tasks that do not divide evenly, several CPUs per task."""
    text = JOB.format(
        **{
            "nodes": "a[1-2]",
            "n": 1,
            "total": 64,
            "tasks": 1,
            "cpus": 1,
            "each": 0,
            "ids": "0-7,32-39",
            "gres": "",
            **asked,
        }
    )
    (job,) = slurm_discovery.jobs(text, "7")
    assert (job.state, job.nodes) == ("RUNNING", "a[1-2]")
    assert slurm_discovery.slots_on(job, job.shares["a[1-2]"]) == slots


@pytest.mark.parametrize(
    ("state", "unusable"),
    [
        *((state, False) for state in ("IDLE", "ALLOCATED", "MIXED", "MIXED+PLANNED", "ALLOCATED+RESERVED")),
        *((state, True) for state in ("MIXED+DRAIN", "DOWN", "DOWN*", "IDLE*", "IDLE+DRAIN+NOT_RESPONDING", "FAILING")),
    ],
)
def test_states_of_nodes(state, unusable):
    text = f"NodeName=a1 Arch=x86_64 OS=Linux State of the art  State={state} ThreadsPerCore=1 Reason=State=IDLE"
    found = slurm_discovery.states(re.sub(r"State of the art ", "", text))
    assert slurm_discovery.is_unusable(found["a1"]) is unusable
