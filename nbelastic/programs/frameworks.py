"""Refuses frameworks that would train each rank alone: they read torchrun's environment variables, which are not set.

This module imports no framework. It wraps their classes when their modules are imported. It compares the world size that
an object sees with the real one: when the object is made, when a world begins, and when the program uses the object. An
object of an earlier program that this one does not use is not checked.

Outside of an elastic function there is no world, and each worker may use a framework alone, as for an inference. If it
trains there, one line says that each worker trains alone.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nbelastic.errors import UsageError

ALONE = "{what} sees a world of {seen}, but the world has {size} ranks: each rank would train alone. "
OUTSIDE = (
    "nbelastic: {what} trains outside of an elastic function, so each of the {workers} workers trains alone. {instead}"
)
TRAINING = ("backward", "fit")  # methods of WATCHED that train
PLAIN = "Write the loop in plain PyTorch with DistributedDataParallel: {name} is not supported inside an elastic function yet."


def _processes(accelerator: Any) -> int:
    return int(accelerator.num_processes)


def _world(trainer: Any) -> int:
    return int(trainer.world_size)


_ACCELERATE, _LIGHTNING, _FABRIC = (
    "Accelerate (which the Hugging Face Trainer uses too)",
    "Lightning",
    "Lightning Fabric",
)
INTEGRATIONS = {  # what to write instead; for the others `PLAIN`
    _ACCELERATE: "Write `from nbelastic.integrations.accelerate import Accelerator` and make it in the elastic function; "
    "for a Hugging Face Trainer `from nbelastic.integrations.transformers import train` and `train(trainer)`.",
    _LIGHTNING: "Write `from nbelastic.integrations.lightning import fit` and, outside of an elastic function, "
    "`fit(trainer, module, loader)` in place of trainer.fit.",
    _FABRIC: "Write `from nbelastic.integrations.lightning import Fabric` and make `Fabric()` in the elastic function.",
}
# By module: its class, the framework's name, the world size that an instance sees, and the methods that train.
_Watched = tuple[str, str, Callable[[Any], int], tuple[str, ...]]
WATCHED: dict[str, _Watched] = {
    "accelerate.accelerator": ("Accelerator", _ACCELERATE, _processes, ("prepare", "backward")),
    "lightning.pytorch.trainer.trainer": ("Trainer", _LIGHTNING, _world, ("fit",)),
    "pytorch_lightning.trainer.trainer": ("Trainer", _LIGHTNING, _world, ("fit",)),
    "lightning.fabric.fabric": ("Fabric", _FABRIC, _world, ("setup", "backward")),
    "lightning_fabric.fabric": ("Fabric", _FABRIC, _world, ("setup", "backward")),
}


class Watch(importlib.abc.MetaPathFinder):
    """Wraps the classes of WATCHED, now or when their modules are imported. `size()`: the world size, 0 outside a world."""

    def __init__(self, size: Callable[[], int]) -> None:
        self._size = size
        self._made_outside: weakref.WeakSet[Any] = weakref.WeakSet()  # by this program, before it was in a world
        self._elastic: weakref.WeakSet[Any] = weakref.WeakSet()  # an integration trains them in this program's worlds
        self._workers = 0  # that run this program
        self._warned = False  # of this program

    def begin(self, workers: int = 0) -> None:
        """A new program begins on so many workers: objects of an earlier one count only when this one uses them."""
        self._made_outside.clear()
        self._elastic.clear()
        self._workers, self._warned = workers, False

    def end(self) -> None:
        """The program has ended. A cell may train on each worker."""
        self._workers = 0

    def forget(self, made: Any) -> None:
        """An integration makes this object anew in each world, or gives it the world in which it trains."""
        self._made_outside.discard(made)
        self._elastic.add(made)

    def check(self) -> None:
        """UsageError if an object that was made before this world sees another world size."""
        for made in self._made_outside:
            _compare(made, self._size())

    def start(self) -> None:
        """Watch imports until the process ends."""
        sys.meta_path.insert(0, self)
        for name in WATCHED:
            if name in sys.modules:
                self._wrap(sys.modules[name])

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of the other finders, with a loader that wraps the class after the import."""
        if name not in WATCHED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _wrap(self, module: ModuleType) -> None:
        kind = getattr(module, WATCHED[module.__name__][0], None)
        if kind is None:
            return
        make = kind.__init__

        @functools.wraps(make)
        def checked(made: Any, *args: Any, **kwargs: Any) -> None:
            make(made, *args, **kwargs)
            if self._size():
                _compare(made, self._size())
            else:
                self._made_outside.add(made)

        kind.__init__ = checked
        for name in WATCHED[module.__name__][3]:
            if hasattr(kind, name):
                setattr(kind, name, self._checked_first(getattr(kind, name), trains=name in TRAINING))

    def _checked_first(self, method: Callable[..., Any], *, trains: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def checked(made: Any, *args: Any, **kwargs: Any) -> Any:
            _compare(made, self._size())
            is_alone = self._workers > 1 and not self._size() and made not in self._elastic
            if trains and is_alone and not self._warned:
                self._warn(made)
            return method(made, *args, **kwargs)

        return checked

    def _warn(self, made: Any) -> None:
        for _, title, seen in _views(made):
            if seen == 1:
                self._warned = True
                instead = INTEGRATIONS.get(title, PLAIN).format(name=title)
                text = OUTSIDE.format(what=title, workers=self._workers, instead=instead)
                print(f"\n{text}" if _is_bar_shown() else text, file=sys.stderr)


def _is_bar_shown() -> bool:
    """Whether a progress bar leaves its line unfinished."""
    tqdm = sys.modules.get("tqdm")
    return bool(getattr(getattr(tqdm, "tqdm", None), "_instances", None))


def _compare(made: Any, size: int) -> None:
    for name, title, seen in _views(made) if size > 1 else ():
        if seen != size:
            text = ALONE + INTEGRATIONS.get(title, PLAIN)
            raise UsageError(text.format(what=f"{name}()", seen=seen, size=size, name=title))


def _views(made: Any) -> Iterator[tuple[str, str, int]]:
    """Of each watched class of this object: its name, the framework's, and the world size that it sees."""
    for base in type(made).__mro__:
        name, title, seen_by, _ = WATCHED.get(base.__module__, ("", "", len, ()))
        if base.__name__ == name:
            yield name, title, seen_by(made)
