"""Connections break again and again: each message arrives once."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from nbelastic.protocol import agent_messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.transport.client import Client
from nbelastic.transport.delivery import MAX_UNACKNOWLEDGED
from nbelastic.transport.keys import Keys
from nbelastic.transport.server import Server
from tests.support.waiting import until_async as until
from tests.transport.link_ends import PEER, WORKER

COUNT = MAX_UNACKNOWLEDGED - 100  # else some may be discarded


class CuttableProxy:
    """Forwards connections to the server. `cut()` ends all of them with the bytes that are on their way."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()
        self.carried = 0

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        both = {writer, far_writer}
        self._open |= both

        async def forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(700):
                    self.carried += 1
                    await asyncio.sleep(0.001)  # so that bytes are always on their way
                    sink.write(data)
            sink.close()

        await asyncio.gather(forward(reader, far_writer), forward(far_reader, writer))
        self._open -= both


@pytest.mark.parametrize("by_agent", [False, True])
def test_nothing_is_lost_or_received_twice(by_agent, tmp_path):
    """Both ends send while their connection is cut two dozen times: each message arrives once, in order.

    The same holds if the connection is that of the worker's agent.
    """

    async def story() -> None:
        keys, received_by_server, received = Keys.make(), [], []
        server = Server(keys, lambda _, message: received_by_server.append(message), heartbeat=0.1)
        await server.start()
        proxy = CuttableProxy(int(server.address.rpartition(":")[2]))
        await proxy.start()
        address = f"tcp://127.0.0.1:{proxy.port}"
        agent = Client(address, keys.for_clients(), "agent/a~1", agent_messages.ToAgent, received.append, heartbeat=0.1)
        agent.start(relay=tmp_path)
        connection = (tmp_path, None) if by_agent else (address, keys.for_clients())
        client = Client(*connection, PEER, worker_messages.ToWorker, received.append, heartbeat=0.1)
        client.start()
        client.send(ev.LeaveAcknowledged(WORKER, 1, 0))
        await until(lambda: received_by_server)
        cuts = 0
        for number in range(1, COUNT):
            client.send(ev.LeaveAcknowledged(WORKER, 1, number))
            server.send(PEER, worker_messages.Abort(number, ""))
            await asyncio.sleep(0.002)
            if number % 40 == 0:
                before = proxy.carried
                await until(lambda before=before: proxy.carried > before + 5)
                proxy.cut()
                cuts += 1
        await until(lambda: len(received_by_server) == COUNT and len(received) == COUNT - 1)
        assert cuts > 20
        assert [message.commit for message in received_by_server] == list(range(COUNT))
        assert [message.generation for message in received] == list(range(1, COUNT))
        await asyncio.to_thread(client.close)
        await asyncio.to_thread(agent.close)
        await proxy.stop()
        await server.stop()

    asyncio.run(story())
