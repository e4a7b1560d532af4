"""The host's end of a tunnel when the agent has ended."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

from nbelastic.tunnel.host import NOTICES, _Host


def test_a_notice_after_the_agents_end_reaches_no_process():
    """The agent's number may be another process's by then, or none: that ended the tunnel before it had sent the exit code."""
    agent = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], {})
    output, nothing = os.pipe()
    os.close(nothing)
    host = SimpleNamespace(
        _child=SimpleNamespace(pid=agent, output=output),
        _forwarder=SimpleNamespace(unwatch=lambda _: None),
        _pidfd=-1,
        _output=b"",
        _send_output=lambda: None,
    )
    before = {sig: signal.signal(sig, lambda number, _: os.kill(agent, number)) for sig in (*NOTICES, signal.SIGALRM)}
    try:
        _Host._on_exit(host)
        for sig in before:
            os.kill(os.getpid(), sig)
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
        os.close(output)
    assert host._code == 3
