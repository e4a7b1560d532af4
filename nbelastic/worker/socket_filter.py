"""Limits which addresses can connect to a listening socket of this process; Linux drops packets from all others.

torch's store and gloo use no keys. Any process that connects can read and change the store, and gloo keeps each such
connection open; when no descriptor is left, gloo ends the process. So a packet filter (SO_ATTACH_FILTER, classic BPF) lets
only members connect. The filter does not affect connections that exist already.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from collections.abc import Iterable

from nbelastic.worker.sockets import borrowed

_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux, which Python does not name
_NETWORK = 0xFFF00000  # SKF_NET_OFF: where the IP header begins
_SOURCE = {socket.AF_INET: 12, socket.AF_INET6: 8}  # bytes from there to the sender's address
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_MAX_INSTRUCTIONS = 4096  # that Linux accepts

_Instruction = tuple[int, int, int, int]


def admit_only(listener: int, addresses: Iterable[str]) -> None:
    """Let only these addresses (IPv4 or IPv6, as text) connect to `listener` (a descriptor) from now on.

    If the kernel has no such filters, or there are too many addresses, every address still can.
    """
    with borrowed(listener) as ours:
        if ours is None:
            return
        code = _program(ours.family, addresses)
        text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in code))
        with contextlib.suppress(OSError):
            if len(code) <= _MAX_INSTRUCTIONS:
                ours.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("@HP", len(code), ctypes.addressof(text)))
                return
    admit_all(listener)  # the filter from before would keep out the new addresses


def admit_all(listener: int) -> None:
    """Remove the filter: every address can connect."""
    with borrowed(listener) as ours, contextlib.suppress(OSError):  # there may be no filter
        if ours is not None:
            ours.setsockopt(socket.SOL_SOCKET, _DETACH, 0)


def _program(family: int, addresses: Iterable[str]) -> list[_Instruction]:
    """Compare the sender's address with one address after the other."""
    code: list[_Instruction] = []
    for address in sorted({a for a in addresses if (":" in a) == (family == socket.AF_INET6)}):
        words = struct.unpack(f"!{4 if ':' in address else 1}I", socket.inet_pton(family, address))
        rest = 2 * len(words)
        for number, word in enumerate(words):
            rest -= 2
            code += [
                (_LOAD, 0, 0, _NETWORK + _SOURCE[socket.AddressFamily(family)] + 4 * number),
                (_IF_EQUAL, 0, rest + 1, word),  # no match: skip the rest of this address
            ]
        code.append((_RETURN, 0, 0, 0xFFFFFFFF))
    return [*code, (_RETURN, 0, 0, 0)]
