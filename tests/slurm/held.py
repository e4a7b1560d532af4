"""A batch agent as the tests hold it."""

import itertools

from nbelastic.provision.batch import BatchAgent
from tests.support.waiting import until_async as until

PATIENCE = 40.0
_numbers = itertools.count(1)


class Held:
    """A BatchAgent and what it has told; `config` is for the real agent, if there is a hub for it to speak to."""

    def __init__(self, folder, launcher="slurm", host="node1", **options):
        self.stops = []
        self.run_folder = folder / "run"
        self.agent = BatchAgent(launcher, host, self.run_folder, options, self.stops.append, number=next(_numbers))
        self.host = host
        self.config = {"settings": {"slots": "2"}, "keys": {"secret": "not-to-be-seen"}}

    def start(self, environment=None, python=None, cwd=None):
        self.agent.start(self.config, environment or {}, python, cwd)

    def file(self, kind):
        """The one of that kind; None if there is none."""
        return next(self.run_folder.glob(f"agent-node1-*.{kind}"), None)

    def left(self):
        """Files that may hold a secret."""
        return sorted(path.name for path in self.run_folder.glob("*") if path.suffix in (".json", ".sh"))


def job(held):
    """Its number; empty before it is submitted."""
    return held.agent.job


async def ended(held):
    """Its exit code, asked as the driver does: `state()` every now and then."""

    async def told():
        await held.agent.state()
        return held.stops

    (code,) = await until(told, what="the job to end")
    return code


async def is_(held, word):
    return await held.agent.state() == word
