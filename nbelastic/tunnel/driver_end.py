"""The end of a tunnel on the driver's machine: a process per ssh connection, which runs the ssh client and connects to loopback ports.

It ends with the ssh connection. SIGTERM makes it end the agent first. If it is killed itself, ssh's input ends, and the agent
with it. Its output is the agent's log.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from nbelastic.protocol.exit_codes import AGENT_GONE, CONNECTION_LOST
from nbelastic.system import open_files
from nbelastic.system.driver_lease import POLL, DriverLease, LeaseWatch
from nbelastic.system.first_line import read_first_line
from nbelastic.tunnel import allowed_ports
from nbelastic.tunnel.forwarder import Forwarder
from nbelastic.tunnel.frames import Frame, Kind, number

TICK = 0.5  # seconds between checks of deadlines
PING = 2.0  # seconds between two questions whether the host still answers
SILENCE = 8.0  # seconds without an answer after which the ssh connection counts as broken
ATTACH_TIMEOUT = 30.0  # seconds in which a further ssh connection reaches the agent
EXIT_TIMEOUT = 2.0  # seconds in which ssh ends, and in which an agent that must end has done so
MOST_LOGGED = 1 << 24  # bytes of the agent's log; then it begins anew
CHUNK = 1 << 16  # bytes of what ssh prints that are read at once: as many as a pipe holds
ORPHAN_TIMEOUT = (
    60.0  # seconds for which ssh goes on without this process, to send the end to a host that has not answered
)


class _DriverEnd:
    """Runs until the ssh connection or the agent has ended. `ports`: a file that lists the ports which the host may use."""

    def __init__(self, command: list[str], ports: Path, driver_lease: DriverLease, config: bytes) -> None:
        self._command, self._config = command, config
        self._attaches = json.loads(config)["attach"]  # to an agent that runs; else ssh starts one
        self._begin_by = time.monotonic() + ATTACH_TIMEOUT if self._attaches else math.inf
        self._driver_lease, self._lease, self._lease_check_at = driver_lease, LeaseWatch(driver_lease), 0.0
        self._forwarder = Forwarder(self._on_frame, self._on_lost, partial(allowed_ports.connect, ports), preamble=True)
        self._heard = (0, 0.0)  # bytes so far, and when there were fewer
        self._checked_at = self._ping_at = 0.0
        self._noted = False  # that the host's end of the tunnel has answered
        self._exit: int | None = None  # the agent's exit code
        self._end_by: float | None = None
        self._code: int | None = None

    def run(self) -> int:
        """Return the agent's exit code, `CONNECTION_LOST` if the agent may run on, or ssh's own if no agent has started."""
        terminated = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        signal.signal(signal.SIGTERM, lambda *_: os.eventfd_write(terminated, 1))
        for sig in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(sig, signal.SIG_IGN)
        self._forwarder.watch(terminated, partial(self._on_sigterm, terminated))
        self._start_ssh()
        while self._code is None:
            self._forwarder.turn(TICK)
            self._check(time.monotonic())
        self._forwarder.detach()
        if self._end_by is None or self._exit is not None:
            self._wait_for_ssh()
        elif self._ssh.poll() is None:  # the host has not answered: ssh sends it the end once the network allows that
            self._kill_ssh_later()
        if self._lease.has_expired(time.monotonic()):  # other processes of the cluster on this machine may be dead
            from nbelastic.protocol.local_clusters import remove_without_driver  # only needed here

            remove_without_driver(self._driver_lease)
        return self._code if self._code >= 0 else 128 - self._code

    def _start_ssh(self) -> None:
        # In a session of its own ssh outlives this process, and reports the end of its input to the host.
        self._ssh = ssh = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert ssh.stdin is not None
        assert ssh.stdout is not None
        assert ssh.stderr is not None
        self._errors, self._errors_end = ssh.stderr.fileno(), False
        self._pidfd = os.pidfd_open(ssh.pid)
        os.set_blocking(self._errors, False)
        self._forwarder.watch(self._errors, self._take_errors)
        with ssh.stdin, ssh.stdout:
            self._forwarder.attach(os.dup(ssh.stdout.fileno()), os.dup(ssh.stdin.fileno()), self._config)

    def _wait_for_ssh(self) -> int:
        """Wait for the end of ssh, and print its errors meanwhile; kill it if that takes too long. Return its exit code."""
        end = time.monotonic() + EXIT_TIMEOUT
        while (left := end - time.monotonic()) > 0:
            errors = () if self._errors_end else (self._errors,)
            ready, _, _ = select.select([*errors, self._pidfd], [], [], left)
            if self._errors not in ready:  # all was read
                break
            self._take_errors()
        if self._ssh.poll() is None:
            self._ssh.kill()
        return self._ssh.wait()

    def _kill_ssh_later(self) -> None:
        """Leave a process that kills ssh after ORPHAN_TIMEOUT: a program that hangs on the host would keep it."""
        if os.fork() == 0:
            try:
                os.setsid()
                os.close(self._errors)
                _leave_output()
                if not select.select([self._pidfd], [], [], ORPHAN_TIMEOUT)[0]:
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            finally:
                os._exit(0)

    def _print_noise(self) -> None:
        noise = self._forwarder.take_noise().strip()
        if noise:
            _print(noise + b"\n")

    def _take_errors(self) -> None:
        """Print what ssh and the host's programs have written to their standard error output."""
        try:
            text = os.read(self._errors, CHUNK)
        except BlockingIOError:
            return
        if text:
            _print(text)
        else:
            self._errors_end = True
            self._forwarder.unwatch(self._errors)

    def _on_frame(self, frame: Frame) -> None:
        self._print_noise()
        match frame.kind:
            case Kind.OUTPUT:
                _print(frame.payload)
            case Kind.EXIT:
                self._exit = number(frame)
                self._end_by = time.monotonic() + EXIT_TIMEOUT

    def _on_lost(self, reason: str, _closed: bool = False) -> None:
        code = self._wait_for_ssh()
        self._print_noise()
        if reason:
            _print(f"nbelastic: the tunnel has ended: {reason}\n".encode())
        if self._exit is not None or self._end_by is not None:
            self._code = self._exit or 0
        else:
            self._code = CONNECTION_LOST if self._forwarder.begun or (self._attaches and code != AGENT_GONE) else code

    def _on_sigterm(self, eventfd: int) -> None:
        os.eventfd_read(eventfd)
        self._end()

    def _end(self) -> None:
        """Let the agent end, and this process with it."""
        if self._end_by is None:
            self._end_by = time.monotonic() + EXIT_TIMEOUT
            self._forwarder.send(Frame(Kind.END))

    def _check(self, now: float) -> None:
        if self._code is not None:
            return
        if now - self._checked_at > TICK + PING:  # this process was stopped: what was sent meanwhile is not read yet
            self._heard = (self._heard[0], now)
        self._checked_at = now
        if self._end_by is not None and now >= self._end_by:
            self._code = self._exit or 0
        if now >= self._lease_check_at:
            self._lease_check_at = now + POLL
            if self._lease.has_expired(now):
                self._end()
        if self._forwarder.begun:
            self._check_connection(now)
        elif now >= self._begin_by:
            self._give_up(f"the agent was not reached within {ATTACH_TIMEOUT:g} s")

    def _check_connection(self, now: float) -> None:
        self._print_noise()
        if self._attaches and not self._noted:
            _print(b"nbelastic: the agent is reached again\n")
        self._noted = True
        received = self._forwarder.received
        if received != self._heard[0]:
            self._heard = (received, now)
        if now - self._heard[1] > SILENCE:
            self._give_up(f"nothing has come for {SILENCE:g} s")
        elif now >= self._ping_at:
            self._ping_at = now + PING
            self._forwarder.send(Frame(Kind.PING))

    def _give_up(self, why: str) -> None:
        """End this ssh connection."""
        self._ssh.kill()
        self._forwarder.detach()
        self._on_lost(why)


def _print(text: bytes) -> None:
    """Add to the agent's log. A host that prints without end must not fill the disk: a long log begins anew."""
    with suppress(OSError):  # the disk is full: the host trains on
        if os.fstat(1).st_size > MOST_LOGGED:
            os.ftruncate(1, 0)  # the descriptor appends
        while text:
            text = text[os.write(1, text) :]


def _leave_output() -> None:
    """Keep no descriptor of the agent's log."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)


def main() -> None:
    """`argv[1]`: ssh's command, as JSON; `argv[2]`: the file with ports; `argv[3]`: the DriverLease, as JSON.

    The standard input has the agent's configuration in one line.
    """
    open_files.raise_limit()
    config = read_first_line()
    command, ports, driver_lease = json.loads(sys.argv[1]), Path(sys.argv[2]), DriverLease(*json.loads(sys.argv[3]))
    sys.exit(_DriverEnd(command, ports, driver_lease, config).run())
