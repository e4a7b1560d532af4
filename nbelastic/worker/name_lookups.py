"""Keeps torch's stores from looking up names.

torch looks up the name of each address that a store connects to, for its log. With many workers DNS loses an answer now and
then, which delays a new world by a second or more; without a name server each newcomer is late. After one lookup has failed,
torch makes none any more in this process and its forks (`formatSockAddr` in its c10d/socket.cpp). So one fails here, at once.
"""

from __future__ import annotations

import ctypes
import os
import threading

from nbelastic.worker.process_group import Offer

ADDRESS = "127.255.255.254"  # an address of this machine that no hosts file names
SERVERS_AT = 16  # where glibc's `struct __res_state` has the number of name servers, an int


def end_name_lookups() -> None:
    """Let torch look up one name in vain. For a process with one thread: the other threads' stderr is lost meanwhile."""
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)  # torch warns once that a name cannot be retrieved
    try:
        thread = threading.Thread(target=_fail)
        thread.start()
        thread.join()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)


def _fail() -> None:
    """Connect to a store, in a thread that knows no name server: glibc's resolver has a state of its own in each thread."""
    libc = ctypes.CDLL(None)
    try:
        state, init = libc["__res_state"], libc["__res_init"]
    except AttributeError:  # not glibc
        return
    state.restype = ctypes.c_void_p
    if init() == 0:
        ctypes.c_int.from_address(state() + SERVERS_AT).value = 0
        Offer(ADDRESS)
