"""Other batch systems, by stand-ins for their programs; and what needs no batch system at all."""

import asyncio
import sys

import msgspec
import pytest

import nbelastic as nbe
from nbelastic.provision import batch
from nbelastic.provision.batch import BatchAgent
from tests.slurm.held import Held, ended, job, until


def test_without_a_batch_system(tmp_path, monkeypatch):
    """Where there is no sbatch, the message names it."""
    monkeypatch.setenv("PATH", "/nowhere")

    async def story():
        held = Held(tmp_path)
        held.start()
        assert await ended(held) == 1
        assert "sbatch cannot be run" in held.agent.output()

    asyncio.run(story())


@pytest.mark.parametrize("name", ["ssh", "local", "mpi", "nope", ""])
def test_launchers_that_are_none(name):
    """The error names the batch ones."""
    with pytest.raises(
        nbe.UsageError, match=r"not a batch launcher: choose one of batch, htcondor, lsf, pbs, sge, slurm"
    ):
        batch.check_options(name, {})


@pytest.mark.parametrize(
    ("launcher", "options", "why"),
    [
        ("slurm", {"partition": "gpu"}, r"slurm has no option 'partition': choose among account, .*queue, "),
        ("pbs", {"timelimit": "10"}, r"pbs has no option 'timelimit'"),
        ("slurm", {"output_file": "/x"}, r"no option 'output_file'"),
        ("slurm", {"job_id_regexp_group": "one"}, r"slurm: .*one"),
        ("slurm", {"queue": 3}, r"slurm: .*queue"),
        ("batch", {}, r"set batch_template"),
        ("batch", {"batch_template": "x"}, r"set submit_command"),
    ],
)
def test_options_that_are_none(launcher, options, why, tmp_path, monkeypatch):
    """The error names what there is; nothing is written anywhere."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nbe.UsageError, match=why):
        batch.check_options(launcher, options)
    with pytest.raises(nbe.UsageError, match=why):
        BatchAgent(launcher, "a", tmp_path / "run", options, print, number=1)
    assert list(tmp_path.iterdir()) == []


SUBMITTERS = {  # how each takes a script and what it says; the script runs at once, in the background
    "pbs": ("qsub", 'sh "$1" > /dev/null & echo 17.server', "qdel 17"),
    "sge": ("qsub", """sh "$1" > /dev/null & echo 'Your job 17 ("x") has been submitted'""", "qdel 17"),
    "lsf": (
        "bsub",
        "cat > script; sh script > /dev/null & echo 'Job <17> is submitted to queue <normal4>.'",
        "bkill 17",
    ),
    "htcondor": (
        "condor_submit",
        """run=$(sed -n 's/^executable = //p' "$1"); with=$(sed -n 's/^arguments = "\\(.*\\)"/\\1/p' "$1")
        $run $with > /dev/null & echo 'Submitting job(s).'; echo '1 job(s) submitted to cluster 17.'""",
        "condor_rm 17",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("launcher", SUBMITTERS)
def test_other_batch_systems(launcher, tmp_path, monkeypatch, stand_in):
    """Their scripts start the agent with its configuration, and killing it deletes the job by its number."""
    submit, does, delete = SUBMITTERS[launcher]
    stand_in(does, submit)
    stand_in(f'echo {delete.split()[0]} "$@" > {tmp_path}/deleted', delete.split()[0])
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)

    async def story():
        held = Held(tmp_path, launcher)
        python = stand_in(f'cat "$NBELASTIC_AGENT" > {tmp_path}/seen.new; mv {tmp_path}/seen.new {tmp_path}/seen')
        held.start(python=python)
        await until((tmp_path / "seen").exists)
        assert msgspec.json.decode((tmp_path / "seen").read_bytes()) == held.config
        await until(lambda: job(held) == "17")
        script = held.file("batch").read_text()
        assert "node1" in script
        assert "{" not in script
        assert "not-to-be-seen" not in script
        assert await held.agent.state() == ""
        held.agent.kill()
        await until(lambda: (tmp_path / "deleted").exists() and (tmp_path / "deleted").read_text())
        assert (tmp_path / "deleted").read_text().strip() == delete
        await until(lambda: held.stops)
        assert held.stops == [None]
        assert held.left() == []

    asyncio.run(story())


@pytest.mark.soak
@pytest.mark.parametrize("launcher", SUBMITTERS)
def test_other_batch_systems_that_refuse(launcher, tmp_path, monkeypatch, stand_in):
    """Whatever way they say it, it is told."""
    stand_in("echo 'foo2: No such queue. Job not submitted.' >&2; exit 255", SUBMITTERS[launcher][0])
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    async def story():
        held = Held(tmp_path, launcher)
        held.start()
        assert await ended(held) == 1
        assert "foo2: No such queue" in held.agent.output()

    asyncio.run(story())


def test_a_job_that_cannot_be_cancelled_at_once(tmp_path, stand_in):
    """The controller is away for a moment: it is tried again, without anybody waiting."""
    submit = stand_in("echo 17", "submit")
    delete = stand_in(f'echo "$@" >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) -ge 2 ]', "delete")

    async def story():
        options = {"batch_template": "x", "submit_command": [submit], "delete_command": [delete]}
        held = Held(tmp_path, "batch", job_id_regexp=r"\d+", **options)
        held.start()
        await until(lambda: job(held))
        held.agent.kill()
        await until(lambda: (tmp_path / "tries").exists() and (tmp_path / "tries").read_text() == "17\n17\n")

    asyncio.run(story())


def test_a_strange_name_of_a_host(tmp_path, stand_in):
    """It is no path and no option in any file or command."""

    async def story():
        submit = stand_in(f'cp "$1" {tmp_path}/script; echo 17', "sbatch")
        held = Held(tmp_path, host="fe80::1%eth0/../x", submit_command=[submit])
        held.start(python=sys.executable)
        await until(lambda: job(held))
        assert "--job-name=nbelastic-fe80__1_eth0_.._x\n" in (tmp_path / "script").read_text()
        assert {path.parent for path in held.run_folder.rglob("*")} == {held.run_folder}

    asyncio.run(story())
