"""What was heard on the wire is of no use to whoever heard it."""

import asyncio
import contextlib

from nbelastic.protocol import events as ev
from nbelastic.protocol import worker_messages
from nbelastic.transport.client import Client
from tests.transport.test_link import NAME, W, place, until

GOOD = ev.WorkerFormed(W, 1)


class Relay:
    """Between a peer and the hub: passes everything on and keeps what the peer said."""

    def __init__(self, port):
        self._port, self.heard = port, bytearray()

    async def start(self):
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self):
        self._server.close()
        await self._server.wait_closed()

    async def _handle(self, reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)

        async def pump(source, sink, keep):
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    if keep:
                        self.heard += data
                    sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, far_writer, True), pump(far_reader, writer, False))


def test_a_replayed_connection_is_nobody():
    """All bytes of a real worker's connection, sent again, whole or one piece after the other: nothing is heard twice."""

    async def story():
        async with place() as there:
            port = int(there.server.address.rpartition(":")[2])
            relay = Relay(port)
            await relay.start()
            one = Client(
                f"tcp://127.0.0.1:{relay.port}",
                there.keys.for_clients(),
                NAME,
                worker_messages.ToWorker,
                lambda _: None,
            )
            one.start()
            one.send(GOOD)
            await until(lambda: there.heard == [(NAME, GOOD)])
            await asyncio.to_thread(one.close)
            await relay.stop()
            assert b"CURVE" in relay.heard
            assert b"WorkerFormed" not in relay.heard  # nor can it be read
            assert there.keys.client_secret.encode() not in relay.heard
            at = there.server.heard_at[NAME]
            for piece in (len(relay.heard), 64, 1, 200):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.suppress(OSError, TimeoutError):
                    for begin in range(0, len(relay.heard), piece):
                        writer.write(relay.heard[begin : begin + piece])
                        await writer.drain()
                        await asyncio.sleep(0)
                    await asyncio.wait_for(reader.read(), 0.5)
                writer.close()
            assert there.heard == [(NAME, GOOD)]
            assert there.server.heard_at[NAME] == at
            assert not there.server.dropped

    asyncio.run(story())
