"""Loaded into the workers' template: which environment variables are added when there are several threads."""

import os
import sys
import threading

added: list[str] = []


def _hear(event: str, args: tuple[object, ...]) -> None:
    if event == "os.putenv" and threading.active_count() > 1:
        name = os.fsdecode(args[0])  # type: ignore[arg-type]
        if name not in os.environ:
            added.append(name)


sys.addaudithook(_hear)
