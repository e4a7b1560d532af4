"""Eleven faults that are planted into the product, to show that the simulation finds them: each is a patch of one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from msgspec.structs import replace

from nbelastic.agent import protocol as agent_protocol
from nbelastic.core import commands as cmd
from nbelastic.core import deadlines
from nbelastic.driver.command_executor import CommandExecutor
from nbelastic.protocol import events as ev
from nbelastic.worker import protocol as worker_protocol


@contextmanager
def dropped(kind: type[cmd.Command], *, last_member: bool = False) -> Iterator[None]:
    """The driver does not carry out commands of this kind, or not for their last member."""
    execute = CommandExecutor.execute

    def patched(self: CommandExecutor, command: Any, now: float) -> None:
        if not isinstance(command, kind):
            execute(self, command, now)
        elif last_member and len(command.members) > 1:
            shorter = {name: getattr(command, name) for name in command.__struct_fields__}
            execute(self, type(command)(**shorter | {"members": command.members[:-1]}), now)

    with mock.patch.object(CommandExecutor, "execute", patched):
        yield


@contextmanager
def changed(owner: Any, name: str, patch: Callable[[Any], Any]) -> Iterator[None]:
    with mock.patch.object(owner, name, patch(getattr(owner, name))):
        yield


def _without_report(exited: Any) -> Any:
    def patched(self: Any, w: Any, code: int) -> Any:
        return [action for action in exited(self, w, code) if not isinstance(action, agent_protocol.Send)]

    return patched


def _too_early(execute: Any) -> Any:
    def patched(self: Any, command: Any, now: float) -> None:
        early = isinstance(command, cmd.LeaveAt)
        execute(self, replace(command, commit=command.commit - 2) if early else command, now)

    return patched


def _without_commit(ready: Any) -> Any:
    """Workers of the first slots do so."""

    def patched(self: Any, commit: int, **more: Any) -> ev.WorkerReady:
        return ready(self, max(0, commit - (self.worker.slot == 0)), **more)  # type: ignore[no-any-return]

    return patched


def _late_acknowledgement(set_leave_point: Any) -> Any:
    """A worker promises to stop one commit later than it says."""

    def patched(self: Any, message: Any) -> Any:
        actions = set_leave_point(self, message)
        if self.pause_at is not None and message.commit is None:
            self.pause_at += 2
        return actions

    return patched


PLANTED = {
    "an abort is not sent": lambda: dropped(cmd.AbortWorld),
    "an abort does not reach the last member": lambda: dropped(cmd.AbortWorld, last_member=True),
    "the last member does not get the leave point": lambda: dropped(cmd.LeaveAt, last_member=True),
    "members are not let go on after a question": lambda: dropped(cmd.CancelLeave),
    "a worker keeps its promises in the next generation": lambda: changed(
        worker_protocol.Protocol, "_forget_promises", lambda _: lambda self: None
    ),
    "the end of a worker is not reported": lambda: changed(agent_protocol.Protocol, "exited", _without_report),
    "the leave point is a commit too early": lambda: changed(CommandExecutor, "execute", _too_early),
    "a worker reports a commit less than it has": lambda: changed(worker_protocol.Protocol, "ready", _without_commit),
    "a worker stops later than it has promised": lambda: changed(
        worker_protocol.Protocol, "_set_leave_point", _late_acknowledgement
    ),
    "a worker whose world is broken waits for a driver": lambda: changed(
        worker_protocol.Protocol, "_tick_without_driver", lambda _: lambda self, now, link: []
    ),
    "no deadline is kept": lambda: changed(deadlines, "act", lambda _: lambda cluster, now, out: cluster),
}
