"""The training state: what recovery returns to, and how it reaches newcomers.

Tensors change only inside `optimizer.step()`, so the optimizers' hooks tell whether the live tensors still are those of
the last commit. With one step a commit nothing is copied: recovery uses the live tensors of the most advanced clean
survivor, with the small things (counters, buffers, schedulers, random generators, sampler) as they were noted at the
commit. With more steps a commit the tensors are copied at each commit.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from nbelastic.core.errors import StateError
from nbelastic.core.messages import Formation
from nbelastic.worker.session import Session
from nbelastic.worker.transfer import Channel, describe, destinations, rebuild

_ATOMS = (int, float, str, bool, bytes, type(None))


class State:
    """Base of the states: values by name, `commit()`, `restore()` and `sync()`. Use `ObjectState` or `TorchState`.

    Values are plain data (numbers, text, containers, tensors) or objects with `state_dict()` and `load_state_dict()`.
    They are attributes: `state.epoch += 1`. `commits` counts the commits since the beginning of the job.
    """

    def __init__(self, **values: Any) -> None:
        self._values: dict[str, Any] = {}
        self._session: Session | None = None
        self._steps = 0  # optimizer steps begun since the last commit
        self._most = 0  # the most of them that came between two commits
        self._copies: list[torch.Tensor] | None = None  # the tensors as they were at the last commit
        self._entries: list[dict[torch.Tensor, dict[str, Any]]] = []  # what else each optimizer kept then
        self._note: dict[str, Any] = {}
        self.commits = 0
        self.reset_callbacks: list[Callable[[], object]] = []
        for name, value in values.items():
            if name.startswith("_") or hasattr(State, name) or name in self.__dict__:
                raise StateError(f"{name!r} cannot be the name of a value in a state: choose another.")
            self._values[name] = value
        for optimizer in self._of(torch.optim.Optimizer):
            optimizer.register_step_pre_hook(self._stepping)
        self._always_copy = bool(self._of(torch.nn.Module)) and not self._of(torch.optim.Optimizer)

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
        if value is not old and isinstance(old, (torch.nn.Module, torch.optim.Optimizer)):
            raise StateError(f"{name!r} cannot be replaced by another object: load new values into it.")
        self._values[name] = value

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Called in order on every rank, after the new group exists and before training resumes; not at the start."""
        self.reset_callbacks.extend(callbacks)

    def report(self, **values: float) -> None:
        """Numbers for the dashboard, as `report(loss=loss.item())`. The newest are sent a few times a second."""
        if self._session is not None:
            self._session.report = {name: float(value) for name, value in values.items()}

    def commit(self) -> None:
        """The point that recovery returns to. Every rank calls it, equally often; after each optimizer step is best.

        It is also where the ranks leave together for a planned change of the world.
        """
        self._most = max(self._most, self._steps)
        if self._most > 1 or self._always_copy:
            self._copy()
        elif self._steps:
            self._copies = None  # one step a commit: the live tensors will do
        self._steps = 0
        self.commits += 1
        self._take_note()
        if self._session is not None:
            self._session.committed(self.commits)

    def restore(self) -> None:
        """Back to the last commit. What changed the tensors since can be undone only if they were copied (see `clean`)."""
        if self._copies is not None and (self._steps or self._always_copy):
            with torch.no_grad():
                for optimizer, entries in zip(self._of(torch.optim.Optimizer), self._entries, strict=True):
                    _trim(optimizer, entries)
                for tensor, kept in zip(self._tensors(), self._copies, strict=False):
                    tensor.copy_(kept)
            self._steps = 0
        for module in self._of(torch.nn.Module):
            for parameter in module.parameters():
                parameter.grad = None
        if self._note:
            self._put_back(self._note)

    @property
    def clean(self) -> bool:
        """Whether the live tensors are those of the last commit."""
        return self._steps == 0

    def begin(self, session: Session) -> None:
        """The elastic loop begins: nothing has been committed yet, and the start is what a break returns to."""
        self._session = session
        self.commits = self._steps = self._most = 0
        self._take_note()

    def sync(self, formation: Formation) -> None:
        """Collective: `formation.receivers` get the state of rank `formation.root`, in place."""
        if formation.receivers:
            where = self._device()
            channel = Channel(formation.root, formation.receivers, formation.rank, formation.world_size, where)
            if channel.takes_part:
                self._move(channel, where)
        if self.commits == 0:
            self._copy()

    def _move(self, channel: Channel, where: torch.device) -> None:
        outgoing: list[torch.Tensor] = []
        described = channel.move_object(describe(self._contents(), outgoing) if channel.sends else None)
        if channel.sends or not channel.receives:
            channel.move_tensors(outgoing)
        else:
            self._accept(described, where, channel.move_tensors)

    def _accept(
        self, described: dict[str, Any], where: torch.device, fill: Callable[[list[torch.Tensor]], object]
    ) -> None:
        """Become the state that `described` stands for; `fill` puts the tensors' contents into the places it is given."""
        mine = self._contents()
        self._compare(described, describe(mine, []))
        places = dict(destinations(described, mine, where))
        fill([places[index] for index in sorted(places)])
        received = rebuild(described, places)
        for name, contents in received["optimizers"].items():
            _put_optimizer(self._values[name], contents)
        self._put_back({"small": received["small"], "groups": {}, "buffers": {}})
        self.commits, self._most, self._steps = received["commits"], received["most"], 0
        self._take_note()
        self._copies = None
        if self._most > 1 or self._always_copy:
            self._copy()

    def _compare(self, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
        """The models must be the same ones. StateError names the first difference."""
        if theirs["small"].keys() != mine["small"].keys() or theirs["optimizers"].keys() != mine["optimizers"].keys():
            raise StateError("the state holds other names here than on the rank that sends it.")
        for name, module in theirs["modules"].items():
            own = mine["modules"].get(name, {})
            for key in module.keys() | own.keys():
                sent, here = (m.get(key, (None,) * 5)[2:4] for m in (module, own))
                if sent != here:
                    raise StateError(f"{name}.{key} is {here} here and {sent} on the rank that sends the state.")

    def _of(self, kind: type) -> list[Any]:
        return [value for value in self._values.values() if isinstance(value, kind)]

    def _small(self) -> dict[str, Any]:
        """Counters and whatever has a `state_dict()`, by name."""
        return {
            name: value.state_dict() if hasattr(value, "load_state_dict") else value
            for name, value in self._values.items()
            if not isinstance(value, (torch.nn.Module, torch.optim.Optimizer))
        }

    def _contents(self) -> dict[str, Any]:
        """All of it, live, in the shape in which it is sent."""
        return {
            "commits": self.commits,
            "most": self._most,
            "small": self._small(),
            "modules": {
                name: dict(value.named_parameters()) | dict(value.named_buffers())
                for name, value in self._values.items()
                if isinstance(value, torch.nn.Module)
            },
            "optimizers": {
                name: _contents_of_optimizer(value)
                for name, value in self._values.items()
                if isinstance(value, torch.optim.Optimizer)
            },
        }

    def _tensors(self) -> list[torch.Tensor]:
        """The large live tensors: parameters and what the optimizers keep for them."""
        found = [p.detach() for module in self._of(torch.nn.Module) for p in module.parameters()]
        for optimizer in self._of(torch.optim.Optimizer):
            for kept in optimizer.state.values():
                found += [value for value in kept.values() if isinstance(value, torch.Tensor)]
        return found

    def _copy(self) -> None:
        old = self._copies or []
        with torch.no_grad():
            self._copies = [
                _copied(tensor, into)
                for tensor, into in itertools.zip_longest(self._tensors(), old)
                if tensor is not None
            ]
        self._entries = [_entries(optimizer) for optimizer in self._of(torch.optim.Optimizer)]

    def _device(self) -> torch.device:
        return next((t.device for t in self._tensors()), torch.device("cpu"))

    def _stepping(self, *_: Any) -> None:
        self._steps += 1

    def _take_note(self) -> None:
        """Note the small things as they are at this commit."""
        self._note = {
            "small": {name: _frozen(value) for name, value in self._small().items()},
            "buffers": [b.clone() for module in self._of(torch.nn.Module) for b in module.buffers()],
            "groups": [_settings(optimizer) for optimizer in self._of(torch.optim.Optimizer)],
            "random": _random_states(),
        }

    def _put_back(self, note: dict[str, Any]) -> None:
        for name, kept in note["small"].items():
            value = self._values[name]
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(_frozen(kept))
            else:
                self._values[name] = _frozen(kept)
        live = [b for module in self._of(torch.nn.Module) for b in module.buffers()]
        with torch.no_grad():
            for buffer, kept in zip(live, note["buffers"], strict=False):
                buffer.copy_(kept)
        for optimizer, groups in zip(self._of(torch.optim.Optimizer), note["groups"], strict=False):
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group.update(kept)
        if "random" in note:
            _set_random_states(note["random"])


class ObjectState(State):
    """Counters, lists, dicts, tensors: `ObjectState(epoch=0, best=None)`."""


class TorchState(State):
    """Models, optimizers, schedulers, samplers and counters: `TorchState(model=model, optimizer=optimizer, epoch=0)`."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        for name, value in self._values.items():
            if isinstance(value, torch.nn.parallel.DistributedDataParallel):
                raise StateError(f"{name} is wrapped in DistributedDataParallel: give the bare model, wrap it inside.")
            if isinstance(value, torch.optim.LBFGS):
                raise StateError(f"{name} is LBFGS, which changes parameters within a step: it cannot be recovered.")


def _contents_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {"groups": _settings(optimizer), "state": [dict(optimizer.state.get(p, {})) for p in parameters]}


def _put_optimizer(optimizer: torch.optim.Optimizer, contents: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, kept in zip(parameters, contents["state"], strict=True):
        if kept:
            optimizer.state[parameter] = kept
        else:
            optimizer.state.pop(parameter, None)
    for group, kept in zip(optimizer.param_groups, contents["groups"], strict=True):
        group.update(kept)


def _copied(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """A copy, if possible in the place of the last one (the order changes when an optimizer keeps more)."""
    if into is None or (into.shape, into.dtype, into.device) != (tensor.shape, tensor.dtype, tensor.device):
        return tensor.clone()
    return into.copy_(tensor)


def _entries(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """What it keeps for each parameter, without the tensors' contents."""
    return {
        parameter: {key: None if isinstance(value, torch.Tensor) else _frozen(value) for key, value in kept.items()}
        for parameter, kept in optimizer.state.items()
    }


def _trim(optimizer: torch.optim.Optimizer, entries: dict[torch.Tensor, dict[str, Any]]) -> None:
    """Forget what it has begun to keep since `entries` was taken, and put its plain values back."""
    for parameter, kept in list(optimizer.state.items()):
        if parameter not in entries:
            del optimizer.state[parameter]
            continue
        for key, value in list(kept.items()):
            if key not in entries[parameter]:
                del kept[key]
            elif not isinstance(value, torch.Tensor):
                kept[key] = _frozen(entries[parameter][key])


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: _frozen(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _frozen(value: Any) -> Any:
    return value if isinstance(value, _ATOMS) else copy.deepcopy(value)


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
