"""Messages and saved structs as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

# Of msgspec: UnicodeDecodeError for a text that is not UTF-8, RecursionError for one that is nested too deeply.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.json.Encoder()


def encode(message: object) -> bytes:
    """Encode as JSON. Replace text that is not Unicode, such as a lone surrogate in a file name, so that it raises no error."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace")


def encode_lines(messages: Sequence[object]) -> bytes:
    """Encode each of them as `encode` does, in a line of its own."""
    try:
        return _encoder.encode_lines(messages)
    except UnicodeEncodeError:
        return b"".join(encode(message) + b"\n" for message in messages)
