"""A host's node: torch's elastic agent in a process of its own, a fork of the template, under the host's agent.

Its main thread is torch's. The link's thread speaks with the driver, follows the workers' output and measures them.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import SignalException

from nbelastic.protocol import agent_messages, node_messages
from nbelastic.protocol import script_events as sev
from nbelastic.torchrun.elastic_agent import JobAgent, worker_spec
from nbelastic.torchrun.output import JobLogs, Tail
from nbelastic.torchrun.rendezvous import DriverRendezvous
from nbelastic.transport.client import Client

LOOK = 0.1  # seconds between looks at what the workers have written
SAMPLE = 1.0  # seconds between samples of their CPU and memory
CLOSE = 2.0  # seconds


class Node:
    """`run()` in the main thread."""

    def __init__(self, settings: dict[str, Any], script: agent_messages.Script, folder: Path) -> None:
        self._host, self._settings = settings["host"], settings
        self._logs = JobLogs(folder, self._host, script.redirects, script.tee)
        self._tail = Tail(self._logs)
        self._sampled_at = 0.0
        self._stats: dict[int, psutil.Process] = {}
        if not script.cold:
            _use_template(settings["template"])
        self._agent: JobAgent | None = None
        ready = sev.NodeReady(self._host, 0, "", script.role)
        self._rendezvous = DriverRendezvous(self._connect, ready, settings["home"], before_round=self._begin)
        self._agent = JobAgent(
            worker_spec(script, self._rendezvous, tuple(os.environ)), script, self._logs, self._rendezvous.link.send
        )

    def _connect(self, hear: Any) -> Client:
        settings = self._settings
        peer = f"node/{self._host}~{settings['number']}"
        return Client(
            Path(settings["relay"]),
            None,
            peer,
            node_messages.ToNode,
            hear,
            tick=self._tick,
            heartbeat=settings["heartbeat"],
        )

    def _begin(self, order: node_messages.Round) -> None:
        if self._agent is not None:
            self._agent.begin(order)

    def run(self) -> bool:
        """Until the script has ended, or this node's part in it. Whether all its workers have succeeded."""
        agent = self._agent
        assert agent is not None
        reason, broken, result = "it has ended", False, None
        try:
            result = agent.run()
            if result is not None:
                self._rendezvous.linger()
        except SignalException as end:
            reason = f"it was told to end ({end.sigval.name})"
        except Exception as error:
            reason, broken = f"its elastic agent raised {type(error).__name__}: {error}", True
            raise
        finally:
            agent.kill_groups()
            link = self._rendezvous.link
            for output in self._tail.read():
                link.send(output)
            link.send(sev.NodeLeft(self._host, reason, broken))
            link.close()
            self._rendezvous.shutdown()
            sys.stdout.flush()
        return result is not None and not result.is_failed()

    def _tick(self) -> float:
        """In the link's thread."""
        agent = self._agent
        if agent is None:
            return LOOK
        link = self._rendezvous.link
        if not link.congested:  # the files keep what is not read yet
            for output in self._tail.read():
                link.send(output)
        now = time.monotonic()
        if now >= self._sampled_at + SAMPLE:
            self._sampled_at = now
            self._sample(link, *agent.workers)
        return LOOK

    def _sample(self, link: Client, pids: tuple[int, ...], number: int) -> None:
        self._stats = {pid: stats for pid, stats in self._stats.items() if pid in pids}
        found = []
        try:
            for pid in pids:
                stats = self._stats.setdefault(pid, psutil.Process(pid))
                with stats.oneshot():
                    found.append((stats.cpu_percent(), stats.memory_info().rss))
        except psutil.Error:
            return  # one has just ended
        if found:
            link.report(node_messages.NodeSample(self._host, number, tuple(found)))


class _Template(forkserver.ForkServer):
    """The host's agent's, for those whom it has forked: torch's own `forkserver` start method then costs a fork."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        vars(self).update(found, _forkserver_alive_fd=vars(forkserver._forkserver)["_forkserver_alive_fd"])

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()


def _use_template(found: dict[str, Any]) -> None:
    template = _Template(found)
    forkserver.connect_to_new_process = template.connect_to_new_process
    forkserver.ensure_running = template.ensure_running
