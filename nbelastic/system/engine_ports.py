"""The ports in ipyparallel's connection information."""

from __future__ import annotations

import json


def engine_ports(connection: str) -> list[int]:
    """The ports to which an engine connects. `connection`: ipyparallel's connection information, as JSON."""
    values = [value for value in json.loads(connection).values() if isinstance(value, int | list)]
    return [port for value in values for port in (value if isinstance(value, list) else [value])]
