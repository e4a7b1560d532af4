"""The values of a state: which are models, optimizers and small values, and where their tensors are."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch

from nbelastic.errors import StateError
from nbelastic.state import optimizers
from nbelastic.state.caches import Buffers, differing_caches
from nbelastic.state.checks import check, check_optimizer_tensors
from nbelastic.state.extra_states import ExtraStates
from nbelastic.state.grad_scaler import is_grad_scaler
from nbelastic.state.layout import Layout
from nbelastic.state.optimizers import frozen
from nbelastic.state.requires_grad import requires_grad, set_requires_grad
from nbelastic.state.schedulers import FORGOTTEN, without_scheduler
from nbelastic.state.step_log import StepLog
from nbelastic.state.transfer import shape_of
from nbelastic.state.user_words import UserWords
from nbelastic.system.log_line import print_line

RECEIVED = "the received state: make the same object before the elastic loop, as one SequentialLR for several schedulers in turn."
LARGE = (torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer)  # all other values are small


class Contents:
    """`values` by name. `survey()` finds the tensors once, as walking through modules takes time."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.given: dict[str, Any] = {}  # dicts and lists for which the user may have a name outside the state
        self.user_words = UserWords()  # of values that an integration has put into the state
        self.names: dict[torch.Tensor, str] = {}  # of all parameters
        self.layout = Layout()
        self.grouped = 0  # how many parameters the optimizers' groups had at the survey
        self._surveyed: list[Any] = []  # the models, parameters and optimizers of the survey
        self._entries = 0  # how many entries the optimizers' states had at the last check
        self.buffers_of_layers: list[Buffers] = []
        self.extra = ExtraStates()
        self._looks = 2  # for forgotten schedulers: at the first world's beginning, and at its first commit

    def named(self, kind: type) -> dict[str, Any]:
        """The values of this kind by name."""
        return {name: value for name, value in self.values.items() if isinstance(value, kind)}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.named(torch.optim.Optimizer).values())

    def survey(self) -> None:
        """Find all parameters, buffers and layers.

        StateError if an optimizer trains a parameter of no model here, or holds an optimizer that is not here.
        """
        self.names, self.buffers_of_layers = {}, []
        modules = self.named(torch.nn.Module)
        self.extra = ExtraStates(modules)
        self.layout = Layout(modules.values())
        for name, module in modules.items():
            check(name, module)
            for key, parameter in module.named_parameters():
                self.names.setdefault(parameter, f"{name}.{key}")
            self.buffers_of_layers += [layer._buffers for layer in module.modules()]
        for name, tensor in self.named(torch.nn.Parameter).items():
            self.names.setdefault(tensor, name)
        for name, optimizer in self.named(torch.optim.Optimizer).items():
            unknown = sum(p not in self.names for p in optimizers.parameters(optimizer))
            if unknown:
                raise StateError(
                    f"{name} trains {unknown} parameters of no model in the state: put that model into the state too, "
                    "and replace layers before you make the optimizer."
                )
        optimizers.check_inner(self.named(torch.optim.Optimizer), "TorchState")
        self.grouped, self._surveyed = self._count_grouped(), self._large_values()

    def is_outdated(self) -> bool:
        """Whether a layer, a parameter group, or a model as a value was added, replaced or removed since the survey."""
        if self._count_grouped() != self.grouped or self.layout.changed():
            return True
        return [*map(id, self._large_values())] != [*map(id, self._surveyed)]

    def _large_values(self) -> list[Any]:
        return [value for value in self.values.values() if isinstance(value, LARGE)]

    def _count_grouped(self) -> int:
        return sum(len(group["params"]) for optimizer in self.optimizers() for group in optimizer.param_groups)

    def check_optimizers(self) -> None:
        """Check the tensors of the optimizers when they have begun to keep some, and whenever there are more."""
        before, self._entries = self._entries, sum(len(optimizer.state) for optimizer in self.optimizers())
        if self._entries != before:
            for name, optimizer in self.named(torch.optim.Optimizer).items():
                check_optimizer_tensors(name, optimizers.tensors(optimizer))

    def buffers(self) -> list[torch.Tensor]:
        """All buffers. One that nothing can be written into is replaced by a copy first: a constant of expand(), or of inference mode."""
        found: list[torch.Tensor] = []
        for own in self.buffers_of_layers:
            for key, tensor in own.items():
                if tensor is not None:
                    if not is_writable(tensor):
                        own[key] = tensor = tensor.clone(memory_format=torch.contiguous_format)  # noqa: PLW2901
                    found.append(tensor)
        return found

    def differing_caches(self, received: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Buffers, str, Any]]:
        """See `caches.differing_caches`; by name, of all models."""
        return {
            f"{name}.{key}": cache
            for name, module in self.named(torch.nn.Module).items()
            for key, cache in differing_caches(module, received.get(name, {})).items()
        }

    def large(self) -> list[torch.Tensor]:
        """The large live tensors: parameters, and the tensors that the optimizers keep for them."""
        return [*self.names, *(t for optimizer in self.optimizers() for t in optimizers.tensors(optimizer))]

    def device(self) -> torch.device:
        """Where the parameters are."""
        return next((t.device for t in self.names), torch.device("cpu"))

    def requires_grad(self) -> dict[str, bool]:
        """Whether each parameter is trained, by name."""
        return requires_grad(self._parameters())

    def set_requires_grad(self, wanted: Mapping[str, bool]) -> None:
        """The inverse of `requires_grad`. Parameters without a name in `wanted` stay as they are."""
        set_requires_grad(self._parameters(), wanted)

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter for parameter, name in self.names.items()}

    def small(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """Counters, and the `state_dict()` of values that have one, by name. `without`: names to leave out."""
        return {
            name: value.state_dict() if hasattr(value, "load_state_dict") else value
            for name, value in self.values.items()
            if not isinstance(value, LARGE) and name not in without
        }

    def set_small(self, small: Mapping[str, Any]) -> None:
        """The inverse of `small`."""
        uses = self._uses_of_memory()
        for name, new in small.items():
            value = self.values[name]
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(frozen(new))
                if is_grad_scaler(value):  # a step may have been cut off, and a new optimizer may get the old one's id
                    value._per_optimizer_states.clear()
            elif (
                isinstance(value, torch.Tensor)
                and _is_like(value, new)
                and uses[_memory(value)] == 1
                and is_writable(value)
            ):
                with torch.no_grad():  # in place: an optimizer may hold this tensor
                    value.copy_(new)
            else:
                if isinstance(value, torch.Tensor):
                    uses[_memory(value)] -= 1
                self.values[name] = self._container(name, frozen(new))

    def _uses_of_memory(self) -> Counter[int]:
        """How many tensors have each piece of memory, if a value is a tensor: what is written there changes all of them."""
        tensors = [value for value in self.values.values() if isinstance(value, torch.Tensor)]
        if not tensors:
            return Counter()
        return Counter(map(_memory, [*tensors, *self.names, *self.buffers()]))

    def _container(self, name: str, new: Any) -> Any:
        """`new` in the dict or list that the user gave, if that is still the value; else in a dict of the value's class."""
        value = self.values[name]
        is_dict = isinstance(value, dict) and isinstance(new, dict)
        if not is_dict and not (isinstance(value, list) and isinstance(new, list)):
            return new
        target: Any = value if value is self.given.get(name) else copy.copy(value)
        target.clear()
        (target.update if is_dict else target.extend)(new)
        return target

    def committed(self, *, is_rank_0: bool) -> None:
        """A commit was made or received: step logs write. In the beginning, a line names what the program has forgotten."""
        if is_rank_0 and self._looks > 0:
            self._looks -= 1
            for name in without_scheduler(self.values):
                self._looks = 0
                print_line(FORGOTTEN.format(name=name))
        for log in self.named(StepLog).values():
            log.committed(writes=is_rank_0)

    def close_logs(self) -> None:
        for log in self.named(StepLog).values():
            log.close()

    def live(self) -> dict[str, Any]:
        """All live values, in the form in which they are sent."""
        return {
            "small": self.small(),
            "kinds": self.kinds(),
            "extra": self.extra.live(),
            "requires_grad": self.requires_grad(),
            "modules": {
                name: dict(module.named_parameters()) | dict(module.named_buffers())
                for name, module in self.named(torch.nn.Module).items()
            }
            | {name: {"itself": parameter} for name, parameter in self.named(torch.nn.Parameter).items()},
            "optimizers": {
                name: optimizers.contents(optimizer, self.names)
                for name, optimizer in self.named(torch.optim.Optimizer).items()
            },
        }

    def kinds(self) -> dict[str, str]:
        """The class of each scheduler or the like: its `state_dict()` means something else to another class."""
        small = {name: value for name, value in self.values.items() if not isinstance(value, LARGE)}
        return {name: type(value).__name__ for name, value in small.items() if hasattr(value, "load_state_dict")}

    def check_kinds(self, theirs: Mapping[str, str], source: str) -> None:
        """StateError if a scheduler or the like is of another class here. `source`: where theirs are, and what to do."""
        for name, kind in self.kinds().items():
            if theirs.get(name) != kind:
                raise StateError(f"the class of {name} is {kind} here and {theirs.get(name, 'none')} in {source}")

    def check_received(self, described: dict[str, Any]) -> None:
        """StateError if an optimizer here cannot get the received parameter groups, or a scheduler is of another class."""
        if "kinds" in described:  # checkpoints of older versions have none
            self.check_kinds(described["kinds"], RECEIVED)
        for name, optimizer in self.named(torch.optim.Optimizer).items():
            optimizers.check_groups(name, optimizer, described["optimizers"][name], self.names)

    def set_received(self, received: dict[str, Any]) -> None:
        """Set optimizers and small values; the tensors of models have been received in place, but for some buffers."""
        for own, key, tensor in self.differing_caches(received["modules"]).values():
            own[key] = tensor
        self.set_requires_grad(received.get("requires_grad", {}))  # checkpoints of older versions have none
        for name, contents in received["optimizers"].items():
            optimizers.regroup(self.values[name], contents, self.names)
            optimizers.set_contents(self.values[name], contents)
        self.extra.set(received.get("extra", {}))  # as above
        self.set_small(received["small"])


def is_writable(tensor: torch.Tensor) -> bool:
    """Whether values can be written into it: not into the result of expand(), nor into a tensor of inference mode."""
    repeats = tensor.layout is torch.strided and tensor.numel() > 1 and 0 in tensor.stride()
    return not (repeats or tensor.is_inference())


def _is_like(tensor: torch.Tensor, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and shape_of(tensor) == shape_of(value)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
