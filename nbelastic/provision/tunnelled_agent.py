"""An agent on another machine, behind a tunnel through ssh or a pod's `exec`. A tunnel that breaks is opened again."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nbelastic.protocol.exit_codes import CONNECTION_LOST
from nbelastic.protocol.settings import Settings
from nbelastic.provision import ssh
from nbelastic.provision.process_agent import AdoptedAgent, ProcessAgent
from nbelastic.provision.tunnel_ports import ports_file
from nbelastic.system.backoff import Backoff

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between two tries to reach the agent again


class TunnelledAgent:
    """`on_disconnect(why)` is called when the connection has ended and the agent may run on, and `on_stop(why)` at the end.

    `command` is ssh's, or that of a program with such streams. `explain(exit code, output)` says why it ended.
    `eof_ends_agent`: the host's program sees the end of its input, while its output is still open, only if this machine has
    closed it. So that ends the agent. In a pod, a broken connection looks the same.
    """

    job = ""

    def __init__(
        self,
        command: list[str],
        settings: Settings,
        log: Path,
        explain: Callable[[int | None, str], str],
        *,
        on_stop: Callable[[str], None],
        on_disconnect: Callable[[str], None],
        eof_ends_agent: bool = True,
    ) -> None:
        self._log, self._explain, self._eof_ends_agent = log, explain, eof_ends_agent
        self._on_stop, self._on_disconnect = on_stop, on_disconnect
        arguments = json.dumps(command), str(ports_file(settings.run_folder))
        self._command = [sys.executable, "-P", "-c", ssh.TUNNEL, *arguments, json.dumps(settings.driver_lease)]
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._tunnel: ProcessAgent | AdoptedAgent | None = None
        self._config: dict[str, Any] = {}
        self._opened_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._killed = False

    @property
    def process(self) -> str:
        return self._tunnel.process if self._tunnel is not None else ""

    def start(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        self._open(attach=False)

    def adopt(self, process: str, config: Mapping[str, Any]) -> None:
        """Take over the agent behind a tunnel that another driver has opened."""
        self._config = dict(config)
        self._tunnel = AdoptedAgent(process, lambda _: self._on_exit(CONNECTION_LOST, ""), signal.SIGTERM)
        self._tunnel.start({})

    def kill(self) -> None:
        self._killed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            asyncio.get_running_loop().call_soon(self._on_stop, "it could not be reached")
        elif self._tunnel is not None:
            self._tunnel.kill()

    def _open(self, *, attach: bool) -> None:
        self._timer, self._opened_at = None, time.monotonic()
        self._tunnel = ProcessAgent(self._command, self._log, self._on_exit, signal.SIGTERM)
        self._tunnel.start({**self._config, "attach": attach, "eof_ends_agent": self._eof_ends_agent})

    def _on_exit(self, code: int | None, output: str) -> None:
        if self._killed or code != CONNECTION_LOST:
            self._on_stop(self._explain(code, output))
            return
        if time.monotonic() - self._opened_at > LONGEST_PAUSE:
            self._backoff.reset()
        self._on_disconnect(self._explain(code, output))
        self._open_again_later()

    def _open_again_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._backoff.next(), self._open_again)

    def _open_again(self) -> None:
        try:
            self._open(attach=True)
        except OSError as error:  # this machine has no process, descriptor or disk space left for it now
            self._on_disconnect(f"no connection to it can be opened here: {error.strerror}")
            self._open_again_later()
