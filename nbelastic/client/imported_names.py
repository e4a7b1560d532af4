"""Names of the modules that a text, a file or a function imports, without running it."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

MOST_OBJECTS = 10_000  # that are searched for imports
FEW = 100  # values of a list or dict that is searched: a long one is data
# Text in a string can look like an import. Then a module of the user's own may be sent that no code needs.
_IMPORT = re.compile(
    r"(?:^|[;:])[^\S\n]*(?:from[^\S\n]+([\w.]+)[^\S\n]+import\b|import[^\S\n]+([^;:#\n]+))", re.MULTILINE
)
_CONTINUED = re.compile(r"\\\r?\n")


def names_in_text(text: str) -> set[str]:
    """The first parts of the names of modules that this Python code, or cell, may import."""
    found = set[str]()
    for single, several in _IMPORT.findall(_CONTINUED.sub(" ", text)):
        for name in [single] if single else several.split(","):
            first = name.strip().partition(" ")[0].partition(".")[0]
            if first.isidentifier():
                found.add(first)
    return found


def names_in_function(function: Any) -> set[str]:
    """The same of a function of a notebook, and of the notebook's functions and classes that it uses."""
    found = set[str]()
    for code in _codes(function):
        imports = (each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME")
        found.update(str(name).partition(".")[0] for name in imports)
    return found


def _codes(function: Any) -> Iterator[CodeType]:
    pending, seen = [function], set[int]()
    while pending and len(seen) < MOST_OBJECTS:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        match one:
            case partial():
                pending += [one.func, *one.args, *one.keywords.values()]
            case MethodType():
                pending += [one.__func__, one.__self__]
            case CodeType():
                yield one
                pending += [each for each in one.co_consts if isinstance(each, CodeType)]
            case FunctionType() if one.__module__ == "__main__":
                pending += [one.__code__, *(one.__globals__.get(name) for name in _names(one.__code__))]
                pending += _contents(one)
                pending.append(getattr(one, "__wrapped__", None))
            case type() if one.__module__ == "__main__":
                pending += [*vars(one).values(), *one.__bases__]
            case staticmethod() | classmethod():
                pending.append(one.__func__)
            case property():
                pending += [one.fget, one.fset]
            case _ if type(one).__module__ == "__main__":
                pending.append(type(one))
            case _ if type(one) in (tuple, list) and len(one) <= FEW:  # also the arguments of a call
                pending += one
            case _ if type(one) is dict and len(one) <= FEW:
                pending += one.values()


def _names(code: CodeType) -> set[str]:
    """The global names that a function and those inside it use."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _contents(function: FunctionType) -> list[Any]:
    """The values of the variables of outer functions that this one uses."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it has no value yet
            continue
    return found
