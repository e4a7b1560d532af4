"""The training state: what recovery returns to, and how it reaches newcomers.

Only a collective can be aborted, and tensors change only inside `optimizer.step()`. So while no collective comes between
the first step after a commit and the next commit, a rank is always at one of the two, never in between: the live tensors
are those of its last commit, and nothing has to be copied. The optimizers' hooks, the group's count of collectives and
autograd's count of changes tell whether that holds; where it does not, tensors are copied at each commit. Small things
(counters, buffers, schedulers, random generators, sampler) are always noted at the commit.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from nbelastic.errors import StateError, UsageError
from nbelastic.state import backward_hook as backward
from nbelastic.state import checkpoints as saving
from nbelastic.state import optimizers as opt
from nbelastic.state import rng as generators
from nbelastic.state.checkpoints import Saving
from nbelastic.state.layout import Layout
from nbelastic.state.optimizers import frozen
from nbelastic.state.snapshot import Part
from nbelastic.state.transfer import (
    Channel,
    at_once,
    check_plain,
    compare,
    describe,
    destinations,
    rebuild,
    receive,
    shape_of,
)
from nbelastic.state.unsupported import check, check_kept, frozen_value, only_numbers
from nbelastic.worker.formation import Formation
from nbelastic.worker.process_group import collectives
from nbelastic.worker.session import Session

LARGE = (torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer)
SEVERAL = "several steps a commit"
EXPOSED = (
    "a collective runs between optimizer.step() and state.commit(): from now on tensors are copied at each commit. "
    "Commit right after the step to save that."
)
OUTSIDE = (
    "{name} changes outside an optimizer's step: from now on tensors are copied at each commit. "
    "Change it between optimizer.step() and state.commit(), or give its optimizer to the state, to save that."
)


class State:
    """Base of the states: values by name, `commit()`, `restore()` and `sync()`. Use `ObjectState` or `TorchState`.

    Values are plain data (numbers, text, containers, tensors) or objects with `state_dict()` and `load_state_dict()`.
    They are attributes: `state.generation += 1`. `commits` counts the commits since the beginning of the job.
    """

    def __init__(self, *unnamed: Any, **values: Any) -> None:
        if unnamed:
            raise UsageError(f"a state's values have names: {type(self).__name__}(model=model, step=0).")
        self._values: dict[str, Any] = {}
        self._session: Session | None = None
        self._hooks: list[Any] = []
        self._names: dict[torch.Tensor, str] = {}  # of all parameters
        self._layout = Layout()
        self._kept = 0  # for how many parameters the optimizers kept something when that was checked
        self._grouped = 0  # how many parameters the optimizers held when the names were made
        self._buffers: list[dict[str, torch.Tensor | None]] = []  # of each submodule
        self._tensors, self._statistics = Part(keep=True, beside=True), Part(keep=True)
        self._copying = ""  # why tensors are copied at each commit
        self._steps: Counter[int] = Counter()  # those begun since the last commit, by the optimizer's id
        self._mark = 0  # the count of collectives at the first of them
        self._accumulating = False  # a backward pass since the last step
        self._note: dict[str, Any] = {}
        self._unreported: set[str] = set()  # names of values that were no numbers
        self.commits = 0
        self.reset_callbacks: list[Callable[[], object]] = []
        for name, value in values.items():
            if name.startswith("_") or hasattr(State, name) or name in self.__dict__:
                raise StateError(f"{name!r} cannot be the name of a value in a state: choose another.")
            check(name, value)
            self._values[name] = value
        self._survey()
        self._take_note()

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(
                f"this state has no {name!r}; it holds {', '.join(self._values) or 'nothing'}."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in ("commits", "reset_callbacks"):
            self.__dict__[name] = value
            return
        old = self._values.get(name)
        if name not in self._values:
            raise StateError(f"this state has no {name!r}: give it its first value where the state is made.")
        if value is not old and isinstance(old, LARGE):
            raise StateError(f"{name!r} cannot be replaced by another object: load new values into it.")
        check(name, value)
        self._values[name] = value

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Called in order on every rank, after the new group exists and before training resumes; not at the start."""
        added = [*callbacks] if isinstance(callbacks, Iterable) else [callbacks]
        for callback in added:
            if not callable(callback):
                raise UsageError(f"a reset callback must be a function, not {callback!r}.")
        self.reset_callbacks.extend(added)

    def report(self, **values: float) -> None:
        """Numbers for the dashboard, as `report(loss=loss.item())`. The newest are sent a few times a second.

        `total` is how many commits the job will make: `report(loss=loss.item(), total=3000)` lets the dashboard say how
        long it will take.
        """
        if self._session is None:
            return
        self._session.report(only_numbers(values, self._unreported))

    def commit(self) -> None:
        """The point that recovery returns to. Every rank calls it, equally often; right after the step is best.

        It is also where the ranks leave together for a planned change of the world. While gradients are accumulated on any
        rank, a commit without a step does nothing: half of a sum cannot be returned to. The ranks agree on that.
        """
        if self._steps:
            if collectives() != self._mark:
                self._expose()
            elif max(self._steps.values()) > 1:
                self._copy_from_now_on(SEVERAL)
        elif self._without_a_step():
            return
        self._steps, self._accumulating = Counter(), False
        self.commits += 1
        self._tensors.keep = bool(self._copying) or self._session is None
        self._take_note()
        if self._session is not None:
            if self._session.checkpoints is not None:
                self._session.checkpoints.committed(self)
            self._session.committed(self.commits)

    def _without_a_step(self) -> bool:
        """A commit without a step: whether it does nothing, on all ranks alike, as some rank accumulates gradients."""
        changed = self._tensors.changed()
        if changed:
            self._copy_from_now_on(self._outside())
        waits = self._accumulating and not changed and any(p.grad is not None for p in self._names)
        if self._session is None:
            return waits and self._grouped > 0
        if self._grouped and self._session.on_any_rank(waits):
            return True
        self._session.finish_gpu_work()
        return False

    def save(self, path: str | Path, *, keep: int = saving.KEEP) -> Saving:
        """Write the state, as it is now, as a checkpoint into the folder `path`, of which the newest `keep` stay.

        Returns as soon as the tensors are copied; `.wait()` for the rest. All ranks hold the same, so rank 0 alone writes.
        StateError if the folder cannot be written.
        """
        return saving.save(self, path, keep=keep, writes=self._session is None or self._session.speaks)

    def load(self, path: str | Path) -> Path:
        """Become the checkpoint at `path`, or the newest of a folder that can be used; returns which that was.

        Call it on all ranks, or on all before the elastic function. StateError if there is none that can be used.
        """
        return saving.load(self, path)

    def restore(self) -> None:
        """Back to the last commit. StateError if tensors have changed since and nothing was copied: one step a commit."""
        self.undo()
        if not self.clean:
            raise StateError(
                "the tensors have changed since the last commit, and with one step a commit nothing is copied: "
                "restore before optimizer.step(), or commit after several steps."
            )

    def undo(self) -> None:
        """Back to the last commit, as far as that is possible here: see `clean`."""
        note = self._note
        if self._tensors.keep and note:
            for optimizer, entries in zip(self._of(torch.optim.Optimizer), note["entries"], strict=True):
                opt.put_entries(optimizer, entries)
            self._tensors.restore()
            self._steps = Counter()
        self._accumulating = False
        for parameter in self._names:
            parameter.grad = None
        if note:
            self._put_small(note["small"])
            for buffers, key, tensor in note["buffers"]:
                buffers[key] = tensor
            self._statistics.restore()
            for optimizer, groups in zip(self._of(torch.optim.Optimizer), note["groups"], strict=True):
                opt.put_settings(optimizer, groups)
            generators.put(note["random"])

    @property
    def clean(self) -> bool:
        """Whether the live tensors are those of the last commit."""
        return not self._steps and not self._tensors.changed() and not self._layout.changed()

    def begin(self, session: Session) -> None:
        """The elastic loop begins: nothing has been committed yet, and the start is what a break returns to."""
        self.end()
        self._session = session
        self._hooks += [o.register_step_pre_hook(self._stepping) for o in self._of(torch.optim.Optimizer)]
        self._hooks.append(backward.Registered(self._accumulated))
        self.commits, self._steps, self._copying = 0, Counter(), ""
        self._survey()
        check_plain(describe(self._small(), []))
        self._take_note()

    def end(self) -> None:
        """The elastic loop is over. Hooks that stayed would keep the model in memory: it and they would hold each other."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._session = [], None

    def sync(self, formation: Formation) -> None:
        """Collective: `formation.receivers` get the state of rank `formation.root`, in place."""
        assert self._session is not None
        plan = self._session.checkpoints
        if plan is not None and self.commits == 0 and formation.rank == formation.root:
            plan.resume(self)
        if formation.receivers:
            if self._layout.changed():
                self._survey()
            where = self._device()
            channel = Channel(formation.root, formation.receivers, formation.rank, formation.world_size, where)
            if channel.takes_part:
                self._move(channel, where, formation)
        if self.commits == 0:  # how the program commits is not known yet
            self._tensors.keep = True
            self._take_note()

    def _move(self, channel: Channel, where: torch.device, formation: Formation) -> None:
        """Send the state, or receive it: whoever holds a commit goes on holding it until all of the newer one has come."""
        session = self._session
        assert session is not None
        apart = (
            session.run_abortable if where.type != "cuda" else at_once
        )  # NCCL's operations belong to this thread's stream
        if channel.receives:
            facts = session.facts
            described = apart(lambda: channel.move_object(None))

            def check() -> None:
                if (
                    where.type == "cuda"
                ):  # an aborted transfer looks like one that has ended well until the GPU is waited for
                    session.check(where)

            def fill(places: list[torch.Tensor]) -> None:
                held = facts.holds_state
                try:
                    receive(channel, places, facts, apart, formation.local_size, check=check)
                except BaseException:
                    if held and self._tensors.keep:  # the copies are those of the commit that it held
                        self.undo()
                        facts.holds_state = True
                    raise

            self._accept(described, where, fill)
            facts.holds_state, facts.state_since = True, formation.generation
        else:
            outgoing: list[torch.Tensor] = []
            contents = describe(self._contents(), outgoing)
            apart(lambda: channel.move_object(contents))
            apart(lambda: channel.move_tensors(outgoing))

    def _accept(
        self, described: dict[str, Any], where: torch.device, fill: Callable[[list[torch.Tensor]], object]
    ) -> None:
        """Become the state that `described` stands for; `fill` puts the tensors' contents into the places it is given."""
        mine = self._contents()
        compare(described, describe(mine, []))
        for name, optimizer in self._named(torch.optim.Optimizer).items():
            opt.check_groups(name, optimizer, described["optimizers"][name], self._names)
        places = dict(destinations(described, mine, where))
        fill([places[index] for index in sorted(places)])
        received = rebuild(described, places)
        for name, contents in received["optimizers"].items():
            opt.regroup(self._values[name], contents, self._names)
            opt.put(self._values[name], contents)
        self._put_small(received["small"])
        self.commits, self._copying = received["commits"], received["copying"]
        self._steps, self._accumulating = Counter(), False
        self._tensors.keep = bool(self._copying)
        self._survey()
        self._take_note()

    def _of(self, kind: type) -> list[Any]:
        return list(self._named(kind).values())

    def _named(self, kind: type) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if isinstance(value, kind)}

    def _survey(self) -> None:
        """Look where the tensors are: once, as walking through modules takes time."""
        self._names, self._buffers = {}, []
        self._layout = Layout(self._of(torch.nn.Module))
        for name, module in self._named(torch.nn.Module).items():
            check(name, module)
            for key, parameter in module.named_parameters():
                self._names.setdefault(parameter, f"{name}.{key}")
            self._buffers += [submodule._buffers for submodule in module.modules()]
        for name, tensor in self._named(torch.nn.Parameter).items():
            self._names.setdefault(tensor, name)
        for name, optimizer in self._named(torch.optim.Optimizer).items():
            unknown = sum(p not in self._names for p in opt.parameters(optimizer))
            if unknown:
                raise StateError(
                    f"{name} trains {unknown} parameters of no model in the state: put that model into the state too, "
                    "and replace layers before you make the optimizer."
                )
        self._grouped = self._count_grouped()
        self._tensors.watch(list(self._names))

    def _count_grouped(self) -> int:
        return sum(len(group["params"]) for o in self._of(torch.optim.Optimizer) for group in o.param_groups)

    def _check_kept(self) -> None:
        """Look at what the optimizers keep when they have begun to keep it, and whenever it becomes more."""
        known, self._kept = self._kept, sum(len(optimizer.state) for optimizer in self._of(torch.optim.Optimizer))
        if self._kept != known:
            for name, optimizer in self._named(torch.optim.Optimizer).items():
                check_kept(name, opt.tensors(optimizer))

    def _small(self) -> dict[str, Any]:
        """Counters and whatever has a `state_dict()`, by name."""
        return {
            name: value.state_dict() if hasattr(value, "load_state_dict") else value
            for name, value in self._values.items()
            if not isinstance(value, LARGE)
        }

    def _put_small(self, small: Mapping[str, Any]) -> None:
        for name, kept in small.items():
            value = self._values[name]
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(frozen(kept))
            elif isinstance(value, torch.Tensor) and shape_of(value) == shape_of(kept):
                with torch.no_grad():  # in place: an optimizer may hold it
                    value.copy_(kept)
            else:
                self._values[name] = frozen(kept)

    def _contents(self) -> dict[str, Any]:
        """All of it, live, in the shape in which it is sent."""
        return {
            "commits": self.commits,
            "copying": self._copying,
            "small": self._small(),
            "modules": {
                name: dict(module.named_parameters()) | dict(module.named_buffers())
                for name, module in self._named(torch.nn.Module).items()
            }
            | {name: {"itself": parameter} for name, parameter in self._named(torch.nn.Parameter).items()},
            "optimizers": {
                name: opt.contents(optimizer, self._names)
                for name, optimizer in self._named(torch.optim.Optimizer).items()
            },
        }

    def _large(self) -> list[torch.Tensor]:
        """The large live tensors: parameters and what the optimizers keep for them."""
        return [*self._names, *(t for optimizer in self._of(torch.optim.Optimizer) for t in opt.tensors(optimizer))]

    def _device(self) -> torch.device:
        return next((t.device for t in self._names), torch.device("cpu"))

    def _stepping(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to change its parameters."""
        now = collectives()
        if self._session is not None and (not self._steps or now != self._mark):
            self._session.check(self._device())
        if not self._steps:
            self._mark = now
            if self._tensors.changed():
                self._copy_from_now_on(self._outside())
        self._steps[id(optimizer)] += 1
        self._accumulating = False
        self._tensors.settle()

    def _accumulated(self) -> None:
        self._accumulating = True

    def _expose(self) -> None:
        """There was a collective between the first step and now."""
        if self._session is not None:
            self._session.check(self._device())
        self._copy_from_now_on(SEVERAL if max(self._steps.values()) > 1 else EXPOSED)

    def _copy_from_now_on(self, why: str) -> None:
        if not self._copying and why != SEVERAL and self._session is not None and self._session.speaks:
            print(f"nbelastic: {why}", file=sys.stderr, flush=True)
        self._copying = self._copying or why

    def _outside(self) -> str:
        changed = self._tensors.first_changed()
        return OUTSIDE.format(name="a tensor" if changed is None else self._names[changed])

    def _take_note(self) -> None:
        """Note the small things as they are at this commit, and copy the tensors if they are kept."""
        if self._count_grouped() != self._grouped or self._layout.changed():
            self._survey()
        self._check_kept()
        buffers = [(own, key, b) for own in self._buffers for key, b in own.items() if b is not None]
        self._statistics.commit([b for _, _, b in buffers])
        self._tensors.commit(self._large() if self._tensors.keep else ())
        optimizers = self._of(torch.optim.Optimizer)
        self._note = {
            "small": {name: frozen_value(name, value) for name, value in self._small().items()},
            "buffers": buffers,
            "groups": [opt.settings(optimizer) for optimizer in optimizers],
            "entries": [opt.entries(optimizer) for optimizer in optimizers] if self._tensors.keep else [],
            "random": generators.states(),
        }


class ObjectState(State):
    """Counters, lists, dicts, tensors: `ObjectState(generation=0, best=None)`."""


class TorchState(State):
    """Models, optimizers, schedulers, samplers and counters: `TorchState(model=model, optimizer=optimizer, generation=0)`."""
