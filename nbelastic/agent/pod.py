"""The first process of a pod in which an agent starts through the API: it waits, and ends the pod when no agent is there.

It ignores SIGTERM: the driver learns from the API that the pod will end, and how much time is left.
"""

from __future__ import annotations

import signal
import time

from nbelastic.system import running_agents

WAIT = 120.0  # seconds without an agent after which the pod ends
CHECK = 1.0  # seconds between two looks


def main() -> None:
    """Wait while an agent runs in this pod, and `WAIT` seconds more: its driver may start another one."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Processes whose parents end become this one's children, such as those of a lost worker. They need no wait then.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    seen = time.monotonic()
    while time.monotonic() - seen < WAIT:
        if running_agents.find():
            seen = time.monotonic()
        time.sleep(CHECK)
