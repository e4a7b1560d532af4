"""Processes of this machine: their state, children, groups, output, random numbers, and the death of their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PF_EXITING = 4  # in the flags of `/proc/<pid>/stat`
OUTPUT = 4096  # bytes of a process's output that are read


def state_of(pid: int) -> str:
    """The state letter of `/proc/<pid>/stat` (R, S, D, T, t, Z, …); X if there is no such process."""
    return stat_of(pid)[0]


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or a debugger has stopped the process."""
    return state_of(pid) in "Tt"


def stat_of(pid: int) -> list[str]:
    """The fields of `/proc/<pid>/stat` after the name, the state letter first; ["X"] if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X"]


def is_ending(pid: int) -> bool:
    """Whether the process ends or has ended: it does so before it closes its files."""
    state, *fields = stat_of(pid)
    return state in "XZ" or bool(int(fields[5]) & _PF_EXITING)


def children_of(*parents: int) -> list[int]:
    """The pids of the child processes of `parents`, zombies included."""
    pids, wanted = map(int, filter(str.isdecimal, os.listdir("/proc"))), [[str(pid)] for pid in parents]
    return [child for child in pids if stat_of(child)[1:2] in wanted]


def die_with_parent(sig: int = signal.SIGKILL, parent: int = 0) -> None:
    """Let Linux send this signal to this process when the thread that has started it ends.

    `parent`: the pid of the starting process. If it has ended already, this process exits.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sig)
    if parent and os.getppid() != parent:
        os._exit(1)


def reseed() -> None:
    """Give a fork random numbers of its own: it has NumPy's generator from its parent. Python's own seeds itself after a fork."""
    generator = sys.modules.get("numpy.random")
    if generator is not None:
        generator.seed()


def kill_group(pid: int, sig: int = signal.SIGKILL) -> bool:
    """Signal the process group that `pid` leads. 0, the pid of an unknown process, signals none.

    Returns whether that was possible: the group may have ended, and a fork that has just begun leads none yet.
    """
    if pid > 0:  # 0 means this process's own group
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, sig)
            return True
    return False


def kill_with_children(pid: int) -> None:
    """Kill the process group that `pid` leads, and those that its children lead: nothing else would end them."""
    for each in (pid, *children_of(pid)):
        kill_group(each)


def disown(child: subprocess.Popen[bytes]) -> None:
    """Let a child outlive this process. A thread waits for it, so that it is not a zombie if it ends earlier."""
    with suppress(RuntimeError):  # at this process's end no thread can be started; then init waits for the child
        threading.Thread(target=child.wait, name="nbelastic-disown", daemon=True).start()


def exit_code_of(end: SystemExit) -> int:
    """The exit code as the interpreter determines it: another code than an int is printed, and 1 is returned."""
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0) & 0xFF  # the rest is lost in a process's end: a parent reads 255 for -1
    print(end.code, file=sys.stderr)
    return 1


def last_output(log: Path, begin: int = 0) -> str:
    """The last `OUTPUT` bytes of a file after its first `begin` bytes; empty if the file is missing.

    A file that is shorter has begun anew.
    """
    with suppress(OSError), open(log, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(begin if begin <= size else 0, size - OUTPUT))
        return file.read().decode(errors="replace")
    return ""


def last_line(log: Path, begin: int = 0) -> str:
    """The last line of a file with output after its first `begin` bytes; empty if there is none."""
    return (last_output(log, begin).strip().splitlines() or [""])[-1]


def machine() -> str:
    """The machine's name and the PID namespace: this process knows which of the processes there are alive."""
    return f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"


def pid_namespace() -> str:
    """The machine's boot and the PID namespace. For two processes with the same text a pid means the same process."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
