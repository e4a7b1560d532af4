"""An attacker who records the bytes of a connection and sends them again has no access."""

import asyncio
import contextlib

from nbelastic.protocol import events as ev
from nbelastic.protocol import worker_messages
from nbelastic.transport.client import Client
from tests.support.waiting import until_async as until
from tests.transport.link_ends import PEER, WORKER, running_driver

MESSAGE = ev.WorkerFormed(WORKER, 1)


class RecordingProxy:
    """Forwards a peer's connection to the server, and records the bytes that the peer sends."""

    def __init__(self, port):
        self._port, self.received = port, bytearray()

    async def start(self):
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self):
        self._server.close()
        await self._server.wait_closed()

    async def _handle(self, reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)

        async def forward(source, sink, keep):
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    if keep:
                        self.received += data
                    sink.write(data)
            sink.close()

        await asyncio.gather(forward(reader, far_writer, True), forward(far_reader, writer, False))


def test_a_replayed_connection_has_no_effect():
    """All bytes of a worker's connection are sent again, at once or in pieces: no message is received twice."""

    async def story():
        async with running_driver() as driver:
            port = int(driver.server.address.rpartition(":")[2])
            proxy = RecordingProxy(port)
            await proxy.start()
            client = Client(
                f"tcp://127.0.0.1:{proxy.port}",
                driver.keys.for_clients(),
                PEER,
                worker_messages.ToWorker,
                lambda _: None,
            )
            client.start()
            client.send(MESSAGE)
            await until(lambda: driver.received == [(PEER, MESSAGE)])
            await asyncio.to_thread(client.close)
            await proxy.stop()
            assert b"CURVE" in proxy.received
            assert b"WorkerFormed" not in proxy.received  # it is encrypted
            assert driver.keys.client_secret.encode() not in proxy.received
            at = driver.server.heard_at[PEER]
            for piece in (len(proxy.received), 64, 1, 200):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.suppress(OSError, TimeoutError):
                    for begin in range(0, len(proxy.received), piece):
                        writer.write(proxy.received[begin : begin + piece])
                        await writer.drain()
                        await asyncio.sleep(0)
                    await asyncio.wait_for(reader.read(), 0.5)
                writer.close()
            assert driver.received == [(PEER, MESSAGE)]
            assert driver.server.heard_at[PEER] == at
            assert not driver.server.dropped

    asyncio.run(story())
