"""The scripts' nodes of a host: torch's elastic agents, forked from the template like workers, watched and ended like them."""

from __future__ import annotations

import importlib
import os
import signal
import time
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from nbelastic.agent.fork import fork
from nbelastic.protocol import agent_messages
from nbelastic.system.processes import kill_group, stopped

ENTRY = ("nbelastic.torchrun.boot", "boot")  # by name: host and scripts never import one another
GRACE = 5.0  # seconds between SIGTERM, which the workers are sent too, and SIGKILL
AGAIN = 0.1  # seconds
KNOWN = 16  # exit codes that are kept


class _Started:
    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        self.kill_at = float("inf")


class Nodes:
    """For the agent's main thread. `known`: what every node is told (its host, the relay)."""

    def __init__(self, context: ForkServerContext, known: dict[str, Any]) -> None:
        self._context, self._known = context, known
        self._started: dict[int, _Started] = {}
        self.ended: dict[int, int] = {}  # the exit codes of the last ones

    @property
    def sentinels(self) -> list[int]:
        """Descriptors that become readable when one ends."""
        return [started.process.sentinel for started in self._started.values()]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of those that have not ended."""
        return tuple(self._started)

    def launch(self, order: agent_messages.Launch, home: tuple[str, str], log_dir: str) -> None:
        """Fork one. `home`: the address and the interface of its stores."""
        self._started[order.number] = _Started(fork(lambda: self._described(order, home, log_dir)))

    def _described(self, order: agent_messages.Launch, home: tuple[str, str], log_dir: str) -> BaseProcess:
        boot = getattr(importlib.import_module(ENTRY[0]), ENTRY[1])
        template = vars(forkserver._forkserver)
        settings: dict[str, Any] = {
            **self._known,
            "number": order.number,
            "log_dir": log_dir,
            "home": home,
            "script": msgspec.to_builtins(order.script),
            "environment": dict(os.environ),
            # how its workers find the template; Python 3.14 has a key as well
            "template": {k: template[k] for k in ("_forkserver_address", "_forkserver_authkey") if k in template},
        }
        return self._context.Process(target=boot, args=(settings,), daemon=False, name=f"node-{order.number}")

    def recall(self, number: int, *, kill: bool) -> None:
        """Have it end its workers, then itself."""
        started = self._started.get(number)
        if started is None:
            return
        if kill:
            started.kill_at = 0.0
        elif started.kill_at == float("inf"):
            started.kill_at = time.monotonic() + GRACE
            kill_group(started.process.pid or 0, signal.SIGTERM)

    def watch(self, now: float) -> list[agent_messages.LaunchEnded]:
        """Those that have ended. One that is stopped, or was told to end and has not, is killed."""
        ended = []
        for number, started in list(self._started.items()):
            pid = started.process.pid or 0
            if now >= started.kill_at or stopped(pid):
                kill_group(pid)
            if started.process.exitcode is not None:
                self.ended = {**dict(list(self.ended.items())[1 - KNOWN :]), number: started.process.exitcode}
                ended.append(agent_messages.LaunchEnded(self._known["host"], number, started.process.exitcode))
                started.process.close()
                del self._started[number]
        return ended

    def close(self) -> None:
        """The agent ends: so do they, and with each its workers."""
        for started in self._started.values():
            kill_group(started.process.pid or 0)
        for started in self._started.values():
            started.process.join(GRACE)
