"""Commands for the nodes of a script, in the imperative."""

# mypy: disable-error-code="misc"
# (msgspec hands `frozen` down to subclasses, which mypy's reading of dataclass_transform does not know)
from __future__ import annotations

from nbelastic.core.commands import Command
from nbelastic.core.reasons import Reason
from nbelastic.protocol.script_events import Assignment, Failure


class ScriptCommand(Command):
    """A command for the nodes of a script."""


class StartNode(ScriptCommand):
    host: str


class EndNode(ScriptCommand):
    """End the node: with this reason as its `error`, or well."""

    host: str
    reason: str
    error: bool = True


class ReportWaiting(ScriptCommand):
    """An external node has to wait. `reason`: None if there is no script; `full`: there is no room for its workers."""

    host: str
    reason: Reason | None
    full: bool = False


class MoveNode(ScriptCommand):
    """Offer the store at `address`, of `interface`."""

    host: str
    address: str
    interface: str = ""


class RepeatRound(ScriptCommand):
    """Send the present round again: the node did not receive it."""

    host: str


class FormRound(ScriptCommand):
    """`assignments` by group rank. `store` is that of the first one; `restarts` is the number so far."""

    round: int
    assignments: tuple[Assignment, ...]
    store: str
    restarts: int


class LeaveRound(ScriptCommand):
    """The nodes of `hosts` end their workers of `round` and wait for another one."""

    round: int
    hosts: tuple[str, ...]
    reason: str


class EndScript(ScriptCommand):
    """The end of a script. `assignments` are of its last round; `failure` is the first one, on the node of `host`."""

    outcome: str  # succeeded, failed or stopped
    reason: str
    round: int
    assignments: tuple[Assignment, ...]
    failure: Failure | None
    host: str
