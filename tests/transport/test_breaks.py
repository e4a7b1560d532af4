"""Connections break again and again; nothing that is said is lost or heard twice."""

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
from tests.transport.test_link import NAME, W, until

EACH = MAX_UNACKNOWLEDGED - 100  # else some may be given up


class Relay:
    """Between a peer and the hub, at a port of its own; `cut()` ends all connections with what is on its way."""

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

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(700):
                    self.carried += 1
                    await asyncio.sleep(0.001)  # there is always something in between
                    sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        self._open -= both


@pytest.mark.parametrize("by_agent", [False, True])
def test_nothing_is_lost_or_heard_twice(by_agent, tmp_path):
    """Both speak all the time while their connection is cut two dozen times: all of it arrives, once, in order.

    So it is if the connection is that of a worker's agent.
    """

    async def story() -> None:
        keys, said, heard = Keys.make(), [], []
        server = Server(keys, lambda _, message: said.append(message), heartbeat=0.1)
        await server.start()
        relay = Relay(int(server.address.rpartition(":")[2]))
        await relay.start()
        address = f"tcp://127.0.0.1:{relay.port}"
        agent = Client(address, keys.for_clients(), "agent/a~1", agent_messages.ToAgent, heard.append, heartbeat=0.1)
        agent.start(relay=tmp_path)
        way = (tmp_path, None) if by_agent else (address, keys.for_clients())
        one = Client(*way, NAME, worker_messages.ToWorker, heard.append, heartbeat=0.1)
        one.start()
        one.send(ev.LeaveAcknowledged(W, 1, 0))
        await until(lambda: said)
        cuts = 0
        for number in range(1, EACH):
            one.send(ev.LeaveAcknowledged(W, 1, number))
            server.send(NAME, worker_messages.Abort(number, ""))
            await asyncio.sleep(0.002)
            if number % 40 == 0:
                at = relay.carried
                await until(lambda at=at: relay.carried > at + 5)
                relay.cut()
                cuts += 1
        await until(lambda: len(said) == EACH and len(heard) == EACH - 1)
        assert cuts > 20
        assert [message.commit for message in said] == list(range(EACH))
        assert [message.generation for message in heard] == list(range(1, EACH))
        await asyncio.to_thread(one.close)
        await asyncio.to_thread(agent.close)
        await relay.stop()
        await server.stop()

    asyncio.run(story())
