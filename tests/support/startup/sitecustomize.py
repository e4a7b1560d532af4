"""Python imports this file as it starts, in every process of the tests; two variables say what it does.

TESTS_WARM: the address of the warm process. It forks an agent for the process that was to be one: see tests/support/warm_process.py.
TESTS_JITTER: the seed of `pytest --jitter SEED`: see tests/support/jitter.py.
"""

from __future__ import annotations

import os
import sys
import time

STALL = 0.1  # seconds that an event loop stalls at most
OFTEN = 0.02  # of all looks at what is ready
AGENT_LATE, WORKER_LATE = 5.0, 2.5  # seconds that they start late at most

_agent = sys.orig_argv[-2:] == ["-c", "from nbelastic.agent.start import main; main()"]
_seed = os.environ.get("TESTS_JITTER", "")
if _seed:  # each Python process of the tests imports this file
    import random
    import selectors

    _random = random.Random(f"{_seed} {sys.orig_argv[1:]}")


def become_warm() -> None:
    """Have the warm process fork the agent, and end as that ends; return if there is no warm process."""
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../../.."))
    from tests.support.warm_request import join

    del sys.path[0]
    join(os.environ["TESTS_WARM"])


def stall() -> None:
    """From now on the event loops of this process stall at random, and so do those of the processes that it forks."""
    for selector in (selectors.EpollSelector, selectors.PollSelector):
        selector.select = _stalling(selector.select)
    os.register_at_fork(before=_random.random, after_in_child=_forked)  # each fork has numbers of its own
    if _agent:
        late(AGENT_LATE)


def late(longest: float) -> None:
    time.sleep(_random.uniform(0.0, longest))


def stall_links() -> None:
    """From now on the threads of this process that serve a link stall too; they look at their sockets by ZeroMQ's poller."""
    import zmq

    zmq.Poller.poll = _stalling(zmq.Poller.poll)


def _stalling(select):
    def stalls(self, timeout=None):
        if _random.random() < OFTEN:
            time.sleep(_random.uniform(0.0, STALL))
        return select(self, timeout)

    # nbelastic takes what lies outside the folders of Python and its packages for the user's code, and shows its stack
    stalls.__code__ = stalls.__code__.replace(co_filename=selectors.__file__)
    return stalls


def _forked() -> None:
    """A fork of a template is a worker."""
    _random.seed(f"{_random.random()} {_seed}")
    if "nbelastic.programs.template" in sys.modules:
        late(WORKER_LATE)


if _agent and "TESTS_WARM" in os.environ:
    become_warm()
if _seed:
    stall()
