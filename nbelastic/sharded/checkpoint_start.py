"""What the ranks begin from when no commit is whole: a checkpoint, or first values. Rank 0 decides, the others follow."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nbelastic.errors import StateError
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.checkpoint_reading import Stored, check_files, find
from nbelastic.sharded.checkpoint_restoring import Restoring
from nbelastic.sharded.checkpoints import ShardedPlan, Writer
from nbelastic.sharded.chunks import Layout
from nbelastic.sharded.holdings import Record
from nbelastic.sharded.transfer import broadcast_bytes, gather_bytes
from nbelastic.sharded.whole_commits import Lost
from nbelastic.state.checkpoints import Plan, as_folder, tell_other_requires_grad
from nbelastic.state.requires_grad import requires_grad
from nbelastic.state.transfer import from_bytes, to_bytes
from nbelastic.system.log_line import print_line
from nbelastic.worker.formation import Formation
from nbelastic.worker.session import Session


class Start:
    """`path` is that of the checkpoint which `bind` will read; None: there is none."""

    def __init__(self) -> None:
        self.writer = Writer()
        self.path: Path | None = None
        self._loaded: Path | None = None  # the checkpoint that the program has given to `load`
        self._record: Record | None = None
        self._plan: ShardedPlan | None = None
        self._line = ""  # about the checkpoint

    def begin(self, session: Session) -> None:
        """A program begins."""
        self.writer = Writer()
        self.path = self._record = self._plan = None
        self.use_plan(session)

    def use_plan(self, session: Session) -> None:
        """The job's checkpoints are sharded ones, and of this state. A new program has none until it is kept."""
        plan = session.checkpoints
        if isinstance(plan, Plan):
            self._plan = session.checkpoints = ShardedPlan(plan, self.writer, session)
        elif isinstance(plan, ShardedPlan):  # a program before this one has made it
            plan.use(self.writer)
            self._plan = plan

    def end(self) -> None:
        """The job has ended."""
        self._loaded = self.path = self._record = None

    def load(self, path: str | Path) -> tuple[Path, Record | None]:
        """Remember a checkpoint, or the newest of a folder; returns its path and record. StateError if there is none."""
        stored = find(as_folder(path))
        self._loaded = stored.path
        return stored.path, stored.record() if stored.has_record else None

    def choose(
        self, session: Session, formation: Formation, group: Any, lost: Lost | None, small: dict[str, Any]
    ) -> dict[str, Any]:
        """Collective: rank 0's message: which checkpoint all ranks begin from, and its first `small` values.

        Each rank checks some of the files. If one is damaged, the checkpoint before is tried. `lost`: the commit that cannot
        be restored.
        """
        beside = {"small": small, "token": uuid.uuid4().hex}  # a part of the names of this generation's temporary files
        refused: dict[Path, str] = {}
        while True:
            sent = to_bytes({**beside, **self._message(lost, refused)}) if formation.rank == 0 else bytearray()
            message: dict[str, Any] = from_bytes(session.run_abortable(partial(broadcast_bytes, sent, 0, group)))
            path = message["checkpoint"]
            problem = session.run_abortable(partial(_problem, path, formation, group)) if path else ""
            if not problem:
                if formation.rank == 0 and self._line:
                    print_line(self._line)
                self.writer.enter(message["token"])
                return message
            refused[Path(path)] = problem

    def _message(self, lost: Lost | None, refused: Mapping[Path, str]) -> dict[str, Any]:
        """The job's newest checkpoint comes before one that the program loads. After a loss, the latter does not count."""
        stored, self._line = self._plan.newest(refused) if self._plan is not None else None, ""
        if stored is not None:
            commits = stored.record()["commits"]
            self._line = f"the training continues at commit {commits}, from {stored.path}."
            if lost is not None:
                back = lost.commit.number - commits
                self._line = (
                    f"{lost} The training goes back to commit {commits}, from {stored.path}: {back} commits are lost."
                )
        elif self._loaded is not None and lost is None:
            if self._loaded in refused:
                raise StateError(f"the checkpoint {self._loaded} cannot be used: {refused[self._loaded]}.")
            stored = Stored(self._loaded)
        if stored is None:
            return {"checkpoint": "", "record": None}
        return {"checkpoint": str(stored.path), "record": stored.record() if stored.has_record else None}

    def take(self, message: dict[str, Any]) -> Record | None:
        """Follow rank 0's message; returns the checkpoint's record, if it has one."""
        self.path = Path(message["checkpoint"]) if message["checkpoint"] else None
        self._record = message["record"]
        return self._record

    def restore(self, bound: Bound, layout: Layout, rank: int, set_first_values: Callable[[], object]) -> Record | None:
        """Read the checkpoint into the bound models and optimizers. StateError if it does not fit them."""
        assert self.path is not None
        try:
            stored = Stored(self.path)
        except StateError as error:
            raise StateError(
                f"rank {rank} cannot read the checkpoint {self.path} ({str(error).rstrip('.')}): "
                "all hosts need the same folder."
            ) from None
        restoring, record = Restoring(stored, bound, layout, rank), self._record
        if record is not None:
            before = requires_grad(bound.parameters)
            restoring.own(record)
            if rank == 0:
                tell_other_requires_grad(before, requires_grad(bound.parameters), self.path)
        else:
            missing = ["counters and other small values", *restoring.others(set_first_values)]
            if rank == 0:
                print_line(f"{self.path} was not written by nbelastic: it has no {', '.join(missing)}.")
        return record


def _problem(path: str, formation: Formation, group: Any) -> str:
    """Collective: why this checkpoint cannot be used; empty if no rank has found a damaged file."""
    own = ""
    try:
        check_files(Path(path), formation.rank, formation.world_size)
    except StateError as error:
        own = str(error)
    return next(filter(None, (one.decode() for one in gather_bytes(own.encode(), group))), "")
