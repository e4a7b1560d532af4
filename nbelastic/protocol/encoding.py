"""Structs as JSON."""

from __future__ import annotations

import json

import msgspec

_encoder = msgspec.json.Encoder()


def encode(message: object) -> bytes:
    """Encode a message as JSON. Text that is not Unicode (a lone surrogate in a file name) must not stop it: replace it."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace")
