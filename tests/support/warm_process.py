"""A warm process has imported what its forks need: importing torch takes each agent 2.5 s of processor time.

    pytest ─┬─ warm process          imports what nbelastic's template and agents import, then waits for requests
            ├───── agent ── template     both are forks of the warm process; from then on they run nbelastic's own code
            ├─ another one           imports what a driver imports, and not torch
            └───── driver                a fork of that

A process that pytest starts is its child, as it would be without the warm process. An agent that sshd or a driver starts is
a child of the warm process instead: the process that they have started waits for it and ends as it ends.
Whatever an agent needs beyond its first template (another template after the first one died) starts the usual way.

A fork has the modules that the warm process has imported. If its environment differs in a variable that nbelastic's modules
have read as they were imported, it imports them again.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import selectors
import signal
import socket
import stat
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import connection as mp_connection
from multiprocessing import forkserver, resource_tracker, util
from typing import Any, NoReturn

from tests.support.shown_process import show
from tests.support.waiting import until
from tests.support.warm_request import LENGTH, NAMESPACES, REFUSED, decisive

AGENTS = (
    "nbelastic.agent.start",
    "nbelastic.agent.agent",
    "nbelastic.programs.template",  # it prepares this process as it does a template
)
DRIVERS = (
    "nbelastic.driver.process",
    "nbelastic.driver.driver",
    "nbelastic.driver.metrics_server",
    "nbelastic.driver.snapshot_writer",
)
TEMPLATE = "nbelastic.programs.template"
CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, 0)  # the number of the system call
CLONE_PARENT = 0x8000
LOW = 99  # no library of this process, or of its forks, has a descriptor up to this number
start_program, usual_address = util.spawnv_passfds, mp_connection.arbitrary_address


def serve(listener: int, modules: Sequence[str]) -> None:
    """Be a warm process with these modules: fork for each connection to this socket, until the standard input ends."""
    Server(socket.socket(fileno=listener), modules).run()


class Server:
    """What a warm process is made of: it has one thread, so that its forks are whole."""

    def __init__(self, listener: socket.socket, modules: Sequence[str]) -> None:
        self._environment = decisive(dict(os.environ))
        with variables_read() as read, low_descriptors_taken():
            for name in modules:
                importlib.import_module(name)
            self._libraries = {fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > LOW and is_pipe(fd)}
        self._path = sys.path[1:]  # the first folder is that of these modules
        self._read = {name: os.environ.get(name) for name in read}
        sys.modules.pop(TEMPLATE, None)  # each template imports it, for what it does then
        sys.modules.pop("pynvml", None)  # torch has imported it; tests may give agents another one
        count = lambda: len(os.listdir("/proc/self/task"))
        # Linux lists a thread for a moment after it was joined.
        until(
            lambda: count() == 1,
            5,
            lambda: f"the imports have left {count()} threads: forks of such a process may hang",
        )
        gc.freeze()  # collections in the forks do not copy what they share
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[int, tuple[int, socket.socket]] = {}  # pid -> its pidfd, and the process that waits for it

    def run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, sys.exit)
        os.write(1, b"ready\n")
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        with self._listener.accept()[0] as connection:
            header, fds, _, _ = socket.recv_fds(connection, LENGTH.size, 32)
            text = connection.recv(LENGTH.unpack(header)[0], socket.MSG_WAITALL) if header else b""
            if not text.endswith(b"}"):  # its process was killed before it had sent the request
                for fd in fds:
                    os.close(fd)
                return
            request = json.loads(text)
            if decisive(request["environment"]) == self._environment:
                leads, says = os.pipe()
                with low_descriptors_taken():
                    pid = os.fork() if request["waits"] else fork_for_parent()
                if pid == 0:
                    connection.close()
                    if request["session"]:
                        os.setsid()
                    os.close(says)
                    os.close(leads)
                    self._become(request, dict(zip(request["fds"], fds, strict=True)))
                os.close(says)
                os.read(leads, 1)  # until it leads a group of its own, which is what is killed with it
                os.close(leads)
                if request["waits"]:
                    self._watch(pid, connection.dup())
                else:
                    connection.sendall(LENGTH.pack(pid))
            else:
                connection.sendall(LENGTH.pack(REFUSED))
        for fd in fds:
            os.close(fd)

    def _watch(self, pid: int, waiting: socket.socket) -> None:
        """Tell the waiting process how the agent ends, and send the agent its signals. If it ends first, kill the agent."""
        pidfd = os.pidfd_open(pid)
        self._waiting[pid] = pidfd, waiting

        def agent_ended() -> None:
            if pid not in self._waiting:  # both have ended, and select() has reported both at once
                return
            _, status = os.waitpid(pid, 0)
            for one in self._waiting.pop(pid):
                self._selector.unregister(one)
            os.close(pidfd)
            with contextlib.suppress(OSError), waiting:
                waiting.sendall(LENGTH.pack(os.waitstatus_to_exitcode(status)))

        def waiting_calls() -> None:
            if pid not in self._waiting:
                return
            try:
                passed_on = waiting.recv(1)
            except ConnectionResetError:
                passed_on = b""
            os.kill(pid, passed_on[0] if passed_on else signal.SIGKILL)
            if not passed_on:
                agent_ended()

        self._selector.register(pidfd, selectors.EVENT_READ, agent_ended)
        self._selector.register(waiting, selectors.EVENT_READ, waiting_calls)

    def _become(self, request: dict[str, Any], fds: dict[int, int]) -> NoReturn:
        """Be the process that is asked for. `fds`: each of its descriptors, and the namespaces by negative numbers."""
        self._selector.close()
        self._listener.close()
        for pidfd, waiting in self._waiting.values():
            os.close(pidfd)
            waiting.close()
        for sig, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            signal.signal(sig, handler)
        libc = ctypes.CDLL(None, use_errno=True)
        for place, name in enumerate(NAMESPACES, 1):
            fd = fds.pop(-place, None)
            here = fd is None or os.path.samestat(os.fstat(fd), os.stat(f"/proc/self/ns/{name}"))
            if not here and libc.setns(fd, 0):
                raise OSError(ctypes.get_errno(), "setns")
        free = max(*fds, *fds.values()) + 1
        high = {wanted: fcntl.fcntl(fd, fcntl.F_DUPFD, free) for wanted, fd in fds.items()}
        for wanted, fd in high.items():
            os.dup2(fd, wanted)
        close_all_but({*fds, *self._libraries})
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        tempfile.tempdir = None
        platform._uname_cache = None  # it has the warm process's host name
        sys.path[:] = self._path
        util.spawnv_passfds = self._spawn
        self._show(request["command"])
        if "TESTS_JITTER" in os.environ and "nbelastic.agent.start" in request["code"]:  # see tests/support/jitter.py
            jitter = importlib.import_module("sitecustomize")
            jitter.late(jitter.AGENT_LATE)
        run(request["code"], request["command"])

    def _show(self, command: Sequence[str]) -> None:
        """Seem to have been started by this command, in the environment of this moment."""
        show(command, os.environ)
        sys.orig_argv[:] = command
        if any(os.environ.get(name) != value for name, value in self._read.items()):
            for name in [name for name in sys.modules if name.partition(".")[0] == "nbelastic"]:
                del sys.modules[name]

    def _spawn(self, path: bytes, arguments: list[str], fds: list[int]) -> int:
        """In an agent, in place of multiprocessing's own: the first template is a fork, and all else starts as ever."""
        template = "multiprocessing.forkserver" in arguments[-1]
        if not template or decisive(dict(os.environ)) != self._environment:
            return start_program(path, arguments, fds)
        util.spawnv_passfds = start_program
        with low_descriptors_taken():
            pid = os.fork()
        if pid == 0:
            self._become_template(arguments, fds)
        return pid

    def _become_template(self, command: list[str], fds: list[int]) -> NoReturn:
        close_all_but({*fds, *self._libraries})
        forkserver._forkserver.__init__()  # a fresh interpreter has no server and no tracker yet
        resource_tracker._resource_tracker.__init__()
        vars(mp_connection)["arbitrary_address"] = usual_address  # an agent has set its own
        sys.path[:] = self._path
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has read that already
        command = [os.fsdecode(word) for word in command]
        self._show(command)
        run(command[-1], command)


@contextlib.contextmanager
def variables_read() -> Iterator[set[str]]:
    """The environment variables that nbelastic's modules read in this block; the template is imported again anyway."""
    plain, found = os._Environ.__getitem__, set[str]()

    def noted(self: Any, name: str) -> str:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__") in ("os", "_collections_abc"):
            frame = frame.f_back
        reader = str(frame.f_globals.get("__name__"))
        if reader.partition(".")[0] == "nbelastic" and reader != TEMPLATE:
            found.add(name)
        return plain(self, name)

    os._Environ.__getitem__ = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        os._Environ.__getitem__ = plain  # type: ignore[method-assign]


@contextlib.contextmanager
def low_descriptors_taken() -> Iterator[None]:
    """In this block no descriptor up to LOW is free.

    torch's libuv has a pipe, closes it in each fork, and opens another one: it has the same high numbers in all forks that this
    process makes, which may keep it. Were it closed, libuv would close in the next fork what has these numbers then.
    """
    taken = []
    while (fd := os.open(os.devnull, os.O_RDONLY)) <= LOW:
        taken.append(fd)
    os.close(fd)
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)


def is_pipe(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False


def close_all_but(kept: Iterable[int]) -> None:
    """Close all other descriptors but those of the standard streams."""
    first = 3
    for fd in (*sorted(fd for fd in kept if fd >= first), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, fd)
        first = fd + 1


def fork_for_parent() -> int:
    """Fork this process as os.fork() does, but as a child of this process's parent; only for one without threads."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(ctypes.PyDLL(None).syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("the system refuses to fork")
    return pid


def run(code: str, command: Sequence[str]) -> NoReturn:
    """Run this text as `python -c` in the command does, and end this process as that would end."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if "-c" in command:
        sys.argv[:] = ["-c", *command[command.index("-c") + 2 :]]
    status = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
