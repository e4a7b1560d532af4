"""A job's function and its arguments, pickled once: in the caller's thread, for every worker and every later driver."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nbelastic.core.errors import UsageError
from nbelastic.driver.run import Checkpoints


class Call(NamedTuple):
    """`parts`: what `ipyparallel.serialize.pack_apply_message` made of the function and its arguments."""

    parts: Sequence[bytes]
    checkpoints: Checkpoints

    def write(self, path: Path) -> None:
        """Write the call into a new file of mode 0600. OSError if the disk is full, say."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.msgpack.encode(self))


def pickled(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], checkpoints: Checkpoints
) -> Call:
    """Pickle the call. UsageError if the function or an argument cannot be pickled."""
    from ipyparallel.serialize import pack_apply_message

    try:
        parts = [bytes(part) for part in pack_apply_message(function, args, kwargs)]
    except Exception as error:  # noqa: BLE001  (pickling fails in many ways)
        name = repr(getattr(function, "__name__", function))
        raise UsageError(f"{name} cannot be sent to the workers: {type(error).__name__}: {error}") from None
    return Call(parts, checkpoints)


def read(path: Path) -> Call:
    """Read what `write` wrote. OSError, or msgspec.DecodeError for a damaged file. Nothing is unpickled."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Call)
