"""A module to preload: it records the environment variables that a process adds while it has several threads."""

import os
import sys
import threading

added: list[str] = []


def _record(event: str, args: tuple[object, ...]) -> None:
    if event == "os.putenv" and threading.active_count() > 1:
        name = os.fsdecode(args[0])  # type: ignore[arg-type]
        if name not in os.environ:
            added.append(name)


sys.addaudithook(_record)
