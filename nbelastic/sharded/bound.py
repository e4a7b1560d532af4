"""The models and optimizers of one generation, and this rank's shard of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from nbelastic.errors import StateError
from nbelastic.sharded.arena import Shard, ShardTensor
from nbelastic.sharded.bound_checks import (
    Layers,
    check_attributes,
    check_container,
    check_entry,
    check_module,
    check_optimizer,
    is_scalar,
)
from nbelastic.sharded.chunks import Layout, OwnChunk, join
from nbelastic.sharded.parameters import (
    chunk_of,
    has_local_gradients,
    like,
    local_tensor,
    plain_name,
)
from nbelastic.sharded.transfer import gather_bytes
from nbelastic.state import optimizers
from nbelastic.state.backward_hooks import BackwardHook
from nbelastic.state.caches import differing_caches
from nbelastic.state.cuda_graphs import refuse_capture
from nbelastic.state.extra_states import ExtraStates
from nbelastic.state.optimizers import frozen, grown
from nbelastic.state.requires_grad import set_requires_grad
from nbelastic.state.tensor_snapshot import clone_tensors
from nbelastic.state.transfer import check_plain, describe
from nbelastic.worker.formation import Formation
from nbelastic.worker.session import Session


class Bound:
    """`modules` and `optimizers` by name. StateError if one of them cannot be recovered."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], trained_by: Mapping[str, torch.optim.Optimizer]) -> None:
        self.modules, self.optimizers = dict(modules), dict(trained_by)
        self.extra = ExtraStates(modules, plain_name)
        self.parameters: dict[str, torch.nn.Parameter] = {}  # a shared one under its first name
        self._names: dict[torch.Tensor, str] = {}
        self._hooks: list[Any] = []
        self.has_stepped = False  # since the last commit
        self._had_backward = False  # since the last step or commit
        for name, module in self.modules.items():
            check_module(name, module)
            for key, parameter in module.named_parameters():
                if parameter not in self._names:
                    full = f"{name}.{plain_name(key)}"
                    self._names[parameter], self.parameters[full] = full, parameter
        self._layers = Layers(self.modules.values())
        for name, optimizer in self.optimizers.items():
            check_optimizer(name, optimizer)
            unknown = sum(parameter not in self._names for parameter in optimizers.parameters(optimizer))
            if unknown:
                raise StateError(
                    f"{name} trains {unknown} parameters of no bound model: bind their model too, and make the optimizer "
                    "after fully_shard."
                )
        if not self.optimizers and any(parameter.requires_grad for parameter in self.parameters.values()):
            raise StateError(
                "bind() has got no optimizer, and a commit counts what optimizers do: bind(model=model, optimizer=optimizer)."
            )

    @property
    def device(self) -> torch.device:
        """Where the local tensors are."""
        return next((local_tensor(one).device for one in self.parameters.values()), torch.device("cpu"))

    def own_chunks(self) -> dict[str, OwnChunk]:
        """What this rank sends to the others: see `chunks.join`."""
        return {
            name: OwnChunk(
                tuple(one.shape), str(one.dtype).removeprefix("torch."), chunk_of(name, one), one.requires_grad
            )
            for name, one in self.parameters.items()
        }

    def check_unchanged(self) -> None:
        """StateError if the models have other layers than at bind(), or an optimizer has tensors that no commit has."""
        self._layers.check()
        for name, optimizer in self.optimizers.items():
            check_attributes(name, optimizer, self._names)

    def shard(self) -> Shard:
        """The live local tensors: parameters first, then what the optimizers keep for each."""
        found: Shard = {}
        for name, one in self.parameters.items():
            found[_named(local_tensor(one), name)] = local_tensor(one)
        for optimizer_name, optimizer in self.optimizers.items():
            for key in optimizers.shared(optimizer):
                raise StateError(f"{optimizer_name} keeps {key!r} for no parameter: ShardedState cannot recover it.")
            for parameter in optimizers.parameters(optimizer):
                name = self._name_of(parameter, optimizer_name)
                for entry, value in optimizer.state.get(parameter, {}).items():
                    what = f"{optimizer_name} keeps {entry!r} for {name}"
                    if is_scalar(value):
                        check_container(what, value)
                        continue
                    check_entry(what, parameter, value)
                    local = local_tensor(value)
                    found[_named(local, name, optimizer_name, entry)] = local
        return found

    def scalars(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Entries of the optimizers that are not sharded, such as `step`: optimizer -> parameter -> entry -> value."""
        live = {
            name: {
                self._names[parameter]: {
                    k: v if isinstance(v, torch.Tensor) else frozen(v)
                    for k, v in optimizer.state[parameter].items()
                    if is_scalar(v)
                }
                for parameter in optimizers.parameters(optimizer)
                if parameter in optimizer.state
            }
            for name, optimizer in self.optimizers.items()
        }
        found: dict[str, dict[str, dict[str, Any]]] = clone_tensors(live)
        return found

    def settings(self) -> dict[str, dict[str, Any]]:
        """The options of each optimizer's groups, and the names of their parameters."""
        return {
            name: {
                "groups": optimizers.settings(optimizer),
                "names": [[self._name_of(one, name) for one in group["params"]] for group in optimizer.param_groups],
            }
            for name, optimizer in self.optimizers.items()
        }

    def _name_of(self, parameter: torch.Tensor, optimizer: str) -> str:
        if parameter not in self._names:
            raise StateError(f"{optimizer} has got a parameter of no bound model after bind().")
        return self._names[parameter]

    def watch(self, before_step: Callable[[], object]) -> None:
        """Until `unwatch`, call `before_step()` before each step of an optimizer."""

        def used(*_: Any) -> None:
            refuse_capture()
            before_step()
            self.has_stepped, self._had_backward = True, False

        used = torch.compiler.disable(used)  # of a compiled step it runs before each call, too
        self._hooks = [one.register_step_pre_hook(used) for one in self.optimizers.values()]
        self._hooks.append(BackwardHook(self._after_backward))

    def _after_backward(self) -> None:
        self._had_backward = True

    def unwatch(self) -> None:
        """Remove the hooks: they and the models would keep each other in memory."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def committed(self) -> None:
        """The present values are those of a commit."""
        self.has_stepped = self._had_backward = False

    @property
    def accumulates(self) -> bool:
        """Whether a backward pass has left gradients that no step has used."""
        return self._had_backward and self._has_gradients()

    def _has_gradients(self) -> bool:
        if any(parameter.grad is not None for parameter in self.parameters.values()):
            return True
        return any(has_local_gradients(module) for module in self.modules.values())

    def check_names(self, record: Mapping[str, Any], source: str) -> None:
        """StateError if a record is of other models or optimizers. `source`: where it is from, and what to do."""
        check_same("optimizer", self.optimizers, record["optimizers"], source)
        check_same("model", self.modules, record["buffers"], source)
        kinds = record.get("kinds", {})  # checkpoints of older versions have none
        for name, optimizer in self.optimizers.items():
            optimizers.check_kind(name, optimizer, kinds.get(name), source)

    def set_record(self, record: Mapping[str, Any], shard: Shard, *, is_part: bool = False) -> None:
        """Set all that a commit has beside parameters: see `holdings.full_record`. `shard`, `is_part`: see `set_optimizers`."""
        self.set_optimizers(record["optimizers"], record["scalars"], shard, is_part=is_part)
        self.set_buffers(record["buffers"])
        self.extra.set(record.get("extra", {}))  # commits of older versions have none
        set_requires_grad(self.parameters, record.get("requires_grad", {}))  # as above

    def set_optimizers(
        self, settings: Mapping[str, Any], scalars: Mapping[str, Any], shard: Shard, *, is_part: bool = False
    ) -> None:
        """Set the optimizers' state: `settings` and `scalars` as these methods return them, and the tensors of `shard`.

        `is_part`: of other parameters they keep what their constructors have made.

        Each number goes where `Optimizer.load_state_dict` puts it: `step` is on the GPU for fused and capturable kernels only.
        """
        for name, optimizer in self.optimizers.items():
            self._add_groups(name, settings[name])
            if settings[name]["names"] != self.settings()[name]["names"]:
                raise StateError(
                    f"the groups of {name} have other parameters here than in the commit that is restored."
                )
            if not is_part:
                optimizer.state.clear()
            optimizers.set_settings(optimizer, settings[name]["groups"])
            for group in optimizer.param_groups:
                on_device = group.get("fused") or group.get("capturable")
                for parameter in group["params"]:
                    entries = {k: frozen(v) for k, v in scalars[name].get(self._names[parameter], {}).items()}
                    for key, value in entries.items():
                        if isinstance(value, torch.Tensor) and (key != "step" or on_device):
                            entries[key] = value.to(local_tensor(parameter).device)
                    if entries:
                        optimizer.state[parameter] = entries
        for tensor, local in shard.items():
            if tensor.optimizer:
                parameter = self.parameters[tensor.parameter]
                entries = self.optimizers[tensor.optimizer].state.setdefault(parameter, {})
                entries[tensor.entry] = like(parameter, local)

    def _add_groups(self, name: str, wanted: Mapping[str, Any]) -> None:
        """Add the groups that the optimizer `name` got during the training: the function makes it without them."""
        own, theirs = self.settings()[name]["names"], wanted["names"]
        if len(own) < len(theirs) and grown(own, theirs, self.parameters) == theirs:
            optimizers.regroup(self.optimizers[name], dict(wanted), self._names)

    def buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """The buffers of each model, which are whole on every rank."""
        return {
            name: {key: local_tensor(buffer) for key, buffer in buffers.items()}
            for name, buffers in self.live_buffers().items()
        }

    def live_buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """The buffers themselves."""
        return {
            name: {plain_name(key): buffer for key, buffer in module.named_buffers()}
            for name, module in self.modules.items()
        }

    def set_buffers(self, wanted: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Copy these values into the buffers. StateError if the models have others, but for caches."""
        for name, module in self.modules.items():
            for own, key, value in differing_caches(module, wanted[name], plain_name).values():
                own[key] = None if value is None else value.to(self.device, copy=True)
        for name, own in self.buffers().items():
            if own.keys() != wanted[name].keys():
                odd = min(own.keys() ^ wanted[name].keys())
                raise StateError(f"{name} has the buffer {odd} only here, or only in the commit that is restored.")
            for key, buffer in own.items():
                if buffer.shape != wanted[name][key].shape:
                    raise StateError(
                        f"the buffer {name}.{key} is {tuple(buffer.shape)} here and {tuple(wanted[name][key].shape)} "
                        "in the commit that is restored: build the same model in every call."
                    )
                buffer.copy_(wanted[name][key])


def check_same(kind: str, here: Mapping[str, Any], there: Mapping[str, Any], source: str) -> None:
    """StateError if not the same names are here and there."""
    if here.keys() != there.keys():
        odd = min(here.keys() ^ there.keys())
        where = "bound here, and not in" if odd in here else "not bound here, and is in"
        raise StateError(f"the {kind} {odd} is {where} {source}")


def bind_values(values: Mapping[str, Any], taken: Collection[str]) -> Bound:
    """Sort the values given to `ShardedState.bind`. StateError if one cannot be recovered, or its name is `taken`."""
    modules, trained_by = {}, {}
    for name, value in values.items():
        if name.startswith("_") or name in taken:
            raise StateError(f"{name!r} cannot be the name of a bound value: choose another.")
        if isinstance(value, torch.nn.Module):
            modules[name] = value
        elif isinstance(value, torch.optim.Optimizer):
            trained_by[name] = value
        elif not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise StateError(
                f"bind({name}=…) takes models, optimizers and what has a state_dict(), not {type(value).__name__}: "
                "give numbers to ShardedState() itself."
            )
        else:
            check_plain(describe({name: value.state_dict()}, []))
    if not modules:
        raise StateError("bind() needs the sharded model: bind(model=model, optimizer=optimizer).")
    optimizers.check_inner(trained_by, "bind")
    bound = Bound(modules, trained_by)
    check_plain(describe(bound.extra.live(), []))
    return bound


def agree_on_layout(bound: Bound, formation: Formation, session: Session, group: Any) -> Layout:
    """Collective: the chunks of all ranks."""
    own = msgspec.msgpack.encode(bound.own_chunks())
    tables = session.run_abortable(lambda: gather_bytes(own, group))
    by_rank = [msgspec.msgpack.decode(table, type=dict[str, OwnChunk]) for table in tables]
    hosts = [host for host, count in formation.hosts for _ in range(count)]
    return join(formation.generation, hosts, by_rank)


def whole_but_trained(bound: Bound) -> str | None:
    """A line about parameters that are trained and not sharded, so that each rank trains its own. StateError if all are so."""
    if not any(isinstance(parameter, DTensor) for parameter in bound.parameters.values()):
        raise StateError(
            f"{' and '.join(bound.modules)}: no parameter is sharded, so each rank would train a model of its own. "
            "Call fully_shard(model, mesh=nbe.device_mesh()) before the optimizer is made and before bind()."
        )
    trained = {one for optimizer in bound.optimizers.values() for one in optimizers.parameters(optimizer)}
    whole = [
        name
        for name, parameter in bound.parameters.items()
        if parameter in trained and parameter.requires_grad and not isinstance(parameter, DTensor)
    ]
    if not whole:
        return None
    return (
        f"{whole[0]}{f' and {len(whole) - 1} more are' if whole[1:] else ' is'} trained and not sharded: torch does not "
        "average such gradients over the ranks. Call fully_shard(model, mesh=mesh) on the whole model too, or average them."
    )


def _named(local: torch.Tensor, parameter: str, optimizer: str = "", entry: str = "") -> ShardTensor:
    return ShardTensor(parameter, optimizer, entry, str(local.dtype).removeprefix("torch."))
