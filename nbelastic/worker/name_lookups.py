"""Keeps torch's stores from looking up names.

torch looks up the name of each address that a store connects to, for its log. With many workers DNS loses an answer now and
then, which delays a new world by a second or more; without a name server each newcomer is late. After one lookup has failed,
torch makes none any more in this process and its forks (`formatSockAddr` in its c10d/socket.cpp). So one fails here, at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from datetime import timedelta

from nbelastic.worker.process_group import Offer

ADDRESS = "127.255.255.254"  # an address of this machine that no hosts file names
TIMEOUT = timedelta(seconds=1)
SERVERS_AT = 16  # where glibc's `struct __res_state` has the number of name servers, an int


def end_name_lookups() -> None:
    """Let torch look up one name in vain. For a process with one thread: what others write to stderr meanwhile is lost."""
    libc = ctypes.CDLL(None)
    try:
        state, init = libc["__res_state"], libc["__res_init"]
    except AttributeError:  # not glibc
        return
    state.restype = ctypes.c_void_p
    if init() != 0:
        return
    servers = ctypes.c_int.from_address(state() + SERVERS_AT)
    known, servers.value = servers.value, 0
    try:
        # torch warns once that a name cannot be retrieved. Without a loopback interface, it goes on looking up names.
        with contextlib.suppress(OSError, RuntimeError), _no_stderr():
            Offer(ADDRESS, TIMEOUT)
    finally:
        servers.value = known


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)
