"""One end of a tunnel: forwards connections of this machine as channels of one connection, of ssh or TCP. One thread, one selector."""

from __future__ import annotations

import os
import select
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress

from nbelastic.tunnel.frames import MAX_PAYLOAD, NUMBER, WINDOW, Decoder, Frame, Kind, TunnelError, encode, number
from nbelastic.tunnel.strangers import SERVER_PART, STRANGER_PART

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
MAX_QUEUED = 1 << 20  # bytes for the ssh connection; while more are queued, this end reads from no connection
MAX_UNREAD = 8 * MAX_QUEUED  # bytes that the other end may leave unread: answers to its frames count too
MAX_CHANNELS = 4096
EOF_GRACE = 0.2  # seconds in which a broken ssh connection shows that it does not only have no more input


class _Channel:
    def __init__(self, connection: socket.socket, port: int) -> None:
        self.connection, self.port = connection, port
        self.sent = self.answered = 0  # bytes of the other end, and bytes for it
        self.credit = WINDOW  # bytes that the other end still takes
        self.allowed = WINDOW  # bytes that the other end may still send
        self.passed_on = 0  # bytes that were passed on and not yet credited
        self.unsent = bytearray()  # bytes for the connection
        self.closed = False  # by the other end

    @property
    def exceeds_stranger(self) -> bool:
        """Whether the other end has sent more than a stranger may, and the server behind the port has not accepted it."""
        return self.sent > STRANGER_PART and self.answered <= SERVER_PART


class Forwarder:
    """`on_frame(frame)` gets the frames that are not about a channel.

    `on_lost(reason, closed)` is called when the ssh connection has ended; `closed`, on a host: the other end has closed it and ssh
    still runs.
    `connect(port, channels)` returns a new connection for a frame OPEN, or None if that is not allowed; `channels`: how many lead
    to this port. Only the end on the driver's machine has it: the other one may not be asked to connect. There a channel ends if
    its peer sends more than a stranger may. `preamble`: the other end sends one before its first frame.
    """

    def __init__(
        self,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str, bool], None],
        connect: Callable[[int, int], socket.socket | None] | None = None,
        *,
        preamble: bool = False,
    ) -> None:
        self._on_frame, self._on_lost, self._connect, self._preamble = on_frame, on_lost, connect, preamble
        self._selector = selectors.DefaultSelector()
        self._events: dict[int, int] = {}  # registered, by descriptor
        self._channels: dict[int, _Channel] = {}
        self._opened = 0  # channels so far
        self._reader = self._writer = -1
        self._queue = bytearray()  # for the ssh connection
        self._decoder = Decoder(begun=not preamble)
        self.received = 0  # bytes so far

    @property
    def attached(self) -> bool:
        return self._reader >= 0

    @property
    def channels(self) -> int:
        """How many are open."""
        return len(self._channels)

    def fileno(self) -> int:
        """A descriptor that is readable when `turn` has something to do."""
        return self._selector.fileno()

    @property
    def begun(self) -> bool:
        """Whether the other end has sent its preamble in the present or last ssh connection."""
        return self._decoder.begun

    @property
    def drained(self) -> bool:
        """Nothing waits for the ssh connection."""
        return not self._queue

    def watch(self, fd: int, callback: Callable[[], None], events: int = READ) -> None:
        """Call `callback()` in `turn` whenever `fd` is readable, or, with WRITE, writable."""
        self._set(fd, events, lambda _: callback())

    def unwatch(self, fd: int) -> None:
        self._set(fd, 0)

    def turn(self, timeout: float) -> None:
        """Wait for something to do, at most so many seconds, and do it."""
        for key, events in self._selector.select(timeout):
            if key.fd in self._events:  # an earlier one of these may have ended it
                key.data(events)

    def attach(self, reader: int, writer: int, first: bytes = b"") -> None:
        """Use this ssh connection; `first` is sent ahead. Both descriptors belong to this object now."""
        self.detach()
        for fd in (reader, writer):
            os.set_blocking(fd, False)
        self._reader, self._writer, self._decoder = reader, writer, Decoder(begun=not self._preamble)
        self._queue = bytearray(first)
        self._set(reader, READ, lambda _: self._receive())
        self._flush()

    def detach(self) -> None:
        """Leave the ssh connection. Its channels end; the processes behind them connect again."""
        for channel in list(self._channels):
            self._forget(channel)
        for fd in (self._reader, self._writer) if self.attached else ():
            self._set(fd, 0)
            os.close(fd)
        self._reader = self._writer = -1
        self._queue.clear()

    def close(self) -> None:
        """Use this object no more."""
        self.detach()
        self._selector.close()

    def open(self, connection: socket.socket, port: int) -> None:
        """Forward a connection of this machine to `port` of the other one. Close it if there is no ssh connection."""
        if not self.attached or len(self._channels) >= MAX_CHANNELS:
            connection.close()
            return
        self._opened += 1
        self._add(self._opened, connection, port)
        self.send(Frame(Kind.OPEN, self._opened, NUMBER.pack(port)))

    def send(self, frame: Frame) -> None:
        if self.attached:
            self._queue += encode(frame)
            self._flush()
        if len(self._queue) > MAX_UNREAD:
            self._lose("the other end reads nothing")

    # ---- the ssh connection ----

    def _flush(self) -> None:
        was_full = len(self._queue) > MAX_QUEUED
        try:
            while self._queue:
                del self._queue[: os.write(self._writer, self._queue[: 1 << 18])]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(f"{error.strerror}")
            return
        self._set(self._writer, WRITE if self._queue else 0, lambda _: self._flush())
        if was_full and len(self._queue) <= MAX_QUEUED:
            for name in list(self._channels):
                self._update(name)

    def _receive(self) -> None:
        try:
            data = os.read(self._reader, 1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"{error.strerror}")
            return
        if not data:
            self._lose("", closed=self._connect is None and not self._writer_fails())
            return
        self.received += len(data)
        try:
            for frame in self._decoder.feed(data):
                self._handle(frame)
                if not self.attached:
                    return
        except TunnelError as error:
            self._lose(str(error))

    def _writer_fails(self) -> bool:
        poll = select.poll()
        poll.register(self._writer, 0)  # asks for errors only
        return bool(poll.poll(EOF_GRACE * 1000))

    def take_noise(self) -> bytes:
        """What a login shell has printed before the tunnel began, or instead of it; once."""
        noise, self._decoder.noise = self._decoder.noise, b""
        return noise

    def _lose(self, reason: str, closed: bool = False) -> None:
        self._decoder.end()
        self.detach()
        self._on_lost(reason, closed)

    def _handle(self, frame: Frame) -> None:
        channel = self._channels.get(frame.channel)
        match frame.kind:
            case Kind.OPEN:
                self._open_for_peer(frame.channel, number(frame))
            case Kind.DATA | Kind.CREDIT | Kind.CLOSE if channel is None:
                pass  # this end has just closed it
            case Kind.DATA:
                assert channel is not None
                channel.allowed -= len(frame.payload)
                if channel.allowed < 0:
                    raise TunnelError("more bytes than its window has")
                channel.sent += len(frame.payload)
                if self._connect is not None and channel.exceeds_stranger:
                    self._end(frame.channel)
                    return
                channel.unsent += frame.payload
                self._pass_on(frame.channel)
            case Kind.CREDIT:
                assert channel is not None
                channel.credit = min(WINDOW, channel.credit + max(0, number(frame)))
                self._update(frame.channel)
            case Kind.CLOSE:
                assert channel is not None
                channel.closed = True
                self._pass_on(frame.channel)
            case _:
                self._on_frame(frame)

    def _open_for_peer(self, name: int, port: int) -> None:
        if self._connect is None or name in self._channels:
            raise TunnelError("it opens a channel that it may not open")
        present = sum(channel.port == port for channel in self._channels.values())
        connection = self._connect(port, present) if len(self._channels) < MAX_CHANNELS else None
        if connection is None:
            self.send(Frame(Kind.CLOSE, name))
        else:
            self._add(name, connection, port)

    # ---- connections of this machine ----

    def _add(self, name: int, connection: socket.socket, port: int) -> None:
        connection.setblocking(False)
        self._channels[name] = _Channel(connection, port)
        self._update(name)

    def _update(self, name: int) -> None:
        """Wait for what the channel can do now."""
        channel = self._channels[name]
        reads = channel.credit > 0 and len(self._queue) <= MAX_QUEUED and not channel.closed
        mask = (READ if reads else 0) | (WRITE if channel.unsent else 0)
        self._set(channel.connection.fileno(), mask, lambda events: self._on_connection(name, events))

    def _on_connection(self, name: int, events: int) -> None:
        if events & WRITE and name in self._channels:
            self._pass_on(name)
        if events & READ and name in self._channels:
            self._take(name)

    def _take(self, name: int) -> None:
        """Read from the connection, and send it as a frame."""
        channel = self._channels[name]
        if len(self._queue) > MAX_QUEUED:  # another channel has filled it
            self._update(name)
            return
        try:
            data = channel.connection.recv(min(MAX_PAYLOAD, channel.credit))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            channel.credit -= len(data)
            channel.answered += len(data)
            self.send(Frame(Kind.DATA, name, data))
            if name in self._channels:
                self._update(name)
        else:
            self._end(name)

    def _pass_on(self, name: int) -> None:
        """Write to the connection what the other end has sent."""
        channel = self._channels[name]
        try:
            while channel.unsent:
                sent = channel.connection.send(channel.unsent[:MAX_PAYLOAD])
                del channel.unsent[:sent]
                channel.passed_on += sent
        except BlockingIOError:
            pass
        except OSError:
            self._end(name)
            return
        if channel.closed and not channel.unsent:
            self._forget(name)
            return
        if channel.passed_on >= WINDOW // 4:
            credit, channel.passed_on = channel.passed_on, 0
            channel.allowed += credit
            self.send(Frame(Kind.CREDIT, name, NUMBER.pack(credit)))
        if name in self._channels:
            self._update(name)

    def _end(self, name: int) -> None:
        """End the channel at both ends."""
        self._forget(name)
        self.send(Frame(Kind.CLOSE, name))

    def _forget(self, name: int) -> None:
        channel = self._channels.pop(name)
        self._set(channel.connection.fileno(), 0)
        channel.connection.close()

    def _set(self, fd: int, mask: int, callback: Callable[[int], None] | None = None) -> None:
        """Register the descriptor for these events; 0: for none."""
        known = self._events.get(fd, 0)
        if known and not mask:
            del self._events[fd]
            with suppress(KeyError):
                self._selector.unregister(fd)
        elif mask and not known:
            self._events[fd] = mask
            self._selector.register(fd, mask, callback)
        elif mask != known:
            self._events[fd] = mask
            self._selector.modify(fd, mask, callback)
