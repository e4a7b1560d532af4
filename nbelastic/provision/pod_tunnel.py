"""An agent in a pod that is made for it, behind a tunnel: for notebooks that pods cannot connect to, as on a laptop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from nbelastic.protocol.settings import Settings
from nbelastic.provision.pods import Notice, PodAgent
from nbelastic.provision.tunnelled_agent import TunnelledAgent


class PodTunnel:
    """A pod that waits, and the agent in it. `on_stop(why)` is called once, at the end of the first of the two.

    `open_tunnel(pod, on_stop)` makes the agent when the pod runs. `number`: see `PodAgent`.
    """

    def __init__(
        self,
        host: str,
        settings: Settings,
        number: int,
        on_stop: Callable[[str], None],
        open_tunnel: Callable[[str, Callable[[str], None]], TunnelledAgent],
    ) -> None:
        self._on_stop, self._open_tunnel = on_stop, open_tunnel
        self._pod = PodAgent(host, settings, self._on_pod_stop, number, on_running=self._on_running)
        self._agent: TunnelledAgent | None = None
        self._adopted = ""  # the process of a tunnel that another driver has opened
        self._config: Mapping[str, Any] = {}
        self._ended = False

    @property
    def process(self) -> str:
        return self._agent.process if self._agent is not None else self._adopted

    @property
    def job(self) -> str:
        return self._pod.job

    @property
    def returns(self) -> bool:
        """See `PodAgent`."""
        return self._pod.returns

    def start(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._pod.start(config)

    def adopt(self, process: str, config: Mapping[str, Any]) -> None:
        """Take over a pod that another driver has made, and the tunnel's process if there was one."""
        self._config, self._adopted = config, process
        self._pod.adopt(self._pod.job)
        if process:  # it ran: an API that does not answer now must not delay the next connection
            self._on_running()

    def kill(self) -> None:
        if self._agent is not None:
            self._agent.kill()
        self._pod.kill()

    async def state(self) -> str:
        return await self._pod.state()

    def take_notice(self) -> Notice | None:
        return self._pod.take_notice()

    def _on_running(self) -> None:
        if self._agent is not None:
            return
        self._agent = self._open_tunnel(self._pod.job, self._on_agent_stop)
        if self._adopted:
            self._agent.adopt(self._adopted, self._config)
        else:
            self._agent.start(self._config)

    def _on_agent_stop(self, why: str) -> None:
        self._stop(why)
        self._pod.kill()

    def _on_pod_stop(self, why: str) -> None:
        self._stop(why)
        if self._agent is not None:
            self._agent.kill()

    def _stop(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            asyncio.get_running_loop().call_soon(self._on_stop, why)
