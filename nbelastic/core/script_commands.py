"""What is to be done for a script's nodes: commands, in the imperative."""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from nbelastic.core.commands import Command
from nbelastic.core.reasons import Reason
from nbelastic.protocol.script_events import Assignment, Failure


class ScriptCommand(Command):
    """Something to be done for a script's nodes."""


class StartNode(ScriptCommand):
    host: str


class EndNode(ScriptCommand):
    """`error`: it shall end with this as an error; empty: well."""

    host: str
    reason: str
    error: bool = True


class ReportWaiting(ScriptCommand):
    """A guest is to wait: why, and whether that is because there is no room. No reason: there is no script."""

    host: str
    reason: Reason | None
    full: bool = False


class MoveNode(ScriptCommand):
    """It is to offer its store at `address`, of `interface`."""

    host: str
    address: str
    interface: str = ""


class RepeatRound(ScriptCommand):
    """It is in the present round, and has not heard of that."""

    host: str


class FormRound(ScriptCommand):
    """`assignments` by group rank. `store` is the first one's; `restarts` have been counted so far."""

    round: int
    assignments: tuple[Assignment, ...]
    store: str
    restarts: int


class LeaveRound(ScriptCommand):
    """The nodes of `hosts` are to end their workers of `round` and wait for another one."""

    round: int
    hosts: tuple[str, ...]
    reason: str


class EndScript(ScriptCommand):
    """`assignments` of its last round, `round`; `failure` the first one, if it failed by one, and the node it was on."""

    outcome: str  # succeeded, failed or stopped
    reason: str
    round: int = 0
    assignments: tuple[Assignment, ...] = ()
    failure: Failure | None = None
    host: str = ""
