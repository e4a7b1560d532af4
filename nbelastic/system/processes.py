"""What the kernel tells of processes: their state, their parent's death, their group."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
OUTPUT = 4096  # bytes of a process's output that are looked at


def state_of(pid: int) -> str:
    """The state letter of `/proc/<pid>/stat` (R, S, D, T, t, Z, …); X if there is no such process."""
    return stat_of(pid)[0]


def stopped(pid: int) -> bool:
    """By SIGSTOP or a debugger."""
    return state_of(pid) in "Tt"


def stat_of(pid: int) -> list[str]:
    """What `/proc/<pid>/stat` has behind the name, the state letter first; ["X"] if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X"]


def children_of(pid: int) -> list[int]:
    """The processes that `pid` has started and that have not been waited for."""
    every = map(int, filter(str.isdecimal, os.listdir("/proc")))
    return [one for one in every if stat_of(one)[1:2] == [str(pid)]]


def die_with_parent(sig: int = signal.SIGKILL, parent: int = 0) -> None:
    """Ask the kernel for this signal when the thread that started this process ends (Linux).

    `parent`: its process. If that has ended before, the kernel says nothing, and this process ends here.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sig)
    if parent and os.getppid() != parent:
        os._exit(1)


def kill_group(pid: int, sig: int = signal.SIGKILL) -> None:
    """Signal the process group that `pid` leads; none is left: nothing to do."""
    try:
        os.killpg(pid, sig)
    except (ProcessLookupError, PermissionError):
        return


def leave(child: subprocess.Popen[bytes]) -> None:
    """It may outlive this process, and is another one's from now on; if it ends before, it is not to stay as a zombie."""
    with suppress(RuntimeError):  # this process ends, and no thread can be started any more: init waits for the child
        threading.Thread(target=child.wait, name="nbelastic-leave", daemon=True).start()


def tail(log: Path, begin: int = 0) -> str:
    """The end of what has been written after the first `begin` bytes; nothing if the file is not there (any more)."""
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(begin, os.fstat(file.fileno()).st_size - OUTPUT))
        return file.read().decode(errors="replace")
    return ""


def process_table() -> str:
    """Which machine and PID namespace this process sees: with the same text a pid means the same process."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
