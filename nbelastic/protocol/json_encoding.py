"""Messages and saved structs as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

# Of msgspec: UnicodeDecodeError for a text that is not UTF-8, RecursionError for one that is nested too deeply.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.json.Encoder()
_LONG_NUMBER = re.compile(rb"\d{19}")  # an integer with so many digits may need more than 64 bits


def encode(message: object) -> bytes:
    """Encode as JSON. Replace text that is not Unicode, such as a lone surrogate in a file name, so that it raises no error."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace")


def decode(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    """Decode a message of a host. DECODE_ERRORS, also for an integer beyond 64 bits: clients could not read the status then."""
    message = decoder.decode(data)
    if _LONG_NUMBER.search(data):
        try:
            msgspec.msgpack.encode(message)
        except OverflowError as error:
            raise msgspec.ValidationError(str(error)) from None
    return message


def encode_lines(messages: Sequence[object]) -> bytes:
    """Encode each of them as `encode` does, in a line of its own."""
    try:
        return _encoder.encode_lines(messages)
    except UnicodeEncodeError:
        return b"".join(encode(message) + b"\n" for message in messages)
