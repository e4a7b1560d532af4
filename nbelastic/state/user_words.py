"""What the user has written, for a state that an integration has made: messages name that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

_INDEX = re.compile(r"\[\d+\]|\{[^{}]*\}")  # of a parameter group; Lightning adds a callback's arguments to its name


class UserWords(NamedTuple):
    """`names`: by the beginning of a name, what is shown instead; None: the name is not shown. `save`: how to save a sharded state."""

    names: Mapping[str, str | None] = MappingProxyType({})
    save: str = "save it with state.save(FOLDER) or checkpoint=FOLDER, and read it with torch.distributed.checkpoint"


def in_users_words(names: Iterable[str], words: UserWords) -> list[str]:
    """The names as the user knows them, each once. Private parts, such as a scheduler's `_last_lr`, are left out.

    Of several beginnings that fit, the longest counts.
    """
    shown = (_in_words(name, words) for name in names if not name.rpartition(".")[2].startswith("_"))
    return list(dict.fromkeys(name for name in shown if name))


def _in_words(name: str, words: UserWords) -> str | None:
    plain = _INDEX.sub("", name)
    found = max((start for start in words.names if plain.startswith(start)), key=len, default=None)
    if found is None:
        return name
    word = words.names[found]
    return None if word is None else word + plain.removeprefix(found)
