"""Writes the types of the messages between Python and the widget to src/contract.d.ts, from nbelastic's own types."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from nbelastic.notebook import dashboard_contract, dashboard_frames

OUTPUT = Path(__file__).parent / "src" / "contract.d.ts"
MODULES = (dashboard_frames, dashboard_contract)
NAMES = {module.__name__ for module in MODULES}
HEAD = "// Written by widgets/write_contract.py from dashboard_frames.py and dashboard_contract.py. Edit those files.\n"
PLAIN = {str: "string", int: "number", float: "number", bool: "boolean", NoneType: "null", Any: "unknown"}


def typescript() -> str:
    """Return the whole file: each class of the contract, and each union of them, under its own name."""
    members = [(name, value) for module in MODULES for name, value in vars(module).items() if not name.startswith("_")]
    classes = [value for _, value in members if isinstance(value, type) and value.__module__ in NAMES]
    classes = list(dict.fromkeys(classes))  # one module imports from the other
    unions = [(name, value) for name, value in members if isinstance(value, UnionType)]
    texts = [_declaration(each) for each in classes]
    texts += [
        f"export type {name} = {' | '.join(_type(each) for each in get_args(union))};\n" for name, union in unions
    ]
    return HEAD + "\n" + "\n".join(texts)


def _declaration(cls: type) -> str:
    hints = get_type_hints(cls)
    if issubclass(cls, tuple):
        fields = ", ".join(f"{name}: {_type(hint)}" for name, hint in hints.items())
        return f"{_comment(cls)}export type {cls.__name__} = [{fields}];\n"
    bases = [base for base in cls.__bases__ if base.__module__ in NAMES]
    inherited = {name for base in bases for name in get_type_hints(base)}
    required = _required(cls)
    fields = {
        name if name in required else f"{name}?": _type(hint) for name, hint in hints.items() if name not in inherited
    }
    if issubclass(cls, msgspec.Struct) and bases:
        config = cls.__struct_config__
        fields = {config.tag_field: f'"{config.tag}"', **fields}
    if not bases and not fields:
        return f"{_comment(cls)}export type {cls.__name__} = Record<string, never>;\n"
    head = f"export interface {cls.__name__} {''.join(f'extends {base.__name__} ' for base in bases)}"
    body = "".join(f"\n  {name}: {text};" for name, text in fields.items())
    return f"{_comment(cls)}{head}{{{body}{chr(10) if body else ''}}}\n"


def _comment(cls: type) -> str:
    lines = inspect.getdoc(cls).split("\n")
    if len(lines) == 1:
        return f"/** {lines[0]} */\n"
    return "/**\n" + "".join(f" * {line}".rstrip() + "\n" for line in lines) + " */\n"


def _required(cls: type) -> frozenset[str]:
    if is_typeddict(cls):
        return cls.__required_keys__
    return frozenset(field.name for field in msgspec.structs.fields(cls) if field.required)


def _type(hint: Any) -> str:
    if hint in PLAIN:
        return PLAIN[hint]
    arguments = get_args(hint)
    match get_origin(hint):
        case None:
            return hint.__name__
        case origin if origin is list:
            (item,) = (_type(each) for each in arguments)
            return f"({item})[]" if " | " in item else f"{item}[]"
        case origin if origin is dict:
            return f"Record<{_type(arguments[0])}, {_type(arguments[1])}>"
        case _:
            return " | ".join(_type(each) for each in arguments)


if __name__ == "__main__":
    OUTPUT.write_text(typescript())
