"""A host's node: torch's elastic agent in a process of its own, a fork of the template, under the host's agent.

Its main thread is torch's. The link's thread speaks with the driver, follows the workers' output and measures them.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import sys
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import msgspec
import psutil

from nbelastic.core import script_messages as s
from nbelastic.core import wire
from nbelastic.folders import make_private
from nbelastic.link import Keys, Spoke
from nbelastic.processes import die_with_parent, kill_group

LOOK = 0.1  # seconds between looks at what the workers have written
SAMPLE = 1.0  # seconds between samples of their CPU and memory
CLOSE = 2.0  # seconds


def boot(settings: dict[str, Any]) -> None:
    """Be the node that `settings` describes, until its script has ended."""
    os.setsid()
    die_with_parent()
    mp.set_start_method(None, force=True)
    script = msgspec.convert(settings["script"], wire.Script)
    folder = Path(settings["log_dir"])
    make_private(folder)
    _redirect(folder / f"{settings['host']}-elastic.log")
    _arrange(script, settings)
    Node(settings, script, folder).run()


def _redirect(path: Path) -> None:
    """What torch's agent says of itself."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(file, fd)
    os.close(file)


def _arrange(script: wire.Script, settings: dict[str, Any]) -> None:
    """The environment and folder that the workers inherit: those of the host's agent, not the template's."""
    for name in set(os.environ) - set(settings["environment"]):
        del os.environ[name]
    os.environ.update(settings["environment"])
    for name in (*script.unset, "NBELASTIC_PRELOAD"):
        os.environ.pop(name, None)
    os.environ.update(script.environment)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, settings["interface"])
    if script.cwd and os.path.isdir(script.cwd):
        os.chdir(script.cwd)


class Node:
    """`run()` in the main thread."""

    def __init__(self, settings: dict[str, Any], script: wire.Script, folder: Path) -> None:
        from nbelastic.scripts.elastic_agent import JobAgent, worker_spec
        from nbelastic.scripts.output import JobLogs, Tail
        from nbelastic.scripts.rendezvous import DriverRendezvous

        self._host, self._settings = settings["host"], settings
        self._logs = JobLogs(folder, self._host, script.redirects, script.tee)
        self._tail = Tail(self._logs)
        self._sampled_at = 0.0
        self._stats: dict[int, psutil.Process] = {}
        if not script.cold:
            _use_template(settings["template"])
        ready = s.NodeReady(self._host, 0, "", script.role)
        self._rendezvous = DriverRendezvous(
            self._connect, ready, settings["address"], before_round=lambda order: self._agent.begin(order)
        )
        self._agent = JobAgent(
            worker_spec(script, self._rendezvous, tuple(os.environ)), script, self._logs, self._rendezvous.link.send
        )

    def _connect(self, hear: Any) -> Spoke:
        settings = self._settings
        keys = msgspec.convert(settings["keys"], Keys)
        peer = f"node/{self._host}~{settings['number']}"
        link = Spoke(
            settings["driver"],
            keys,
            peer,
            wire.ToNode,
            hear,
            tick=self._tick,
            heartbeat=settings["heartbeat"],
        )
        link.start()
        return link

    def run(self) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        reason, broken = "it has ended", False
        try:
            if self._agent.run() is not None:
                self._rendezvous.linger()
        except SignalException as end:
            reason = f"it was told to end ({end.sigval.name})"
        except Exception as error:
            reason, broken = f"its elastic agent raised {type(error).__name__}: {error}", True
            raise
        finally:
            self._agent.kill_groups()
            link = self._rendezvous.link
            for output in self._tail.read():
                link.send(output)
            link.send(s.NodeLeft(self._host, reason, broken))
            link.close()
            self._rendezvous.shutdown()
            sys.stdout.flush()

    def _tick(self) -> float:
        """In the link's thread."""
        link = self._rendezvous.link if hasattr(self, "_rendezvous") else None
        if link is None or not hasattr(self, "_agent"):
            return LOOK
        for output in self._tail.read():
            link.send(output)
        now = time.monotonic()
        if now >= self._sampled_at + SAMPLE:
            self._sampled_at = now
            self._sample(link)
        return LOOK

    def _sample(self, link: Spoke) -> None:
        pids, number = self._agent.workers
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
            link.send(wire.NodeSample(self._host, number, tuple(found)))


class _Template(forkserver.ForkServer):
    """The host's agent's, for those whom it has forked: torch's own `forkserver` start method then costs a fork."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        vars(self).update(found, _forkserver_alive_fd=forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()  # type: ignore[attr-defined]


def _use_template(found: dict[str, Any]) -> None:
    template = _Template(found)
    forkserver.connect_to_new_process = template.connect_to_new_process
    forkserver.ensure_running = template.ensure_running
