"""The nodes of a host: processes with torch's elastic agent, which run the host's workers of a script."""

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

from nbelastic.agent.fork import ForkRefusedError, fork
from nbelastic.protocol import agent_messages
from nbelastic.system.log_line import log_line
from nbelastic.system.processes import is_stopped, kill_group, kill_with_children

ENTRY = ("nbelastic.torchrun.boot", "boot")  # by name: the agent must not import it
KILL_AFTER = 5.0  # seconds that a node has to end, besides those in which torch's agent ends its workers
KEPT_EXIT_CODES = 16


class _Node:
    def __init__(self, process: BaseProcess, shutdown: float) -> None:
        """`shutdown`: seconds between SIGTERM and SIGKILL of its workers."""
        self.process, self.shutdown = process, shutdown
        self.kill_at = float("inf")
        self.sigterm_due = False


class Nodes:
    """Lives in the agent's main thread. `common`: settings of every node, such as its host and the relay."""

    def __init__(self, context: ForkServerContext, common: dict[str, Any]) -> None:
        self._context, self._common = context, common
        self._nodes: dict[int, _Node] = {}
        self._refused: list[int] = []  # numbers of nodes that could not be forked
        self.ended: dict[int, int] = {}  # the exit codes of the newest nodes that have ended, by number

    @property
    def sentinels(self) -> list[int]:
        """Descriptors that become readable when a node ends."""
        return [node.process.sentinel for node in self._nodes.values()]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the nodes that run."""
        return tuple(self._nodes)

    def start(self, order: agent_messages.StartNode, home: tuple[str, str], log_dir: str) -> None:
        """Fork a node. `home`: the address and the interface of its stores."""
        try:
            process = fork(lambda: self._process(order, home, log_dir))
            self._nodes[order.number] = _Node(process, order.script.shutdown)
        except ForkRefusedError as error:
            log_line(f"nbelastic: {error}")
            self._refused.append(order.number)

    def _process(self, order: agent_messages.StartNode, home: tuple[str, str], log_dir: str) -> BaseProcess:
        boot = getattr(importlib.import_module(ENTRY[0]), ENTRY[1])
        template = vars(forkserver._forkserver)
        settings: dict[str, Any] = {
            **self._common,
            "number": order.number,
            "log_dir": log_dir,
            "home": home,
            "script": msgspec.to_builtins(order.script),
            "environment": dict(os.environ),
            # for its workers to connect to the template; the key is new in Python 3.14
            "template": {k: template[k] for k in ("_forkserver_address", "_forkserver_authkey") if k in template},
        }
        return self._context.Process(target=boot, args=(settings,), daemon=False, name=f"node-{order.number}")

    def stop(self, number: int, *, kill: bool) -> None:
        """Let a node end its workers and itself; `kill`: kill it at the next check."""
        node = self._nodes.get(number)
        if node is None:
            return
        if kill:
            node.kill_at, node.sigterm_due = 0.0, False
        elif node.kill_at == float("inf"):
            node.kill_at = time.monotonic() + node.shutdown + KILL_AFTER
            node.sigterm_due = not kill_group(node.process.pid or 0, signal.SIGTERM)

    def check(self, now: float) -> list[agent_messages.NodeExited]:
        """Kill nodes that are stopped (SIGSTOP), or that have not ended in time. Returns the nodes that have ended.

        Just after the fork a node has no process group: one that `stop` could not reach gets SIGTERM here.
        """
        ended = [agent_messages.NodeExited(self._common["host"], number, 1) for number in self._refused]
        self.ended |= dict.fromkeys(self._refused, 1)
        self._refused.clear()
        for number, node in list(self._nodes.items()):
            pid = node.process.pid or 0
            if node.sigterm_due:
                node.sigterm_due = not kill_group(pid, signal.SIGTERM)
            if now >= node.kill_at or is_stopped(pid):
                kill_with_children(pid)
            if node.process.exitcode is not None:
                self.ended = {**dict(list(self.ended.items())[1 - KEPT_EXIT_CODES :]), number: node.process.exitcode}
                ended.append(agent_messages.NodeExited(self._common["host"], number, node.process.exitcode))
                node.process.close()
                del self._nodes[number]
        return ended

    def close(self) -> None:
        """Kill all nodes, with their workers."""
        for node in self._nodes.values():
            kill_with_children(node.process.pid or 0)
        for node in self._nodes.values():
            node.process.join(KILL_AFTER)
