"""The state of a sharded model: what recovery returns to, and how the ranks of a new generation fill their shards."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nbelastic.errors import StateError, UsageError
from nbelastic.protocol.worker_messages import Continued
from nbelastic.sharded import kept_state
from nbelastic.sharded.agreement import agree_on_commit, commit_message, keep_message
from nbelastic.sharded.arena import Shard
from nbelastic.sharded.bound import Bound, bind_values, whole_but_trained
from nbelastic.sharded.bound_checks import check_small
from nbelastic.sharded.buddies import hand_over
from nbelastic.sharded.checkpoint_names import Names
from nbelastic.sharded.checkpoint_start import Start
from nbelastic.sharded.checkpoints import save
from nbelastic.sharded.chunks import Layout
from nbelastic.sharded.copy_waits import CopyWaits
from nbelastic.sharded.filling import prepare
from nbelastic.sharded.holdings import Holdings, Record, full_record, present_record
from nbelastic.sharded.mesh_caches import clear_mesh_caches
from nbelastic.sharded.outside_changes import OutsideChanges
from nbelastic.sharded.refill import run_in_order, send_shards
from nbelastic.sharded.replication import Replication
from nbelastic.sharded.snapshots import kept_commits, live_snapshot, snapshot
from nbelastic.sharded.takeover import merged_small, program_record
from nbelastic.sharded.transfer import broadcast_bytes
from nbelastic.sharded.whole_commits import Choice, Commit, Lost, continued
from nbelastic.state import rng
from nbelastic.state.checkpoints import KEEP, Saving
from nbelastic.state.modes import Modes
from nbelastic.state.state import State
from nbelastic.state.step_log import StepLog
from nbelastic.state.transfer import check_plain, describe, from_bytes, to_bytes
from nbelastic.system.argument_types import WHOLE, check_kind
from nbelastic.system.log_line import print_line
from nbelastic.worker.formation import Formation
from nbelastic.worker.session import Session

ADVICE = "With copies=2 a state outlives the loss of any two hosts; checkpoints outlive all."
RESTORED = "the commit that is restored: bind() an object of one class in all calls, as one SequentialLR for several schedulers."
SET_ASIDE = ("commits", "reset_callbacks", "_holdings", "_live_record", "_start", "_modes")
END_TIMEOUT = 1.0  # seconds that an aborted copy may take to end


class ShardedState(State):
    """The state of models that are sharded over ranks: `ShardedState(step=0, sampler=sampler, every=4)`.

    Its values are small things, as in `TorchState`. The elastic function makes model and optimizer, shards them with
    `fully_shard(model, mesh=nbe.device_mesh())`, and calls `bind(model=model, optimizer=optimizer)`.

    Every `every`-th commit is copied to memory and to `copies` other ranks, on other hosts if there are any, while the
    training goes on. When ranks are lost, the others return to the newest commit of which every part is still there.
    With `copies=0` a lost rank means the newest checkpoint, unless other replicas (HSDP) have its part.
    """

    _kept = kept_state
    _is_sharded = True
    _snapshot, _kept_commits = snapshot, kept_commits

    def __init__(self, *unnamed: Any, copies: int = 1, every: int = 1, **values: Any) -> None:
        for name, number, least in (("copies", copies, 0), ("every", every, 1)):
            check_kind(name, number, WHOLE)
            if number < least:
                raise UsageError(f"ShardedState({name}={number}): at least {least}.")
        check_small(values)
        self._copies, self._every = copies, every
        self._small_names: frozenset[str] = frozenset(values)
        self._bound: Bound | None = None
        self._holdings = Holdings()
        self._layout: Layout | None = None  # of the bound models
        self._replication: Replication | None = None
        self._group: Any = None  # for copies and re-sharding
        self._formation: Formation | None = None
        self._choice: Choice | None = None  # the commit that `bind` restores; None: first values
        self._live_commit: Commit | None = None  # the live tensors are of this commit
        self._live_record: Record = {}
        self._first_small: dict[str, Any] = {}  # the small values at the beginning of the program
        self._given: dict[str, Any] = {}  # the same at the commit that `bind` takes over from an earlier program
        self._program: Record = {}  # of the bound models, see `program_record`
        self._copy_waits = CopyWaits(every)
        self._outside = OutsideChanges({})
        self._is_after_loss = False  # the last generation was aborted
        self._continued: Continued | None = None  # for the event log
        self._start = Start()
        super().__init__(*unnamed, **values)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name in self._small_names:
            check_small({name: value})
        super().__setattr__(name, value)

    # ---- for the program ----

    def bind(self, *, init: Callable[[Any], object] | None = None, **values: Any) -> None:
        """Collective: take models, optimizers and what has a `state_dict()` (schedulers) into the state.

        At the job's first call, models that were made on the meta device get their first values: by `init(model)`, or by
        `reset_parameters()` of each layer, with the values that the whole model would have. Later, all get the values of the
        commit that the ranks return to. Call it once per call of the elastic function, after `fully_shard`.
        """
        session, formation = self._session, self._formation
        if session is None or formation is None:
            raise UsageError("bind() works inside a function decorated with @nbe.elastic.")
        if self._bound is not None:
            raise UsageError("bind() was called already: give it all models and optimizers at once.")
        bound = bind_values(values, {*dir(type(self)), *self._small_names})
        self._print(whole_but_trained(bound))
        self._contents.values.update(values)
        self._modes.note(bound.modules.values())
        filling = prepare(bound, init, formation, session, self._group)
        self._bound, self._layout, rank = bound, filling.layout, formation.rank
        self._program = program_record(session.programs.program, self._small_values() | self._first_small, bound)
        held, choice = self._holdings, self._choice
        record: Record = {"small": {}}
        if self._start.path is not None:
            record = self._start.restore(bound, filling.layout, rank, filling.first_values) or record
        elif choice is None:
            filling.begin()
        else:
            taken = filling.restore(choice, held, self._program, self._contents.user_words)
            small = {**taken.record["small"], **self._given}
            record = {**held.records[choice.commit], "kinds": taken.record.get("kinds", {}), "small": small}
            if taken.notes and session.programs.on_trial:
                session.programs.report_notes(taken.notes)
        self._contents.check_kinds(self._contents.kinds() | record.get("kinds", {}), RESTORED)
        self._set_small(record)
        held.add_generation(filling.layout, rank)
        self._start.writer.bound(filling.layout, Names(bound), rank)
        bound.watch(self._before_step)
        self._replication = Replication(
            filling.layout, rank, self._copies, self._group, pinned=bound.device.type == "cuda"
        )
        self._replication.continued = self._continued
        session.report_copies(self._replication.report)
        self._outside = OutsideChanges(bound.parameters, self._outside.moving)
        self._set_live()
        self._replicate()

    def commit(self) -> None:
        """Mark the point that recovery returns to. Every rank calls it, equally often, right after `optimizer.step()`.

        While a rank accumulates gradients, a commit without a step does nothing: the ranks agree on that. Here they leave
        together for a planned change of the world.
        """
        session, bound = self._session, self._bound
        if session is None or bound is None:
            raise UsageError("call bind(model=…, optimizer=…) before commit().")
        if not bound.has_stepped and session.on_any_rank(self._live_commit is not None and bound.accumulates):
            return
        with torch.inference_mode(False):  # else no later commit could write into the copies
            session.check(bound.device)
            self.commits += 1
            self._set_live()
            self._replicate(is_due=self.commits % self._every == 0)
            # Every rank has filled its shard: it has made a step.
            if not self._copies and self._live_commit is not None:
                self._holdings.keep_record(self._live_commit, self._live_record)
            if session.checkpoints is not None:
                session.checkpoints.committed(self)
            session.committed(self.commits)

    def save(self, path: str | Path, *, keep: int = KEEP) -> Saving:
        """Write the state, as it is now, as a checkpoint into the folder `path`, which keeps the newest `keep`.

        All ranks call it, after `bind`, with a folder that all hosts share. Each copies its part, and writes it beside the
        training; call `.wait()` for the rest. On rank 0 it returns the path of the complete checkpoint, on others None.
        StateError if the folder cannot be written.
        """
        if self._bound is None:
            raise UsageError("call bind(model=…, optimizer=…) before save().")
        return save(self._start.writer, path, keep, self._snapshot)

    def load(self, path: str | Path) -> Path:
        """Begin from the checkpoint at `path`, or from the newest of a folder; returns its path.

        It may be of any program that uses `torch.distributed.checkpoint`. Call it on all ranks, before the elastic function
        or in it before `bind`, which reads it. Where the ranks hold a commit already, it has no effect.
        StateError if there is none that can be used.
        """
        if self._bound is not None:
            raise UsageError("call load() before bind(), which reads the checkpoint.")
        found, record = self._start.load(path)
        if self._formation is None:
            self._set_small(record or {"small": {}})
        elif self._choice is None and self._start.path is None and self._session is not None:
            self._begin_from(self._start.choose(self._session, self._formation, self._group, None, self._first_small))
        return self._start.path or found

    def restore(self) -> None:
        raise StateError("ShardedState cannot return to a commit within a generation: raise, and the job ends.")

    # ---- for a new program ----

    def _follow(self, old: ShardedState) -> None:
        """Begin as the state of a new program: from the commits that `old` holds, and goes on holding."""
        self._holdings, self.commits, self._aside = old._holdings.copy(), old.commits, {"_holdings": old._holdings}

    def _set_aside(self) -> None:
        self._aside = {name: self.__dict__[name] for name in SET_ASIDE}
        self._holdings, self.reset_callbacks = self._holdings.copy(), [*self.reset_callbacks]

    def _begin_again(self, session: Session) -> None:
        self._session, self._start, self._modes = session, Start(), Modes()
        self._start.begin(session)

    def _take_up(self, session: Session) -> None:
        self._unbind()
        self.__dict__.update(self._aside)
        self._aside, self._session = {}, session
        self._modes.restore()

    def _program_kept(self, session: Session) -> None:
        self._aside = {}
        self._start.use_plan(session)

    # ---- for the elastic loop ----

    def begin(self, session: Session) -> None:
        self._drop()
        self._session, self.commits, self._modes = session, 0, Modes()
        self._start.begin(session)
        self._first_small = self._small_values()
        check_plain(describe(self._first_small, []))

    def end(self) -> None:
        self._drop()
        self._start.end()

    def _drop(self) -> None:
        self._unbind()
        self._holdings, self._choice, self._formation, self._session, self._aside = Holdings(), None, None, None, {}

    @property
    def clean(self) -> bool:
        return self._bound is None or self._live_commit is not None

    def undo(self) -> None:
        """Return to the last commit, as far as that is possible here: see `clean`."""
        if self._live_record:
            self._set_small(self._live_record)

    def generation_ended(self, *, aborted: bool) -> None:
        """Keep the live tensors if they are those of a commit, and drop the models: their groups are closed.

        After an abort a copy that is being sent ends soon; what has arrived of it counts.
        """
        self._is_after_loss = aborted
        if self._replication is not None:
            self._keep_copies(self._replication, wait=aborted)
        self._modes.restore()
        live = live_snapshot(self)
        if live is not None:
            self._holdings.add_own(*live)
        self._unbind()

    def _keep_copies(self, replication: Replication, *, wait: bool) -> None:
        if wait and replication.running is not None:
            wait_for((replication.running,), END_TIMEOUT)
            with contextlib.suppress(RuntimeError):
                self._absorb(replication.finish_if_done())
        self._holdings.add_copies(replication.arrived() if wait else None, replication.held_on_host())

    def hand_over(self, leaving: tuple[int, ...]) -> None:
        """Collective, at a commit after which the ranks `leaving` end: they send what no staying rank holds."""
        layout, bound, live, formation = self._layout, self._bound, self._live_commit, self._formation
        if not leaving or layout is None or bound is None or live is None or formation is None or self._session is None:
            return
        plan, rank, shard = hand_over(layout.owners(), leaving, formation.world_size), formation.rank, bound.shard()
        if not plan:
            return
        self.finish_copies()
        send = partial(send_shards, plan, layout, rank, shard, self._group)
        self._holdings.add_copies((live, run_in_order(self._session, bound.device, send)), {})

    def sync(self, formation: Formation) -> None:
        """Collective: choose the newest whole commit, and set the small values of all ranks to it."""
        session = self._session
        assert session is not None
        self._formation = formation
        self._group = group = session.side_group("sharded") if formation.world_size > 1 else None
        choice, statements = agree_on_commit(self._holdings, self._aside.get("_holdings"), session, group)
        lost = choice if isinstance(choice, Lost) and choice.commit.number > 0 else None
        self._choice = choice if isinstance(choice, Choice) else None
        self._continued = continued(choice, statements, formation.rank) if self._is_after_loss else None
        if self._choice is None:
            self._begin_from(self._start.choose(session, formation, group, lost, self._first_small))
            if lost is not None and self._start.path is None:
                raise StateError(f"{lost} {ADVICE}")
            return
        root = self._choice.members[0]
        sent = self._small_message(self._choice.commit) if formation.rank == root else bytearray()
        message = from_bytes(session.run_abortable(lambda: broadcast_bytes(sent, root, group)))
        self._start.writer.enter(message["token"])
        commit, holdings = self._choice.commit, self._holdings
        if formation.rank not in self._choice.members:
            keep_message(holdings, commit, message)
        holdings.keep(commit, *holdings.before(commit))  # copies of this one may be missing until it is copied again
        self.commits, self._start.path, self._given = commit.number, None, message["given"]
        self._set_small({**holdings.records[commit], "small": {**holdings.records[commit]["small"], **self._given}})

    def _begin_from(self, message: dict[str, Any]) -> None:
        """Begin from the checkpoint that rank 0 has found, or from first values."""
        self._holdings, record = Holdings(), self._start.take(message)
        self.commits = record["commits"] if record is not None else 0
        self._set_small({"small": {**message["small"], **(record or {"small": {}})["small"]}})

    def _small_message(self, commit: Commit) -> bytearray:
        """For ranks that did not make the chosen commit: its small values, and how its shards were split."""
        assert self._session is not None
        logs = self._contents.named(StepLog)
        given = merged_small(self._holdings.records[commit], self._session.programs.program, self._first_small, logs)
        return to_bytes({**commit_message(self._holdings, commit), "given": given, "token": uuid.uuid4().hex})

    def _cell_ended(self, *, accepted: bool, changed: bool) -> None:  # noqa: ARG002
        """What the cell has `changed` belongs to the next commit: of this one there are copies already."""
        self._live_commit = None if changed else self._live_commit

    def _large(self) -> list[torch.Tensor]:
        return list(self._bound.shard().values()) if self._bound is not None else []

    # ---- parts ----

    def _unbind(self) -> None:
        if self._bound is not None:
            self._bound.unwatch()
            if self._session is not None:
                self._session.report_copies(None)
        clear_mesh_caches()  # also of a world that ended before bind()
        for name in [name for name in self._contents.values if name not in self._small_names]:
            del self._contents.values[name]
        self._bound = self._layout = self._replication = self._group = self._live_commit = None
        self._outside = OutsideChanges({}, self._outside.moving)

    def _before_step(self) -> None:
        """An optimizer is about to change the live tensors."""
        if self._live_commit is not None and self._session is not None and self._bound is not None:
            self._session.check(self._bound.device)
            self._print(self._outside.find())
        self._live_commit = None

    def _set_live(self) -> None:
        """The live tensors are those of the present commit: record what a step or a forward pass changes beside them."""
        bound, layout = self._bound, self._layout
        assert bound is not None
        assert layout is not None
        record = present_record(self._contents, bound, self._program) | {"random": rng.get_states()}
        bound.committed()
        self._outside.clear()
        self._live_commit, self._live_record = Commit(layout.generation, self.commits), record

    def _set_small(self, record: Record) -> None:
        """Set counters, samplers and schedulers, as far as they are there, and this rank's random generators."""
        values = self._contents.values
        self._contents.set_small({name: value for name, value in record["small"].items() if name in values})
        if "random" in record:
            rng.set_states(record["random"])

    def _replicate(self, *, is_due: bool = True) -> None:
        """If it is due, copy the present commit, and begin to send it to the buddies."""
        bound, live, replication = self._bound, self._live_commit, self._replication
        if replication is None or bound is None or live is None:
            return
        if not (self._copies and is_due):
            self._outside.note()
            self._absorb(replication.finish_if_done())
            return
        begun = time.monotonic()
        self.finish_copies()
        self._print(self._copy_waits.note(live.number, replication.whole, begun, time.monotonic()))
        shard = bound.shard()
        self._holdings.add_own(live, replication.begin(live, shard), full_record(self._live_record, bound, shard))

    def _print(self, line: str | None) -> None:
        if line is not None and self._formation is not None and self._formation.rank == 0:
            print_line(line)

    def finish_copies(self) -> None:
        """Wait until the last commit that is being copied is whole."""
        if self._replication is not None and self._session is not None:
            self._absorb(self._replication.finish(self._session.run_abortable))

    def _absorb(self, finished: tuple[Commit, dict[int, Shard]] | None) -> None:
        """A commit is whole: drop all older ones."""
        if finished is not None:
            self._holdings.add_copies(finished, {})
            self._holdings.keep(finished[0])
