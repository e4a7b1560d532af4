"""What a commit records beside the large tensors: small values, buffers, options, which parameters are trained, and so on."""

from __future__ import annotations

from operator import attrgetter

from torch.optim import Optimizer

from nbelastic.state import optimizers, rng
from nbelastic.state.checks import frozen_value
from nbelastic.state.contents import Contents
from nbelastic.state.grad_scaler import RecordedScaler, is_grad_scaler

_requires_grad = attrgetter("requires_grad")


class CommitRecord:
    """The contents as they are now. `with_entries`: with the optimizers' state per parameter, for `restore_entries`."""

    def __init__(self, contents: Contents, *, with_entries: bool) -> None:
        self._contents = contents
        self._buffers = [(own, dict(own.items())) for own in contents.buffers_of_layers if own]
        scalers = {name for name, value in contents.values.items() if is_grad_scaler(value)}
        self._small = {name: frozen_value(name, value) for name, value in contents.small(without=scalers).items()}
        self._objects = {name: one for name, one in contents.values.items() if hasattr(one, "load_state_dict")}
        self._extra = contents.extra.copy()
        self._scalers = [RecordedScaler(contents.values[name]) for name in scalers]
        self._groups = [optimizers.groups(optimizer) for optimizer in contents.optimizers()]
        self._entries: list[tuple[Optimizer, optimizers.Entries]] = []
        if with_entries:
            for optimizer in contents.optimizers():
                self.keep_entries(optimizer)
        self._parameters = contents.names
        self._requires_grad = [*map(_requires_grad, contents.names)]
        self._random = rng.get_states()

    def keep_entries(self, optimizer: Optimizer) -> None:
        """Record its state per parameter, unless that is done: it is to change."""
        if all(optimizer is not known for known, _ in self._entries):
            self._entries.append((optimizer, optimizers.entries(optimizer)))

    def restore_entries(self) -> None:
        for optimizer, entries in self._entries:
            optimizers.set_entries(optimizer, entries)

    def restore_small(self) -> None:
        """Small values, what layers keep beside parameters, and the buffers that models had; not the contents of those."""
        values = self._contents.values
        for name in self._small.keys() | self._objects.keys():
            if name in self._objects:  # the program may have replaced a scheduler
                values[name] = self._objects[name]
            elif hasattr(values[name], "load_state_dict"):
                values[name] = None
        self._contents.set_small(self._small)
        self._contents.extra.set(self._extra)
        for scaler in self._scalers:
            scaler.restore()
        for own, then in self._buffers:
            for key in [key for key in own if key not in then]:
                del own[key]
            for key, tensor in then.items():
                own[key] = tensor

    def restore_settings(self) -> None:
        """Options of optimizers, which parameters are trained, and random generators."""
        for parameter, requires_grad in zip(self._parameters, self._requires_grad, strict=True):
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        for optimizer, groups in zip(self._contents.optimizers(), self._groups, strict=True):
            optimizers.set_groups(optimizer, groups)
        rng.set_states(self._random)
