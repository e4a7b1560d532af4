"""A warm process imports torch once per test session and forks agents: importing torch takes each agent 2.5 s of processor time.

    pytest ── warm process          imports what nbelastic's template imports, then waits for requests
       └───── agent ── template     both are forks of the warm process; from then on they run nbelastic's own code

An agent of this machine is a child of pytest, as it would be without the warm process. An agent that sshd starts is a
child of the warm process instead: the process that sshd has started waits for it and ends as it ends.
Whatever an agent needs beyond its first template (another template after the first one died) starts the usual way.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import platform
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping
from multiprocessing import forkserver, resource_tracker, util
from typing import Any, NoReturn

AGENT = "from nbelastic.agent.start import main; main()"
LENGTH = struct.Struct("!q")
DECISIVE = ("PYTHON", "TORCH", "LD_")  # variables that Python, torch and the linker read as they start
IGNORED = (  # of these: what nbelastic sets for agents, which means nothing without a GPU, and what torch sets when it compiles
    "TORCH_NCCL",
    "TORCH_DIST_USE_NCCL2",
    "TORCH_CPP_LOG_LEVEL",
    "TORCHINDUCTOR_CACHE_DIR",
)
NAMESPACES = ("net", "uts", "mnt")
CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, 0)  # the number of the system call
CLONE_PARENT = 0x8000
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)
REFUSED = 1 << 32  # the answer to a request from another environment; no exit code is as large
start_program = util.spawnv_passfds


def decisive(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that must be those of the warm process."""
    chosen = (name for name in environment if name.startswith(DECISIVE) and not name.startswith(IGNORED))
    return {name: environment[name] for name in chosen}


def ask(connection: socket.socket, request: dict[str, Any], fds: list[int]) -> int:
    """Send a request with descriptors; the number that the warm process answers.

    ConnectionRefusedError if it refuses the request, EOFError if it has ended.
    """
    data = json.dumps(request).encode()
    socket.send_fds(connection, [LENGTH.pack(len(data))], fds)
    connection.sendall(data)
    answer = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(answer) < LENGTH.size:
        raise EOFError
    number = int(LENGTH.unpack(answer)[0])
    if number == REFUSED:
        raise ConnectionRefusedError
    return number


def join(address: str) -> None:
    """Have the warm process at `address` fork an agent in this process's namespaces; wait for it and end as it ends.

    SIGTERM and SIGUSR1 are passed on to it.
    Return if there is none, or if the environment here differs in what Python and torch read as they start. If the warm process
    ends, its agent ends too. Then this process ends as well: the agent may have read its input.
    """
    descriptors = [0, 1, 2, *(os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES)]
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            request = {"code": AGENT, "cwd": os.getcwd(), "environment": dict(os.environ), "waits": True}
            for sig in PASSED_ON:
                signal.signal(sig, lambda number, _: connection.send(bytes([number])))
            code = ask(connection, request, descriptors)
    except EOFError:
        os._exit(1)
    except OSError:
        for sig in PASSED_ON:
            signal.signal(sig, signal.SIG_DFL)
        return
    finally:
        for fd in descriptors[3:]:
            os.close(fd)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(listener: int) -> None:
    """Be the warm process: fork an agent for each connection to this socket, until the standard input ends."""
    Server(socket.socket(fileno=listener)).run()


class Server:
    """What the warm process is made of: it has one thread, so that its forks are whole."""

    def __init__(self, listener: socket.socket) -> None:
        self._path, self._environment = sys.path[:], decisive(dict(os.environ))
        importlib.import_module("nbelastic.programs.template")  # it prepares this process as it does a template
        for name in [name for name in sys.modules if name.partition(".")[0] == "nbelastic"]:
            del sys.modules[name]  # agents and templates import nbelastic's own modules themselves
        sys.modules.pop("pynvml", None)  # torch has imported it; tests may give agents another one
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"the imports have left {threads} threads: forks of such a process may hang"
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._agents: dict[int, tuple[int, socket.socket]] = {}  # pid -> its pidfd, and the process that waits for it

    def run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, sys.exit)
        os.write(1, b"ready\n")
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        with self._listener.accept()[0] as connection:
            header, fds, _, _ = socket.recv_fds(connection, LENGTH.size, 16)
            text = connection.recv(LENGTH.unpack(header)[0], socket.MSG_WAITALL) if header else b""
            if not text.endswith(b"}"):  # its process was killed before it had sent the request
                for fd in fds:
                    os.close(fd)
                return
            request = json.loads(text)
            if decisive(request["environment"]) == self._environment:
                leads, says = os.pipe()
                pid = os.fork() if request["waits"] else fork_for_parent()
                if pid == 0:
                    connection.close()
                    os.setsid()
                    os.close(says)
                    os.close(leads)
                    self._become_agent(request, fds)
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
        self._agents[pid] = pidfd, waiting

        def agent_ended() -> None:
            if pid not in self._agents:  # both have ended, and select() has reported both at once
                return
            _, status = os.waitpid(pid, 0)
            for one in self._agents.pop(pid):
                self._selector.unregister(one)
            os.close(pidfd)
            with contextlib.suppress(OSError), waiting:
                waiting.sendall(LENGTH.pack(os.waitstatus_to_exitcode(status)))

        def waiting_calls() -> None:
            if pid not in self._agents:
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

    def _become_agent(self, request: dict[str, Any], fds: list[int]) -> NoReturn:
        self._selector.close()
        self._listener.close()
        for pidfd, waiting in self._agents.values():
            os.close(pidfd)
            waiting.close()
        for sig, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            signal.signal(sig, handler)
        for fd, wanted in zip(fds[:3], range(3), strict=True):
            os.dup2(fd, wanted)
        libc = ctypes.CDLL(None, use_errno=True)
        for fd, name in zip(fds[3:], NAMESPACES, strict=False):
            here = os.path.samestat(os.fstat(fd), os.stat(f"/proc/self/ns/{name}"))
            if not here and libc.setns(fd, 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.closerange(3, max(fds) + 1)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        tempfile.tempdir = None
        platform._uname_cache = None  # it has the warm process's host name
        sys.path[:] = self._path
        util.spawnv_passfds = self._spawn
        if "TESTS_JITTER" in os.environ:  # see tests/support/jitter.py
            jitter = importlib.import_module("sitecustomize")
            jitter.late(jitter.AGENT_LATE)
        run(request["code"])

    def _spawn(self, path: bytes, arguments: list[str], fds: list[int]) -> int:
        """In an agent, in place of multiprocessing's own: the first template is a fork, and all else starts as ever."""
        template = "multiprocessing.forkserver" in arguments[-1]
        if not template or decisive(dict(os.environ)) != self._environment:
            return start_program(path, arguments, fds)
        util.spawnv_passfds = start_program
        pid = os.fork()
        if pid == 0:
            self._become_template(arguments[-1], fds)
        return pid

    def _become_template(self, code: str, fds: list[int]) -> NoReturn:
        first = 3
        for fd in (*sorted(fds), os.sysconf("SC_OPEN_MAX")):
            os.closerange(first, fd)
            first = fd + 1
        forkserver._forkserver.__init__()  # a fresh interpreter has no server and no tracker yet
        resource_tracker._resource_tracker.__init__()
        sys.path[:] = self._path
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has read that already
        run(code)


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


def run(code: str) -> NoReturn:
    """Run this text as `python -c` does, and end this process as that would end."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = ["-c"]
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
