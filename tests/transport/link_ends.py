"""Both ends of the link for tests: a running server, connected clients, and bare sockets that send anything."""

import asyncio
from contextlib import asynccontextmanager, contextmanager, nullcontext

import zmq

from nbelastic.protocol import events as ev
from nbelastic.protocol import worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.transport.client import Client
from nbelastic.transport.keys import Keys
from nbelastic.transport.server import Server
from nbelastic.transport.sockets import HEARTBEAT

WORKER = WorkerId("a", 0, 1)
PEER = f"worker/{WORKER}"
MESSAGE = ev.WorkerFormed(WORKER, 1)


class RunningDriver:
    """The driver's server, and the messages that it received."""

    def __init__(self, heartbeat):
        self.keys = Keys.make()
        self.received = []
        self.server = Server(self.keys, lambda peer, message: self.received.append((peer, message)), heartbeat)

    def received_from(self, peer):
        return [message for sender, message in self.received if sender == peer]


@asynccontextmanager
async def running_driver(heartbeat=HEARTBEAT):
    driver = RunningDriver(heartbeat)
    await driver.server.start()
    try:
        yield driver
    finally:
        await driver.server.stop()


@asynccontextmanager
async def connected_client(driver, name=PEER, accepts=worker_messages.ToWorker, keys=None, heartbeat=HEARTBEAT):
    """A client as agents and workers have one; `.received` has the messages that it received."""
    received = []
    client = Client(
        driver.server.address, keys or driver.keys.for_clients(), name, accepts, received.append, heartbeat=heartbeat
    )
    client.received = received
    client.start()
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)  # in a thread: its last messages are received by this loop


@contextmanager
def raw_socket(driver, name=PEER, keys=None, curve=True, context=None):
    """A bare socket, to send what no client would send."""
    keys = keys or driver.keys.for_clients()
    with nullcontext(context) if context else zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 100_000)
        if name is not None:
            socket.setsockopt(zmq.IDENTITY, name if isinstance(name, bytes) else name.encode())
        if curve:
            socket.curve_serverkey = keys.server_public.encode()
            socket.curve_publickey = keys.client_public.encode()
            socket.curve_secretkey = keys.client_secret.encode()
        socket.connect(driver.server.address)
        yield socket


async def is_silent(server):
    """Whether the peer sends nothing, not even a heartbeat, for the time of eight heartbeats."""
    last = server.heard_at[PEER]
    await asyncio.sleep(0.4)
    return server.heard_at[PEER] == last
