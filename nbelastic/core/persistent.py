"""Dicts and sets that never change. Their operators return changed copies, which share with the original what is equal.

With 10,000 workers, a full copy for each event would take longer than all else. A copy with one change takes O(√n)
here: it shares the base of the original, and has its few changes beside it. More than √n changes are merged into a new
base. Keys keep the order in which they were added, so that equal events lead to equal states.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any, Final, Generic, Self, TypeVar


class _Removed(Enum):
    REMOVED = "in the base, but not in the copy"


REMOVED: Final = _Removed.REMOVED
K = TypeVar("K")
V = TypeVar("V")


class _Shared(Generic[K, V]):
    """Keys and values: a base that copies share, and the changes of this copy."""

    __slots__ = ("_base", "_changes", "_size")
    _base: dict[K, V]
    _changes: dict[K, V | _Removed]
    _size: int

    def __contains__(self, key: object) -> bool:
        if self._changes and key in self._changes:
            return self._changes[key] is not REMOVED
        return key in self._base

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        return self._keys() if self._changes else iter(self._base)

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._merged())

    def _keys(self) -> Iterator[K]:
        """The keys, without a merge: most callers need only the first few."""
        base, changes = self._base, self._changes
        yield from (key for key in base if changes.get(key) is not REMOVED)
        yield from (key for key in changes if key not in base)

    def _merged(self) -> dict[K, V]:
        """All keys and values as a dict, which is the new base of this copy."""
        if self._changes:
            self._base, self._changes = _merge(self._base, self._changes), {}
        return self._base

    def _with(self, new: Mapping[K, V]) -> Self:
        """A copy with these keys and values."""
        if len(new) ** 2 > self._size:
            merged = {**self._merged(), **new}
            return self._make(merged, {}, len(merged))
        return self._changed(new)

    def without(self, keys: Iterable[Any]) -> Self:
        """A copy without these keys, of which some may not be there."""
        if not self._size:
            return self
        return self._changed(dict.fromkeys(keys, REMOVED))

    def _changed(self, new: Mapping[K, V | _Removed]) -> Self:
        base, changes, size = self._base, dict(self._changes), self._size
        for key, value in new.items():
            old: V | _Removed | None = changes.get(key)
            was_there = old is not REMOVED if key in changes else key in base
            if value is not REMOVED and not was_there and key in base:  # it was removed, and is added at the end again
                base, changes = _merge(base, changes), {}
            if value is REMOVED and key not in base:
                changes.pop(key, None)
            else:
                changes[key] = value
            size += (value is not REMOVED) - was_there
        if len(changes) ** 2 > size:
            base, changes = _merge(base, changes), {}
        return self._make(base, changes, size)

    @classmethod
    def _make(cls, base: dict[K, V], changes: dict[K, V | _Removed], size: int) -> Self:
        copy = cls.__new__(cls)
        copy._base, copy._changes, copy._size = base, changes, size
        return copy


def _merge(base: dict[K, V], changes: dict[K, V | _Removed]) -> dict[K, V]:
    merged: dict[K, Any] = base | changes
    for key, value in changes.items():
        if value is REMOVED:
            del merged[key]
    return merged


class PersistentDict(_Shared[K, V], Mapping[K, V]):
    """A dict that never changes. `|` adds or replaces keys."""

    __slots__ = ()

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        self._base, self._changes = dict(items), {}
        self._size = len(self._base)

    def __getitem__(self, key: K) -> V:
        if self._changes and key in self._changes:
            value = self._changes[key]
            if value is REMOVED:
                raise KeyError(key)
            return value
        return self._base[key]

    def find(self, key: K) -> V | None:
        """The value of this key, or None."""
        value = self._changes[key] if self._changes and key in self._changes else self._base.get(key)
        return None if value is REMOVED else value

    def items(self) -> ItemsView[K, V]:
        return self._merged().items()

    def values(self) -> ValuesView[V]:
        return self._merged().values()

    def __or__(self, other: Mapping[K, V]) -> Self:
        return self._with(other)

    def __repr__(self) -> str:
        return repr(self._merged())


class PersistentSet(_Shared[K, None], AbstractSet[K]):
    """A set that never changes, and keeps the order in which its members were added."""

    __slots__ = ()

    def __init__(self, members: Iterable[K] = ()) -> None:
        self._base, self._changes = dict.fromkeys(members), {}
        self._size = len(self._base)

    def __or__(self, other: Iterable[Any]) -> Self:
        return self._with(other._merged() if isinstance(other, PersistentSet) else dict.fromkeys(other))

    def __sub__(self, other: Iterable[Any]) -> Self:
        """The set without these; itself, if it has none of them."""
        if not self._size:
            return self
        others = other if isinstance(other, AbstractSet) else frozenset(other)
        if len(others) > self._size:
            return type(self)(key for key in self if key not in others)
        present = [key for key in others if key in self]
        return self.without(present) if present else self

    def __and__(self, other: Iterable[Any]) -> Self:
        others = other if isinstance(other, AbstractSet) else frozenset(other)
        return type(self)(key for key in self if key in others)

    __ror__ = __or__

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"{{{', '.join(map(repr, self))}}}"


def without_key(items: Mapping[K, V], key: K) -> dict[K, V]:
    """A copy of a small dict without this key, which may not be there."""
    return {known: value for known, value in items.items() if known != key}


EMPTY: Final[PersistentSet[Any]] = PersistentSet()
NOTHING: Final[PersistentDict[Any, Any]] = PersistentDict()
