"""Batch agents, as the tests observe them."""

import itertools

from nbelastic.provision.batch import BatchAgent
from tests.support.waiting import until_async as until

TIMEOUT = 40.0
_numbers = itertools.count(1)


class ObservedAgent:
    """A BatchAgent and the exit codes that it reported. `config` is for a real agent, which connects to a server."""

    def __init__(self, folder, launcher="slurm", host="node1", **options):
        self.stops = []
        self.run_folder = folder / "run"
        self.agent = BatchAgent(launcher, host, self.run_folder, options, self.stops.append, number=next(_numbers))
        self.host = host
        self.config = {"settings": {"slots": "2"}, "keys": {"secret": "not-to-be-seen"}}

    def start(self, environment=None, python=None, cwd=None):
        self.agent.start(self.config, environment or {}, python, cwd)

    def file(self, kind):
        """This agent's file of that kind; None if there is none."""
        return next(self.run_folder.glob(f"agent-node1-*.{kind}"), None)

    def secret_files(self):
        """The names of the files that may hold a secret."""
        return sorted(path.name for path in self.run_folder.glob("*") if path.suffix in (".json", ".sh"))


def job_of(observed):
    """The job's number; empty before it is submitted."""
    return observed.agent.job


async def exit_code_of(observed):
    """Wait for the end of the job; query its state as the driver does. Return the exit code."""

    async def query():
        await observed.agent.state()
        return observed.stops

    (code,) = await until(query, what="the job to end")
    return code


async def reach_state(observed, state):
    """Wait until the job has this state. If it ends, the test fails with what the batch system has said."""
    last = ""

    async def is_reached():
        nonlocal last
        last = await observed.agent.state()
        assert not observed.stops, observed.agent.output()
        return last == state

    await until(is_reached, what=lambda: f"{state!r}: the last state was {last!r}, jobs {observed.agent.job!r}")
