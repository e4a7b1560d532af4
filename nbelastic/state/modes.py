"""Whether layers are in train or eval mode. No commit records that: each call of the function begins with the same modes."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch


class Modes:
    """The modes that layers had when they were noted first: at the program's beginning, or when they were added."""

    def __init__(self) -> None:
        self.are_kept = True  # else a framework sets them
        self._modes: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()

    def note(self, models: Iterable[torch.nn.Module]) -> None:
        """Note the layers of these models that are not known yet."""
        for model in models:
            for layer in model.modules():
                if hasattr(layer, "training"):  # a module that TorchScript has frozen has no mode
                    self._modes.setdefault(layer, layer.training)

    def restore(self) -> None:
        """Set the modes again, layer by layer."""
        for layer, mode in self._modes.items() if self.are_kept else ():
            if layer.training != mode:
                layer.training = mode
