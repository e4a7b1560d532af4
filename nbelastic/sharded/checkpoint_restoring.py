"""Sets the models and optimizers of a generation to a checkpoint's values: each rank reads what it needs of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from nbelastic.errors import StateError
from nbelastic.sharded.arena import Shard, ShardTensor
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.checkpoint_names import Names
from nbelastic.sharded.checkpoint_reading import Stored
from nbelastic.sharded.chunks import Chunk, Layout
from nbelastic.sharded.holdings import Record
from nbelastic.sharded.parameters import local_tensor

Reads = list[tuple[str, torch.Tensor, Chunk | None]]


class Restoring:
    """Reads `stored` into `bound`, of which `rank` has the chunks that `layout` says."""

    def __init__(self, stored: Stored, bound: Bound, layout: Layout, rank: int) -> None:
        self._stored, self._bound, self._layout, self._rank = stored, bound, layout, rank
        self._names = Names(bound)

    def own(self, record: Record) -> None:
        """Read a checkpoint of nbelastic, with its `record`. StateError if the models or optimizers are others."""
        bound = self._bound
        bound.check_names(record, f"{self._stored.path}: bind what was saved, under the same names.")
        tensors = [ShardTensor(*one) for one in record["tensors"]]
        unknown = {one.parameter for one in tensors} - bound.parameters.keys()
        if unknown:
            raise StateError(f"{self._stored.path} has the parameter {min(unknown)}, and no bound model has it.")
        reads = self._parameters({name: f"{name}." for name in bound.modules})
        kept, more = self._new_tensors((self._names.keys(one)[0], one) for one in tensors if one.optimizer)
        self._stored.fill(reads + more)
        bound.set_record(record, kept)

    def others(self, set_first_values: Callable[[], object]) -> list[str]:
        """Read a checkpoint that another program wrote; returns what is not in it, in words.

        `set_first_values()` gives buffers their values that are not in it.
        """
        bound = self._bound
        missing = []
        prefixes = {name: self._model_prefix(name) for name in bound.modules}
        reads = self._parameters(prefixes)
        buffers = self._buffers(prefixes)
        absent = [name for name, module in bound.modules.items() if any(True for _ in module.buffers())]
        if sum(map(len, buffers.values())) < sum(len(own) for own in bound.buffers().values()):
            set_first_values()
            missing += [f"buffers of {name}" for name in absent if len(buffers[name]) < len(bound.buffers()[name])]
        kept: Shard = {}
        scalars: dict[str, Any] = {}
        settings = bound.settings()
        for name in bound.optimizers:
            prefix = self._optimizer_prefix(name)
            entries = self._entries(name, prefix) if prefix is not None else []
            new, more = self._new_tensors((key, one) for key, one in entries if self._is_sharded(key, one))
            kept, reads = {**kept, **new}, reads + more
            rest = [(key, one) for key, one in entries if one not in new]
            values = self._stored.values(key for key, _ in rest)
            scalars[name] = {}
            for key, one in rest:
                scalars[name].setdefault(one.parameter, {})[one.entry] = values[key]
            if not entries:
                missing.append(f"tensors of {name}")
            if prefix is None or not self._set_options(name, prefix, settings[name]["groups"]):
                missing.append(f"options of {name}")
        self._stored.fill(reads)
        bound.set_optimizers(settings, scalars, kept)
        for name, own in buffers.items():
            for key, value in own.items():
                bound.buffers()[name][key].copy_(value)
        return missing

    # ---- parameters and buffers ----

    def _parameters(self, prefixes: Mapping[str, str]) -> Reads:
        """All bound parameters. StateError if one is missing, or has another shape."""
        reads, stored = [], self._stored
        missing = []
        for name, parameter in self._bound.parameters.items():
            keys = [prefixes[one.model] + one.name for one in self._names.parameters[name]]
            key = next((key for key in keys if key in stored.keys), None)
            if key is None:
                missing.append(keys[0])
                continue
            shape = tuple(parameter.shape)
            if stored.shape(key) != shape:
                raise StateError(
                    f"{name} is {shape} here and {stored.shape(key)} in {stored.path}: build the model that was saved."
                )
            reads.append((key, local_tensor(parameter), self._chunk(name)))
        if missing:
            raise StateError(
                f"{stored.path} lacks {len(missing)} of {len(self._bound.parameters)} parameters, {missing[0]} for one: "
                "build the model that was saved, and bind it under the same name."
            )
        return reads

    def _model_prefix(self, model: str) -> str:
        """What precedes the names of a model's parameters in the checkpoint: such as `model.`, `app.model.` or nothing."""
        own = [one.name for names in self._names.parameters.values() for one in names if one.model == model]
        longest = max(own, key=len)
        found = [key[: -len(longest)] for key in self._stored.keys if key == longest or key.endswith(f".{longest}")]
        candidates = [f"{model}.", "", *sorted(found)]
        return max(candidates, key=lambda prefix: sum(prefix + name in self._stored.keys for name in own))

    def _buffers(self, prefixes: Mapping[str, str]) -> dict[str, dict[str, torch.Tensor]]:
        """The buffers that are in the checkpoint, by model and name."""
        found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in prefixes}
        own = self._bound.buffers()
        for name, first in self._names.buffers.items():
            key = prefixes[name.model] + name.name
            if key in self._stored.keys and self._stored.shape(key) == tuple(own[name.model][first].shape):
                found[name.model].update({first: self._stored.values([key])[key]})
        return found

    # ---- optimizers ----

    def _optimizer_prefix(self, optimizer: str) -> str | None:
        """What precedes `state.…` and `param_groups.…` of an optimizer in the checkpoint; None: it is not in it."""
        markers = [f"state.{name}." for name in self._names.optimizers[optimizer].values()]
        found = set()
        for key in self._stored.keys:
            if key.startswith((f"{optimizer}.state.", f"{optimizer}.param_groups.")):
                return f"{optimizer}."
            at = key.find(markers[0]) if markers else -1
            if at == 0 or (at > 0 and key[at - 1] == "."):
                found.add(key[:at])
        return found.pop() if len(found) == 1 else None

    def _entries(self, optimizer: str, prefix: str) -> list[tuple[str, ShardTensor]]:
        """The keys of what the checkpoint has of an optimizer's state."""
        parameters = {name: full for full, name in self._names.optimizers[optimizer].items()}
        found = []
        for key in self._stored.keys:
            if key.startswith(f"{prefix}state."):
                name, _, entry = key.removeprefix(f"{prefix}state.").rpartition(".")
                if name in parameters:
                    dtype = self._stored.dtype(key) if self._stored.shape(key) is not None else ""
                    found.append((key, ShardTensor(parameters[name], optimizer, entry, dtype)))
        return found

    def _is_sharded(self, key: str, tensor: ShardTensor) -> bool:
        """Whether an entry is split as its parameter is: a counter, such as `step`, has no dimension."""
        shape, wanted = self._stored.shape(key), tuple(self._bound.parameters[tensor.parameter].shape)
        if shape in (None, ()) and tensor.entry == "step":
            return False
        if shape not in (None, (), wanted):
            raise StateError(f"{key} is {shape} in {self._stored.path}, and its parameter is {wanted} here.")
        return shape == wanted and bool(shape)

    def _new_tensors(self, entries: Iterable[tuple[str, ShardTensor]]) -> tuple[Shard, Reads]:
        """New local tensors for entries of optimizers, and what to read into them."""
        kept, reads = {}, []
        for key, one in entries:
            if key not in self._stored.keys:
                raise StateError(f"{self._stored.path} lacks {key}, although it says that it has it.")
            own = local_tensor(self._bound.parameters[one.parameter])
            kept[one] = torch.empty_like(own, dtype=getattr(torch, one.dtype))
            reads.append((key, kept[one], self._chunk(one.parameter)))
        return kept, reads

    def _set_options(self, optimizer: str, prefix: str, groups: list[dict[str, Any]]) -> bool:
        """Set the options of each group in `groups` to those of the checkpoint; returns whether it has all groups."""
        stored: dict[str, dict[str, str]] = {}  # by the group's number, or a parameter's name: option -> key
        for key in self._stored.keys:
            if key.startswith(f"{prefix}param_groups."):
                owner, _, option = key.removeprefix(f"{prefix}param_groups.").rpartition(".")
                stored.setdefault(owner, {})[option] = key
        members = [
            [self._names.optimizers[optimizer][name] for name in names]
            for names in self._bound.settings()[optimizer]["names"]
        ]
        numbers = {}
        for owner, options in stored.items():
            if "params" in options:
                numbers[owner] = set(self._stored.values([options["params"]])[options["params"]])
        complete = True
        for group, names in zip(groups, members, strict=True):
            owner = next(
                (number for number, known in numbers.items() if known == set(names)), names[0] if names else ""
            )
            options = {option: key for option, key in stored.get(owner, {}).items() if option in group}
            values = self._stored.values(options.values())
            group.update({option: values[key] for option, key in options.items()})
            complete = complete and bool(options)
        return complete

    def _chunk(self, parameter: str) -> Chunk | None:
        return self._layout.parameters[parameter].chunks[self._rank]
