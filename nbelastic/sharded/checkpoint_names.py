"""The names of a sharded state's values in a checkpoint: those that `get_state_dict()` and `dcp.save()` of torch give.

So `dcp.save({"model": …, "optimizer": …})` and a checkpoint of nbelastic have the same keys: `model.0.weight`,
`optimizer.state.0.weight.exp_avg`, `optimizer.param_groups.0.lr`. A parameter that two layers share has both names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from nbelastic.sharded.arena import ShardTensor
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.holdings import Record
from nbelastic.sharded.parameters import plain_name
from nbelastic.state import optimizers


class InModel(NamedTuple):
    """A parameter or buffer: the name under which its model is bound, and its own name within the model."""

    model: str
    name: str


class Names:
    """The names of all values of a `Bound`: `parameters` by full name, with all names of a shared one."""

    def __init__(self, bound: Bound) -> None:
        self.parameters: dict[str, list[InModel]] = {name: [] for name in bound.parameters}
        self.buffers: dict[InModel, str] = {}  # those in the model's state_dict(), and their names in `Bound.buffers`
        self.optimizers: dict[str, dict[str, str]] = {}  # by optimizer: full name of a parameter -> name in its state
        first = {one: name for name, one in bound.parameters.items()}
        for model, module in bound.modules.items():
            for key, one in module.named_parameters(remove_duplicate=False):
                self.parameters[first[one]].append(InModel(model, plain_name(key)))
            known = {buffer: plain_name(key) for key, buffer in module.named_buffers()}
            for prefix, layer in module.named_modules(remove_duplicate=False):
                for key, buffer in layer._buffers.items():
                    if buffer is not None and key not in layer._non_persistent_buffers_set:
                        name = plain_name(f"{prefix}.{key}" if prefix else key)
                        self.buffers[InModel(model, name)] = known[buffer]
        for name, optimizer in bound.optimizers.items():
            trained = [first[one] for one in optimizers.parameters(optimizer)]
            models = {self.parameters[parameter][0].model for parameter in trained}
            by_name = {parameter: known[0] for parameter, known in self.parameters.items()}
            self.optimizers[name] = {  # first those that it trains; groups of others may be added
                parameter: by_name[parameter].name if models == {by_name[parameter].model} else parameter
                for parameter in dict.fromkeys([*trained, *by_name])
            }

    def paths(self, tensor: ShardTensor) -> list[tuple[str, ...]]:
        """The paths of a sharded tensor: several if it is a parameter that layers share."""
        if not tensor.optimizer:
            return [(name.model, name.name) for name in self.parameters[tensor.parameter]]
        return [(tensor.optimizer, "state", self.optimizers[tensor.optimizer][tensor.parameter], tensor.entry)]

    def keys(self, tensor: ShardTensor) -> list[str]:
        """The keys of a sharded tensor, as `paths`."""
        return [".".join(path) for path in self.paths(tensor)]

    def whole_values(self, record: Record) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
        """All values of a checkpoint that are not sharded, by key, and the path of each."""
        tree: dict[str, Any] = {}
        for name, first in self.buffers.items():
            tree.setdefault(name.model, {})[name.name] = record["buffers"][name.model][first]
        for optimizer, own in self.optimizers.items():
            state: dict[str, Any] = {}
            for parameter, entries in record["scalars"][optimizer].items():
                if entries:
                    state[own[parameter]] = dict(entries)
            settings = record["optimizers"][optimizer]
            groups = [
                {**options, "params": [own[name] for name in members]}
                for options, members in zip(settings["groups"], settings["names"], strict=True)
            ]
            tree[optimizer] = {**({"state": state} if state else {}), "param_groups": groups}
        return flatten_state_dict(tree)  # type: ignore[no-any-return]
