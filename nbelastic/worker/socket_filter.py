"""Who may connect to a listening socket of this process: the kernel drops what comes from other addresses.

torch's store and gloo know no keys. Whoever connects can read and change the store, and gloo keeps each stranger's
connection open; when no descriptor is left, it ends the process. So their listeners let in as few as can be, by a filter
that Linux asks for each packet (SO_ATTACH_FILTER, classic BPF); connections that stand already are not concerned.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from collections.abc import Iterable

from nbelastic.worker.sockets import borrowed

_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux; Python has no names for them
_NETWORK = 0xFFF00000  # SKF_NET_OFF: where the IP header begins
_SOURCE = {socket.AF_INET: 12, socket.AF_INET6: 8}  # bytes from there to the sender's address
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_LONGEST = 4096  # instructions that Linux takes

_Instruction = tuple[int, int, int, int]


def admit_only(listener: int, addresses: Iterable[str]) -> None:
    """From now on only these addresses (IPv4 or IPv6, as text) can connect to `listener` (a descriptor).

    Where the kernel has no such filters, or not for so many addresses, everybody still can.
    """
    with borrowed(listener) as ours:
        if ours is None:
            return
        code = _program(ours.family, addresses)
        if len(code) > _LONGEST:
            return
        text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in code))
        with contextlib.suppress(OSError):
            ours.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("@HP", len(code), ctypes.addressof(text)))


def admit_all(listener: int) -> None:
    """From now on everybody can connect to it who reaches it."""
    with borrowed(listener) as ours, contextlib.suppress(OSError):  # there may be no filter
        if ours is not None:
            ours.setsockopt(socket.SOL_SOCKET, _DETACH, 0)


def _program(family: int, addresses: Iterable[str]) -> list[_Instruction]:
    """Compare the sender with one address after the other."""
    code: list[_Instruction] = []
    for address in sorted({a for a in addresses if (":" in a) == (family == socket.AF_INET6)}):
        words = struct.unpack(f"!{4 if ':' in address else 1}I", socket.inet_pton(family, address))
        rest = 2 * len(words)
        for number, word in enumerate(words):
            rest -= 2
            code += [
                (_LOAD, 0, 0, _NETWORK + _SOURCE[socket.AddressFamily(family)] + 4 * number),
                (_IF_EQUAL, 0, rest + 1, word),  # if not: past what is left for this address, and its "take it"
            ]
        code.append((_RETURN, 0, 0, 0xFFFFFFFF))
    return [*code, (_RETURN, 0, 0, 0)]
