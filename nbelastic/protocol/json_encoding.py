"""Messages and saved structs as JSON."""

from __future__ import annotations

import json

import msgspec

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError)  # of msgspec; the second for a text that is not UTF-8

_encoder = msgspec.json.Encoder()


def encode(message: object) -> bytes:
    """Encode as JSON. Replace text that is not Unicode, such as a lone surrogate in a file name, so that it raises no error."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace")
