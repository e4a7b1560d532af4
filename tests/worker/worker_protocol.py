"""A worker's protocol in the middle of its job: no process, no socket, no clock."""

from __future__ import annotations

import math

from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.formation import Formation
from nbelastic.worker.protocol import LinkState, Protocol, Send

GENERATION = 7
W = WorkerId("a", 0, 1)
CONNECTED = LinkState(disconnected=False, congested=False, received_at=0.0)
DISCONNECTED = LinkState(disconnected=True, congested=False, received_at=0.0)


def training_worker():
    """It is in a generation of its job, at the third commit there."""
    worker = Protocol(W, lease=math.inf)
    worker.facts.begin("job")
    worker.begin("job")
    worker.generation, worker.commits = GENERATION, 3
    worker.joined(Formation(GENERATION, 1, 2, 1, 2, 0, 1, "", 0, (), (("a", 2),)))
    worker.formed({})
    return worker


def commit(worker):
    worker.commits += 1
    worker.total += 1


def sent(actions):
    return [action.message for action in actions if isinstance(action, Send)]
