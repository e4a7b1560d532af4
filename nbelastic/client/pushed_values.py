"""Pushes values of a notebook into the namespaces of all workers, and reads training states that come back."""

from __future__ import annotations

import contextlib
import keyword
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbelastic.client.driver_link import DriverLink
from nbelastic.client.pickled_calls import pickle_values
from nbelastic.errors import NbelasticError, UsageError
from nbelastic.protocol import messages, requests
from nbelastic.protocol.requests import CellOutput
from nbelastic.system import pickling
from nbelastic.system.private_files import replace_private


def push(link: DriverLink, values: Mapping[str, Any]) -> None:
    """Set these values on all workers. UsageError: a job runs, a value cannot be pickled, or no worker could take them."""
    _check_names(values)
    requests.refuse_push(link.running().present_job)  # before the pickling, which may be slow; the driver checks again
    packed = pickle_values(values)
    link.send_code()  # for the classes of the values
    path = link.run_folder.path / f"{secrets.token_hex(8)}.pushed"
    try:
        replace_private(path, packed)
    except OSError as error:
        size = f"{pickling.size(packed) / 1e6:,.1f} MB"
        raise UsageError(
            f"{size} cannot be saved in {path.parent} ({error.strerror}): free some space there."
        ) from None
    pushed = messages.Pushed(tuple(values), messages.Blob(pickling.size(packed), path=str(path)))
    try:
        outputs: list[CellOutput] = link.ask(requests.Push(pushed), None, "the workers to take the values")
    finally:
        path.unlink(missing_ok=True)  # if the driver has not taken it
    errors = [f"{worker}: {error.strip()}" for worker, _, _, error in outputs if error]
    if errors:
        on = "no worker" if len(errors) == len(outputs) else f"{len(errors)} of {len(outputs)} workers did not"
        verb = " could take the values" if len(errors) == len(outputs) else " take the values"
        raise UsageError(f"{on}{verb}: {errors[0]}")


def _check_names(values: Mapping[str, Any]) -> None:
    if not values:
        raise UsageError("name the values to push: cluster.push(data=data).")
    for name in values:
        if not (isinstance(name, str) and name.isidentifier()) or keyword.iskeyword(name):
            raise UsageError(f"{name!r} is not a valid variable name.")


def read_state(blob: messages.Blob) -> Any:
    """Unpickle a training state, and remove its file. NbelasticError in words if that fails."""
    path = Path(blob.path)
    try:
        data = pickling.mapped(path) if blob.path else bytearray(blob.data)  # writable, as tensors in it must be
    except (OSError, ValueError) as error:
        raise NbelasticError(f"the training state cannot be read: {error}") from None
    finally:
        if blob.path:
            with contextlib.suppress(OSError):
                path.unlink()
                path.parent.rmdir()
    try:
        return pickling.unpack(data)
    except Exception as error:
        raise NbelasticError(f"the training state cannot be read here: {type(error).__name__}: {error}") from error
