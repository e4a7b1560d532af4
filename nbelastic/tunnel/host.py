"""The end of a tunnel on a host, and the parent of its agent.

ssh runs this program with the agent's configuration as the first line of the standard input. It forks the agent, and forwards
connections of the agent and its workers through ssh. If the ssh connection breaks, the agent runs on: the driver's machine opens
another one, in which this program hands its descriptors to the first one (`attach`). If the standard input ends but ssh still
runs, the driver's machine wants the agent to end. In a pod (`eof_ends_agent` is false) a broken connection looks the same.

A batch system, and a pod that connects directly, offer no standard input: the variable `NBELASTIC_AGENT` names a file of mode 0600
with the configuration. There this program opens a TCP connection to the driver's machine (`dial`) instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nbelastic.protocol.exit_codes import AGENT_GONE
from nbelastic.system import open_files, tunnel_folder
from nbelastic.system.first_line import read_first_line
from nbelastic.system.folder_paths import process_folder
from nbelastic.system.processes import kill_group
from nbelastic.tunnel import handshake
from nbelastic.tunnel.dialer import Dialer
from nbelastic.tunnel.ended_tunnels import name_of
from nbelastic.tunnel.forwarder import Forwarder
from nbelastic.tunnel.frames import NUMBER, PREAMBLE, Frame, Kind

KEPT_OUTPUT = 1 << 14  # bytes of the agent's output that are kept while there is no ssh connection
SEND_TIMEOUT = 2.0  # seconds in which the last frames go out
END_TIMEOUT = 20.0  # seconds in which an agent that must end has ended; then it is killed


def main(run_agent: Callable[[], None]) -> None:
    """Read the configuration, and start the agent (`run_agent` in a child) or attach to it."""
    open_files.raise_limit()
    file = os.environ.pop("NBELASTIC_AGENT", None)
    config = json.loads(_from_file(Path(file)) if file else read_first_line())
    os.environ.update(config["environment"])  # it may name the folder for temporary files
    if config.pop("attach", False):
        sys.exit(_attach(config))
    _end_earlier(config)
    dial = config.pop("dial", None)
    child = _Child()
    if child.pid == 0:
        child.take_streams(keep_output=dial is not None)
        run_agent()
        return
    with process_folder() as run_folder:
        folder = run_folder / tunnel_folder.name_of(config["cluster"], config["host"], config["number"])
        folder.mkdir(mode=0o700)
        eof_ends_agent, driver = config.pop("eof_ends_agent", False), config["driver"]
        towards = "" if dial else os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
        config |= {"tunnel": str(folder), "towards": towards or config["towards"]}
        host = _Host(folder, child, config, eof_ends_agent=eof_ends_agent)
        host.listen_for(int(driver.rpartition(":")[2]))
        key = handshake.key_from(config["keys"]["client_secret"]) if dial else b""
        code = host.run(tuple(dial) if dial else None, key, name_of(config["host"], config["number"]))
    sys.exit(code if code >= 0 else 128 - code)


def _from_file(path: Path) -> bytes:
    """Read the file, and remove it: no other process needs the keys."""
    config = path.read_bytes()
    with contextlib.suppress(OSError):
        path.unlink()
    return config


def _attach(config: dict[str, Any]) -> int:
    """Hand this ssh connection to the agent's tunnel. Return when that no longer uses it."""
    folder = tunnel_folder.find(config["cluster"], config["host"]).get(config["number"])
    try:
        if folder is None:
            raise FileNotFoundError
        connection = tunnel_folder.ask(folder, "attach", (0, 1))
    except TimeoutError:  # it is stopped, or the host is overloaded
        print("the host's end of the tunnel does not answer", file=sys.stderr)
        return 1
    except OSError:
        print("the agent has ended while there was no ssh connection", file=sys.stderr)
        return AGENT_GONE
    _leave_standard_streams()
    connection.settimeout(None)
    with contextlib.suppress(OSError):
        while connection.recv(16):
            pass
    return 0


def _leave_standard_streams() -> None:
    """Keep no descriptor of the ssh connection beside the tunnel's, with which it ends."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(nothing, fd)
    os.close(nothing)


def _end_earlier(config: dict[str, Any]) -> None:
    """End earlier agents of this host: the driver has given them up, and perhaps could not reach them."""
    for folder in tunnel_folder.find(config["cluster"], config["host"]).values():
        with contextlib.suppress(OSError):
            try:
                with tunnel_folder.ask(folder, "end") as connection:
                    connection.settimeout(END_TIMEOUT)
                    connection.recv(16)
            except TimeoutError:  # it is stopped; its agent ends with it
                tunnel_folder.kill(folder)
        shutil.rmtree(folder, ignore_errors=True)


NOTICES = (signal.SIGTERM, signal.SIGUSR1)  # of a batch system or an administrator, for the agent


class _Child:
    """The agent's process, which waits for its configuration. `pid` is 0 in the child itself."""

    def __init__(self) -> None:
        self._stdin, self._config = os.pipe()  # the end of `_config` ends the agent
        self.output, self._stdout = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(self._stdin)
            os.close(self._stdout)

    def take_streams(self, *, keep_output: bool) -> None:
        """In the child: use the pipes instead of the ssh connection, and be a process group's leader.

        `keep_output`: there is none; the output is the batch job's or the pod's. A batch system may find a job's processes by
        their session.
        """
        if keep_output:
            os.setpgid(0, 0)
        else:
            os.setsid()
        for fd, target in ((self._stdin, 0), *(() if keep_output else ((self._stdout, 1), (self._stdout, 2)))):
            os.dup2(fd, target)
        for fd in (self._stdin, self._config, self.output, self._stdout):
            os.close(fd)

    def configure(self, config: dict[str, Any]) -> None:
        with os.fdopen(os.dup(self._config), "wb") as pipe:
            pipe.write(json.dumps(config).encode() + b"\n")

    def end(self) -> None:
        """Let the agent end with its workers; kill it if it has not ended in time."""
        os.close(self._config)
        signal.signal(signal.SIGALRM, lambda *_: kill_group(self.pid))
        signal.setitimer(signal.ITIMER_REAL, END_TIMEOUT)


class _Host:
    """Forwards until the agent has ended. Behind ssh the agent begins when the driver's machine has answered."""

    def __init__(self, folder: Path, child: _Child, config: dict[str, Any], *, eof_ends_agent: bool) -> None:
        self._fd, self._child, self._eof_ends_agent = tunnel_folder.open_folder(folder), child, eof_ends_agent
        self._forwarder = Forwarder(self._on_frame, self._on_lost)
        self._listeners: dict[int, socket.socket] = {}  # by port
        self._attached_by: socket.socket | None = None  # to the process that has handed over the ssh connection
        self._waiting: list[socket.socket] = []  # connections of processes that wait for the agent's end
        self._output = b""  # of the agent, not sent yet
        self._config: dict[str, Any] | None = config  # until the agent has it
        self._ending = False
        self._code: int | None = None
        self._control = self._listen(tunnel_folder.CONTROL, socket.SOCK_SEQPACKET)
        self._forwarder.watch(self._control.fileno(), self._accept_request)
        self._forwarder.watch(child.output, self._take_output)
        self._pidfd = os.pidfd_open(child.pid)
        self._forwarder.watch(self._pidfd, self._on_exit)

    def run(self, dial: tuple[str, int] | None, key: bytes, name: bytes) -> int:
        """Forward, and return the agent's exit code. `dial`, `key`, `name`: see `Dialer`; None: ssh is there."""
        for sig in (signal.SIGHUP, signal.SIGPIPE, signal.SIGINT):
            signal.signal(sig, signal.SIG_IGN)
        for sig in NOTICES:
            signal.signal(sig, lambda number, _: os.kill(self._child.pid, number))
        dialer = Dialer(self._forwarder, dial, key, name) if dial is not None else None
        if dialer is not None:
            self._configure()
        else:
            self._forwarder.attach(os.dup(0), os.dup(1), PREAMBLE)
            _leave_standard_streams()
        while self._code is None:
            self._forwarder.turn(dialer.turn(time.monotonic()) if dialer is not None else 60.0)
            self._reap_orphans()
        self._forwarder.send(Frame(Kind.EXIT, payload=NUMBER.pack(self._code)))
        for _ in range(int(SEND_TIMEOUT / 0.1)):
            if self._forwarder.drained:
                break
            self._forwarder.turn(0.1)
        self._forwarder.detach()
        return self._code

    # ---- the agent ----

    def _configure(self) -> None:
        """Let the agent begin: the driver's machine knows of it now, or a batch system or Kubernetes does."""
        if self._config is not None and not self._ending:
            self._child.configure(self._config)
            self._config = None

    def _take_output(self) -> None:
        text = os.read(self._child.output, 1 << 16)
        if not text:
            self._forwarder.unwatch(self._child.output)
        self._output = (self._output + text)[-KEPT_OUTPUT:]
        self._send_output()

    def _send_output(self) -> None:
        if self._forwarder.attached and self._output:
            text, self._output = self._output, b""
            self._forwarder.send(Frame(Kind.OUTPUT, payload=text))

    def _on_exit(self) -> None:
        for sig in (*NOTICES, signal.SIGALRM):  # after the wait, the agent's number may be another process's
            signal.signal(sig, signal.SIG_IGN)
        _, status = os.waitpid(self._child.pid, 0)
        self._forwarder.unwatch(self._pidfd)
        while select.select([self._child.output], [], [], 0)[0] and (text := os.read(self._child.output, 1 << 16)):
            self._output = (self._output + text)[-KEPT_OUTPUT:]
        self._send_output()
        self._code = os.waitstatus_to_exitcode(status)

    def _reap_orphans(self) -> None:
        """In a container, processes whose parents have ended become children of its first one. Each counts until it is waited for."""
        with contextlib.suppress(ChildProcessError):  # the agent was waited for
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while (ended := os.waitid(os.P_ALL, 0, flags)) is not None and ended.si_pid != self._child.pid:
                os.waitpid(ended.si_pid, 0)

    def _end_agent(self) -> None:
        if not self._ending:
            self._ending = True
            self._child.end()

    # ---- the ssh connection ----

    def _on_frame(self, frame: Frame) -> None:
        self._configure()
        match frame.kind:
            case Kind.PING:
                self._forwarder.send(Frame(Kind.PONG))
            case Kind.END:
                self._end_agent()

    def _on_lost(self, _reason: str, closed: bool) -> None:
        # The driver's machine wants the end, or this start has failed for it: it would never attach to the agent.
        if (closed and self._eof_ends_agent) or self._config is not None:
            self._end_agent()
        self._release()

    def _release(self) -> None:
        """Let the process end that has handed over the ssh connection."""
        if self._attached_by is not None:
            self._attached_by.close()
            self._attached_by = None

    # ---- processes of this host ----

    def _listen(self, name: str, kind: int) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, kind)
        mask = os.umask(0o177)
        listener.bind(tunnel_folder.socket_path(self._fd, name))
        os.umask(mask)
        listener.listen(256)
        listener.setblocking(False)
        return listener

    def listen_for(self, port: int) -> None:
        """Forward connections to this port of the driver's machine."""
        if port not in self._listeners:
            listener = self._listen(f"{tunnel_folder.PORT}:{port}", socket.SOCK_STREAM)
            self._listeners[port] = listener
            self._forwarder.watch(listener.fileno(), partial(self._accept, listener, port))

    def _accept(self, listener: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):  # it has gone already, or this process has too many connections
            self._forwarder.open(listener.accept()[0], port)

    def _accept_request(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            connection = self._control.accept()[0]
            connection.settimeout(tunnel_folder.ANSWER_TIMEOUT)
            request, fds, *_ = socket.recv_fds(connection, 4096, 2)
            match request.decode().split(), fds:
                case ["listen", *ports], []:
                    for port in ports:
                        self.listen_for(int(port))
                case ["end"], []:
                    self._end_agent()
                    self._waiting.append(connection)
                case ["attach"], [reader, writer]:
                    self._attach(connection, reader, writer)
                    return
                case _:
                    return
            connection.send(b"ok")

    def _attach(self, connection: socket.socket, reader: int, writer: int) -> None:
        """Use this ssh connection, which the process at the other end of `connection` has handed over."""
        try:
            connection.send(b"ok")
        except OSError:  # it has given up: the end of its ssh connection would look like an order to end the agent
            os.close(reader)
            os.close(writer)
            return
        self._release()
        self._forwarder.attach(reader, writer, PREAMBLE)
        self._attached_by = connection
        self._send_output()
