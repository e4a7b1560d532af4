"""Other batch systems, with fake programs; and tests without a batch system."""

import asyncio
import sys
import time

import msgspec
import pytest

import nbelastic as nbe
from nbelastic.provision import batch, job_cancellation
from nbelastic.provision.batch import BatchAgent
from tests.slurm.batch_agents import ObservedAgent, exit_code_of, job_of, until
from tests.support.waiting import until as until_now


def test_without_a_batch_system(tmp_path, monkeypatch):
    """The message names sbatch."""
    monkeypatch.setenv("PATH", "/nowhere")

    async def story():
        observed = ObservedAgent(tmp_path)
        observed.start()
        assert await exit_code_of(observed) == 1
        assert "sbatch cannot be run" in observed.agent.output()

    asyncio.run(story())


@pytest.mark.parametrize("name", ["ssh", "local", "mpi", "nope", ""])
def test_invalid_launchers(name):
    """The error names the batch launchers."""
    with pytest.raises(
        nbe.UsageError, match=r"not a batch launcher: choose one of batch, htcondor, lsf, pbs, sge, slurm"
    ):
        batch.check_options(name, {})


@pytest.mark.parametrize(
    ("launcher", "options", "why"),
    [
        ("slurm", {"gress": "gpu"}, r"slurm has no option 'gress': choose among account, .*gres, .*queue, "),
        ("pbs", {"gres": "gpu"}, r"pbs has no option 'gres'"),
        ("pbs", {"timelimit": "10"}, r"pbs has no option 'timelimit'"),
        ("slurm", {"output_file": "/x"}, r"no option 'output_file'"),
        ("slurm", {"job_id_regexp_group": "one"}, r"slurm: .*one"),
        ("slurm", {"queue": 3}, r"slurm: .*queue"),
        ("batch", {}, r"set batch_template"),
        ("batch", {"batch_template": "x"}, r"set submit_command"),
    ],
)
def test_invalid_options(launcher, options, why, tmp_path, monkeypatch):
    """The error names the valid options; no file is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nbe.UsageError, match=why):
        batch.check_options(launcher, options)
    with pytest.raises(nbe.UsageError, match=why):
        BatchAgent(launcher, "a", tmp_path / "run", options, print, number=1)
    assert list(tmp_path.iterdir()) == []


SUBMITTERS = {  # how each reads a script, and what it prints; the script runs at once, in the background
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
def test_other_batch_systems(launcher, tmp_path, monkeypatch, fake_program):
    """Their scripts start the agent with its configuration. Killing it deletes the job by its number."""
    submit, commands, delete = SUBMITTERS[launcher]
    fake_program(commands, submit)
    fake_program(f'echo {delete.split()[0]} "$@" > {tmp_path}/deleted', delete.split()[0])
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)

    async def story():
        observed = ObservedAgent(tmp_path, launcher)
        python = fake_program(f'cat "$NBELASTIC_AGENT" > {tmp_path}/seen.new; mv {tmp_path}/seen.new {tmp_path}/seen')
        observed.start(python=python)
        await until((tmp_path / "seen").exists)
        assert msgspec.json.decode((tmp_path / "seen").read_bytes()) == observed.config
        await until(lambda: job_of(observed) == "17")
        script = observed.file("batch").read_text()
        assert "node1" in script
        assert "{" not in script
        assert "not-to-be-seen" not in script
        assert await observed.agent.state() == ""
        observed.agent.kill()
        await until(lambda: (tmp_path / "deleted").exists() and (tmp_path / "deleted").read_text())
        assert (tmp_path / "deleted").read_text().strip() == delete
        await until(lambda: observed.stops)
        assert observed.stops == [None]
        assert observed.secret_files() == []

    asyncio.run(story())


@pytest.mark.soak
@pytest.mark.parametrize("launcher", SUBMITTERS)
def test_other_batch_systems_that_refuse_a_job(launcher, tmp_path, monkeypatch, fake_program):
    """The batch system's message is reported."""
    fake_program("echo 'foo2: No such queue. Job not submitted.' >&2; exit 255", SUBMITTERS[launcher][0])
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    async def story():
        observed = ObservedAgent(tmp_path, launcher)
        observed.start()
        assert await exit_code_of(observed) == 1
        assert "foo2: No such queue" in observed.agent.output()

    asyncio.run(story())


def test_a_job_that_cannot_be_cancelled_at_once(tmp_path, fake_program):
    """If the batch system's controller is unreachable, the cancellation is tried again in the background."""
    submit = fake_program("echo 17", "submit")
    delete = fake_program(f'echo "$@" >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) -ge 2 ]', "delete")

    async def story():
        options = {"batch_template": "x", "submit_command": [submit], "delete_command": [delete]}
        observed = ObservedAgent(tmp_path, "batch", job_id_regexp=r"\d+", **options)
        observed.start()
        await until(lambda: job_of(observed))
        observed.agent.kill()
        await until(lambda: (tmp_path / "tries").exists() and (tmp_path / "tries").read_text() == "17\n17\n")

    asyncio.run(story())


@pytest.mark.parametrize(
    ("error", "tries", "said"),
    [
        ("Unable to contact slurm controller", 5, "a batch job may still be queued, as its system did not answer"),
        ("Invalid job id specified", 3, ""),
    ],
)
def test_a_job_that_is_not_cancelled(tmp_path, fake_program, monkeypatch, capfd, error, tries, said):
    """A controller that is away has more time, and at the end the log has the command. A job that has ended has three tries."""
    monkeypatch.setattr(job_cancellation, "PAUSES", "0 0 0 0 0")
    job_cancellation.cancel([fake_program(f"echo x >> {tmp_path}/tries; echo '{error}' >&2; exit 1", "delete")], "17")
    until_now(lambda: (tmp_path / "tries").exists() and (tmp_path / "tries").read_text() == "x\n" * tries)
    shown = ""

    def is_shown():
        nonlocal shown
        shown += capfd.readouterr().err
        return f"run `{tmp_path}/delete 17` ({error})" in shown

    if said:
        until_now(is_shown, what="the line")
    else:
        time.sleep(0.2)  # another try would come at once
        assert not is_shown()
    assert said in shown
    assert (tmp_path / "tries").read_text() == "x\n" * tries


def test_an_unusual_host_name(tmp_path, fake_program):
    """No file or command takes it for a path or an option."""

    async def story():
        submit = fake_program(f'cp "$1" {tmp_path}/script; echo 17', "sbatch")
        observed = ObservedAgent(tmp_path, host="fe80::1%eth0/../x", submit_command=[submit])
        observed.start(python=sys.executable)
        await until(lambda: job_of(observed))
        assert "--job-name=nbelastic-fe80__1_eth0_.._x\n" in (tmp_path / "script").read_text()
        assert {path.parent for path in observed.run_folder.rglob("*")} == {observed.run_folder}

    asyncio.run(story())
