"""Where hosts come from. The driver polls in the background and never waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from nbelastic.core.errors import DiscoveryError, UsageError
from nbelastic.core.messages import HostSpec
from nbelastic.core.placement import parse_hosts, parse_script_output

TIMEOUT = 30.0  # seconds that a discovery script may take


@runtime_checkable
class HostDiscovery(Protocol):
    """Says which hosts there are now. Raising keeps the last good answer (but fails the very first time)."""

    async def hosts(self) -> Sequence[HostSpec]:
        """The hosts, with their slots."""
        ...


class FixedHosts:
    """A list that changes only when it is told to: `FixedHosts("gpu1:4,gpu2:4")`."""

    def __init__(self, hosts: str | Sequence[str], slots: int = 1) -> None:
        self._slots = slots
        self.set(hosts)

    def set(self, hosts: str | Sequence[str]) -> None:
        """Replace the list. UsageError if a host is badly written or listed twice."""
        text = hosts if isinstance(hosts, str) else ",".join(hosts)
        self._hosts = parse_hosts(text, self._slots)

    def listed(self) -> Sequence[HostSpec]:
        return self._hosts

    async def hosts(self) -> Sequence[HostSpec]:
        return self._hosts


class ScriptDiscovery:
    """A program that prints a host a line, `name` or `name:slots`; it is run for each look."""

    def __init__(self, command: str, slots: int = 1) -> None:
        self.command = command
        self._slots = slots

    async def hosts(self) -> Sequence[HostSpec]:
        """DiscoveryError with the script's exit code and what it wrote to stderr, or with the line that is wrong."""
        try:
            process = await asyncio.create_subprocess_exec(
                self.command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise DiscoveryError(f"{self.command} cannot be run: {error.strerror}; check its path and mode.") from None
        try:
            out, err = await asyncio.wait_for(process.communicate(), TIMEOUT)
        except TimeoutError:
            raise DiscoveryError(f"{self.command} did not answer within {TIMEOUT:g} s.") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            said = err.decode(errors="replace").strip()[-500:]
            raise DiscoveryError(f"{self.command} failed with exit code {process.returncode}: {said or 'no message'}")
        try:
            return parse_script_output(out.decode(errors="replace"), self._slots)
        except UsageError as error:
            raise DiscoveryError(f"{self.command} printed something else than hosts: {error}") from None
