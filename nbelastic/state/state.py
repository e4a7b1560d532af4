"""The training state: what recovery returns to, and how newcomers receive it.

`step_watch` decides whether a commit copies the large tensors. Small values (counters, buffers, schedulers, random
generators, sampler) are copied at each commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbelastic.errors import StateError, UsageError
from nbelastic.state import checkpoints, rng
from nbelastic.state.checkpoints import Saving
from nbelastic.state.checks import check, frozen_value, only_numbers
from nbelastic.state.commit_record import CommitRecord
from nbelastic.state.contents import LARGE, Contents
from nbelastic.state.modes import Modes
from nbelastic.state.optimizers import set_settings, settings
from nbelastic.state.replica_hash import ReplicaHash
from nbelastic.state.step_watch import StepWatch
from nbelastic.state.tensor_snapshot import TensorSnapshot, hashes, versions
from nbelastic.state.transfer import Channel, check_plain, compare, describe, destinations, rebuild, receive
from nbelastic.worker.formation import Formation
from nbelastic.worker.session import Session

SET_ASIDE = ("commits", "reset_callbacks", "_began_at", "_tensors", "_buffers", "_steps", "_record", "_modes")
QUICKLY_HASHED = 1 << 26  # bytes; a CPU takes 0.02 s


class State:
    """Base of the states: values by name, `commit()`, `restore()` and `sync()`. Use `ObjectState` or `TorchState`.

    Values are plain data (numbers, text, containers, tensors) or objects with `state_dict()` and `load_state_dict()`.
    They are attributes: `state.epoch += 1`. `commits` counts the commits since the beginning of the job.
    """

    _kept: Any = checkpoints  # has `write_kept` and `load_kept`
    _is_sharded = False
    _small_names: frozenset[str] | None = None  # of a sharded state: the values that each rank has as a whole

    def __init__(self, *unnamed: Any, **values: Any) -> None:
        if unnamed:
            raise UsageError(f"a state's values have names: {type(self).__name__}(model=model, step=0).")
        self._contents = Contents()
        self._session: Session | None = None
        self._tensors = TensorSnapshot(keep=True)
        self._buffers = TensorSnapshot(keep=True)
        self._steps = StepWatch(self._contents, self._tensors)
        self._replica = ReplicaHash(self._contents)
        self._modes = Modes()
        self._record: CommitRecord  # of the last commit
        self._skipped_reports: set[str] = set()  # names of reported values that were not numbers
        self.commits = 0
        self._began_at = 0  # commits at the beginning of the program, or in the checkpoint from which it goes on
        self._aside: dict[str, Any] = {}  # attributes as they were before a new program, while that is tried
        self.reset_callbacks: list[Callable[[], object]] = []
        for name, value in values.items():
            if name.startswith("_") or hasattr(State, name) or name in self.__dict__:
                raise StateError(f"{name!r} cannot be the name of a value in a state: choose another.")
            check(name, value)
            self._contents.values[name] = value
        self._contents.given = {name: value for name, value in values.items() if isinstance(value, (dict, list))}
        self._survey()
        self._record_start()

    def __getattr__(self, name: str) -> Any:
        contents = self.__dict__.get("_contents")
        values = contents.values if contents is not None else {}
        if name in values:
            return values[name]
        raise AttributeError(f"this state has no {name!r}; it holds {', '.join(values) or 'nothing'}.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in ("commits", "reset_callbacks"):
            self.__dict__[name] = value
            return
        values = self._contents.values
        if name not in values:
            raise StateError(f"this state has no {name!r}: give it its first value where the state is made.")
        old = values[name]
        if value is not old and isinstance(old, LARGE):
            raise StateError(f"{name!r} cannot be replaced by another object: load new values into it.")
        check(name, value)
        values[name] = value
        self._steps.watch(value)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call these in order on each rank, after a new group exists and before training resumes; not at the start."""
        added = [*callbacks] if isinstance(callbacks, Iterable) else [callbacks]
        for callback in added:
            if not callable(callback):
                raise UsageError(f"a reset callback must be a function, not {callback!r}.")
        self.reset_callbacks.extend(added)

    def report(self, **values: float) -> None:
        """Send numbers to the dashboard, as `report(loss=loss.item())`. The newest are sent a few times per second.

        `total` is the number of commits that the job will make: with `report(loss=loss.item(), total=3000)` the dashboard
        shows the time left.
        """
        if self._session is not None:
            self._session.report(only_numbers(values, self._skipped_reports))

    def commit(self) -> None:
        """Mark the point that recovery returns to. Every rank calls it, equally often; right after the step is best.

        Here the ranks leave together for a planned change of the world. While a rank accumulates gradients, a commit
        without a step does nothing, as recovery cannot return to half of a sum. The ranks agree on that.
        """
        if not self._steps.commit_counts():
            return
        with torch.inference_mode(False):  # else no later commit could write into the copies
            self._tensors.keep = bool(self._steps.copying) or self._session is None
            self._tensors.in_background = self._steps.announces_changes
            try:
                self._record_commit(counted=self._session is not None)
            except BaseException:
                # A value cannot be recorded, or memory is short: copies and record are of two commits.
                self._tensors.keep = False
                self._tensors.forget()
                raise
            self._steps.clear()
            self.commits += 1
            if self._session is None:
                self._contents.committed(is_rank_0=True)
            else:
                self._replica.add(self.commits)
                if self._session.checkpoints is not None:
                    self._session.checkpoints.committed(self)
                self._session.committed(self.commits)

    def save(self, path: str | Path, *, keep: int = checkpoints.KEEP) -> Saving:
        """Write the state, as it is now, as a checkpoint into the folder `path`, which keeps the newest `keep`.

        Returns as soon as the tensors are copied; call `.wait()` for the rest. Only rank 0 writes, as all ranks hold the
        same. StateError if the folder cannot be written.
        """
        return checkpoints.save(self, path, keep=keep, writes=self._session is None or self._session.is_rank_0)

    def load(self, path: str | Path) -> Path:
        """Load the checkpoint at `path`, or the newest usable one of a folder; returns its path.

        Call it on all ranks, or on all before the elastic function. StateError if there is none that can be used.
        """
        found = checkpoints.load(self, path)
        self._began_at = self.commits
        if self._session is not None:
            self._record_all()
        return found

    def restore(self) -> None:
        """Return to the last commit. StateError if tensors have changed since and were not copied: one step per commit."""
        if self._tensors.keep or self.clean:
            self.undo()
        if not self.clean:
            raise StateError(
                "the tensors have changed since the last commit, and with one step per commit nothing is copied: "
                "restore before optimizer.step(), or commit after several steps."
            )

    def undo(self) -> None:
        """Return to the last commit, as far as that is possible here: see `clean`."""
        self._record.restore_entries()
        if self._tensors.keep:
            self._tensors.restore()
            self._steps.clear_steps()
        self._steps.drop_gradients()
        self._record.restore_small()
        self._buffers.restore()
        self._record.restore_settings()

    @property
    def clean(self) -> bool:
        """Whether the live tensors are those of the last commit."""
        return not self._steps.has_stepped and not self._tensors.changed() and not self._contents.layout.changed()

    def begin(self, session: Session) -> None:
        """The elastic loop begins. No commit has been made yet, so a break returns to the present values."""
        self.end()
        self._session = session
        self._steps.start(session, lambda: self._record)
        self.commits, self._began_at, self._modes = 0, 0, Modes()
        self._survey()
        check_plain(describe({**self._contents.extra.live(), **self._small_values()}, []))
        self._record_start()

    def end(self) -> None:
        """The elastic loop has ended."""
        self._steps.stop()
        self._session = None
        self._tensors.drop_pinned()

    def _set_aside(self) -> None:
        """At a commit: a new program takes over the values. Until that is kept, `_take_up` returns to this commit."""
        try:
            self._record_all()
        except BaseException:  # there is not enough memory: this program goes on, and copies again at its next commit
            self._tensors.keep = False
            raise
        self._steps.stop()
        self._aside = {name: self.__dict__[name] for name in SET_ASIDE}
        self._tensors, self._buffers = TensorSnapshot(keep=True), TensorSnapshot(keep=True)
        self._steps = StepWatch(self._contents, self._tensors)
        self.reset_callbacks = [*self.reset_callbacks]

    def _begin_again(self, session: Session) -> None:
        """The new program uses this state itself: its first commit must not replace the commit that was set aside."""
        rng.set_states(self._record._random)
        self._session, self._began_at, self._modes = session, self.commits, Modes()
        self._survey()
        self._record_all()
        self._steps.start(session, lambda: self._record)

    def _take_up(self, session: Session) -> None:
        """The new program has failed: go on from the commit."""
        self._steps.stop()
        copying = self._aside["_steps"].copying
        self.__dict__.update(self._aside)
        self._aside = {}
        self._session = session
        self.undo()
        self._modes.restore()
        self._steps.start(session, lambda: self._record)
        self._steps.copying = copying

    def _program_kept(self, session: Session) -> None:  # noqa: ARG002
        """The new program, which uses this state, is kept."""
        self._aside = {}

    def hand_over(self, leaving: tuple[int, ...]) -> None:
        """The ranks `leaving` end after this commit: every other rank holds the same state, so they send nothing."""

    def finish_copies(self) -> None:
        """Wait until the copies that ranks send each other beside the training are complete."""

    def generation_ended(self, *, aborted: bool) -> None:
        """Called when this rank has left a generation, at a commit or after an abort: return to the last commit.

        The commit at which the ranks leave does not return, so a `zero_grad()` or `train()` after it has not run.
        """
        self._steps.drop_gradients()
        self._modes.restore()
        if aborted:
            self.undo()

    def sync(self, formation: Formation) -> None:
        """Collective: `formation.receivers` get the state of rank `formation.root`, in place."""
        assert self._session is not None
        plan = self._session.checkpoints
        if plan is not None and self.commits == 0 and formation.rank == formation.root:
            plan.resume(self)
            self._began_at = self.commits
        if formation.receivers:
            if self._contents.layout.changed():
                self._survey()
            device, check = self._contents.device(), self._session.check
            ranks = formation.root, formation.receivers, formation.rank, formation.world_size
            channel = Channel(*ranks, device, check=lambda: check(device))
            if channel.takes_part:
                self._transfer(channel, formation)
        if self.commits == self._began_at:  # how the program commits is not known yet
            self._record_all(counted=True)
        self._session.report_hashes(self._replica.begin(formation))

    def _transfer(self, channel: Channel, formation: Formation) -> None:
        """Send the state, or receive it. A receiver that holds a commit keeps it until the newer one is complete."""
        session = self._session
        assert session is not None
        run, facts = session.run_abortable, session.facts
        session.finish_gpu_work()  # a thread has a stream of its own
        if not channel.receives:
            outgoing: list[torch.Tensor] = []
            described = describe(self._live(), outgoing)
            run(lambda: channel.move_object(described))
            run(lambda: channel.move_tensors(outgoing))
            return
        described = run(lambda: channel.move_object(None))

        def fill(places: list[torch.Tensor]) -> None:
            held = facts.holds_state
            try:
                receive(channel, places, facts, run, formation.local_size)
            except BaseException:
                if held and self._tensors.keep:  # the copies are those of the commit that it held
                    self.undo()
                    facts.holds_state = True
                raise

        self._accept(described, channel.device, fill)
        facts.holds_state, facts.state_since = True, formation.generation

    # ---- for cells that run at a commit ----

    def _mark(self, *, exact: bool) -> Any:
        """Two marks differ if large tensors have changed between them. `exact`: also by `.data`, which takes a pass over all."""
        tensors = self._large()
        return versions(tensors), hashes(tensors) if exact else []

    def _large(self) -> list[torch.Tensor]:
        return [*self._contents.large(), *self._contents.buffers()]

    def _is_quickly_hashed(self) -> bool:
        size: int = sum(tensor.nbytes for tensor in self._large())
        return size <= QUICKLY_HASHED or self._device().type != "cpu"

    def _small_values(self) -> dict[str, Any]:
        """Copies of the values beside large tensors, by name; of an optimizer: its options. StateError if one cannot be kept."""
        contents = self._contents
        small = {name: frozen_value(name, value) for name, value in contents.small().items()}
        return small | {name: settings(one) for name, one in contents.named(torch.optim.Optimizer).items()}

    def _set_small_values(self, values: dict[str, Any]) -> None:
        """The inverse of `_small_values`, for some of the names."""
        options = {name: one for name, one in self._contents.named(torch.optim.Optimizer).items() if name in values}
        for name, optimizer in options.items():
            set_settings(optimizer, values[name])
        self._contents.set_small({name: value for name, value in values.items() if name not in options})

    def _equal_tensors(self) -> list[torch.Tensor]:
        """The large tensors of which each rank has the same."""
        return [tensor for tensor in self._contents.large() if not isinstance(tensor, DTensor)]

    def _cell_ended(self, *, accepted: bool, changed: bool) -> None:
        """A cell has run, and has `changed` large tensors. `accepted`: on all ranks, so that the commit has the present values."""
        if accepted:
            self._steps.clear()
            self._record_commit()
        elif changed:
            self._tensors.forget()

    # ---- parts ----

    def _live(self) -> dict[str, Any]:
        """All live values, in the form in which they are sent and saved."""
        begun = {"commits": self.commits, "began_at": self._began_at, "copying": self._steps.copying}
        return {**begun, **self._contents.live()}

    def _device(self) -> torch.device:
        """Where the parameters are."""
        return self._contents.device()

    def _accept(
        self, described: dict[str, Any], device: torch.device, fill: Callable[[list[torch.Tensor]], object]
    ) -> None:
        """Become the state that `described` describes; `fill` fills the tensors that it gets."""
        mine = self._live()
        compare(described, describe(mine, []), but=self._contents.differing_caches(described["modules"]))
        self._contents.check_received(described)
        # Small values come into new memory: here two of them may be one tensor, or one of the model's, and there not.
        places = dict(destinations(described, {**mine, "small": None, "extra": None}, device))
        fill([places[index] for index in sorted(places)])
        received = rebuild(described, places)
        self._contents.set_received(received)
        self.commits, self._steps.copying = received["commits"], received["copying"]
        self._began_at = received.get("began_at", 0)  # checkpoints of older versions have none
        self._steps.clear()
        self._tensors.keep = bool(self._steps.copying)
        self._survey()
        self._record_commit()

    def _survey(self) -> None:
        self._contents.survey()
        self._modes.note(self._contents.named(torch.nn.Module).values())
        self._tensors.watch(list(self._contents.names))

    def _record_start(self) -> None:
        """Record the present values. On a GPU the first copy of large tensors is made when the first world is formed."""
        self._tensors.keep = self._contents.device().type == "cpu"
        self._record_commit()

    def _record_all(self, *, counted: bool = False) -> None:
        """Record the present values, with copies of all tensors: `undo` returns to them."""
        self._tensors.keep = True
        self._record_commit(counted=counted)

    def _record_commit(self, *, counted: bool = False) -> None:
        """Record the small values as they are at this commit, and copy the tensors if they are kept.

        `counted`: large tensors other than buffers are copied only where `step_watch` expects or finds changes.
        """
        contents = self._contents
        if contents.is_outdated():
            self._survey()
        contents.check_optimizers()
        self._buffers.commit(contents.buffers())
        self._tensors.commit(contents.large() if self._tensors.keep else (), counted=counted)
        self._record = CommitRecord(contents, with_entries=self._tensors.keep)


class ObjectState(State):
    """Counters, lists, dicts, tensors: `ObjectState(epoch=0, best=None)`."""


class TorchState(State):
    """Models, optimizers, schedulers, samplers and counters: `TorchState(model=model, optimizer=optimizer, epoch=0)`."""
