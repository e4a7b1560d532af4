"""What the system shows of a process that was forked in the place of another one: its command line and its environment."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOM = 1 << 15  # bytes
ARGUMENT = " " * ROOM  # the last one of a process that forks
VARIABLE = {"TESTS_ROOM": ARGUMENT}  # in its environment
PR_SET_MM, PR_SET_MM_MAP = 35, 14
MAP = struct.Struct("=12QIi")  # prctl_mm_map of the system
_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_size_t
_room: tuple[int, int, int, int] | None = (
    None  # addresses: of the command line as this process's ancestor got it, and so on
)


def show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have /proc show these of this process. They overwrite the command line and the environment with which it was started."""
    global _room
    fields = [int(field) for field in Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[1:]]
    start_code, end_code, start_stack = fields[22:25]
    start_data, end_data, start_brk, *now = fields[41:48][:7]
    _room = _room or (now[0], now[1], now[2], now[3])
    arguments, its_end, variables, last = _room
    end = _write(arguments, its_end, command)
    env_end = _write(variables, last, [f"{name}={value}" for name, value in environment.items()])
    layout = (start_code, end_code, start_data, end_data, start_brk, _libc.sbrk(0), start_stack)
    data = MAP.pack(*layout, arguments, end, variables, env_end, 0, 0, -1)
    if _libc.prctl(PR_SET_MM, PR_SET_MM_MAP, data, ctypes.c_ulong(len(data)), ctypes.c_ulong(0)):
        raise OSError("the system does not let a process say where its command line ends")


def _write(start: int, end: int, texts: Sequence[str]) -> int:
    """Write the texts into this memory; the address behind them."""
    data = b"".join(os.fsencode(text) + b"\0" for text in texts)
    if len(data) > end - start:
        raise ValueError(f"{len(data)} bytes of {texts[:3]}… do not fit into {end - start}: raise ROOM")
    ctypes.memmove(start, data, len(data))
    return start + len(data)
