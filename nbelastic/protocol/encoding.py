"""Structs as JSON."""

from __future__ import annotations

import json

import msgspec

_encoder = msgspec.json.Encoder()


def encode(message: object) -> bytes:
    """As JSON. Text that is no Unicode (a lone surrogate of a strange file name) must not keep a message from going out."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace")
