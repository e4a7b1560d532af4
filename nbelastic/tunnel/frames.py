"""The frames of a tunnel, in which the connections of a host share one ssh connection.

Each connection is a channel with a window, as in HTTP/2: one whose bytes are not read delays no other. This module
does no input or output.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

HEAD = struct.Struct(">BII")  # kind, channel, bytes of the payload
NUMBER = struct.Struct(">i")  # the payload of OPEN, CREDIT and EXIT
WINDOW = 1 << 20  # bytes of a channel that may be on their way: 10 MB/s where a round trip takes 0.1 s
MAX_PAYLOAD = 1 << 16  # bytes
PREAMBLE = b"\x00nbelastic tunnel 1\x00"  # what a login shell prints before this is not part of the tunnel
MAX_NOISE = 1 << 20  # bytes that a login shell may print


class Kind(IntEnum):
    """What a frame says. `END` and `PING` go to the host; `OPEN`, `OUTPUT`, `EXIT`, `PONG` and `NAME` come from it."""

    OPEN = 1  # a process of the host has connected; the payload is the loopback port on the driver's machine
    DATA = 2
    CREDIT = 3  # so many bytes of the channel have been passed on
    CLOSE = 4
    OUTPUT = 5  # text that the agent has printed
    EXIT = 6  # the agent has ended; the payload is its exit code
    END = 7  # end the agent
    PING = 8
    PONG = 9
    NAME = 10  # of the tunnel, for the TCP proxy: see `ended_tunnels`


_KINDS = frozenset(map(int, Kind))


class Frame(NamedTuple):
    kind: Kind
    channel: int = 0
    payload: bytes = b""


class TunnelError(ValueError):
    """The other end sends something else than a tunnel's frames."""


def encode(frame: Frame) -> bytes:
    return HEAD.pack(frame.kind, frame.channel, len(frame.payload)) + frame.payload


def number(frame: Frame) -> int:
    """The number in the payload. TunnelError if it is something else."""
    if len(frame.payload) != NUMBER.size:
        raise TunnelError(f"a frame {frame.kind.name} with {len(frame.payload)} bytes")
    return int(NUMBER.unpack(frame.payload)[0])


class Decoder:
    """Splits a stream of bytes into frames. `noise` is what came before the preamble.

    `begun`: the preamble has come, or there is none.
    """

    def __init__(self, begun: bool = False) -> None:
        self._data = bytearray()
        self.begun = begun
        self.noise = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now. TunnelError if the other end sends something else."""
        self._data += data
        if not self.begun and not self._find_preamble():
            return
        begin = 0
        try:
            while len(self._data) - begin >= HEAD.size:
                kind, channel, size = HEAD.unpack_from(self._data, begin)
                if size > MAX_PAYLOAD or kind not in _KINDS:
                    raise TunnelError(f"a frame of kind {kind} with {size} bytes")
                end = begin + HEAD.size + size
                if len(self._data) < end:
                    return
                payload = bytes(self._data[begin + HEAD.size : end])
                begin = end
                yield Frame(Kind(kind), channel, payload)
        finally:
            del self._data[:begin]

    def end(self) -> None:
        """The stream has ended. If the preamble has not come, all was noise."""
        if not self.begun:
            self.noise, self._data = bytes(self._data), bytearray()

    def _find_preamble(self) -> bool:
        noise, found, rest = self._data.partition(PREAMBLE)
        if not found:
            if len(self._data) > MAX_NOISE:
                raise TunnelError("its login shell prints without end")
            return False
        self.begun, self.noise, self._data = True, bytes(noise), bytearray(rest)
        return True
