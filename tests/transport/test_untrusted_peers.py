"""Peers without a key, with invalid messages, or with messages that only another peer may send."""

import asyncio
import json
import logging
import random
import threading
from contextlib import ExitStack

import pytest
import zmq

from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.json_encoding import encode
from nbelastic.protocol.messages import HEAD
from nbelastic.transport.keys import Keys
from nbelastic.transport.sockets import MAX_MESSAGE
from tests.support.waiting import until_async as until
from tests.transport.link_ends import MESSAGE, PEER, WORKER, connected_client, raw_socket, running_driver


def test_an_agent_may_report_its_own_workers_only():
    """Events of a worker are accepted from its own host's agent, and from no other peer."""

    async def story():
        async with running_driver() as driver:
            async with (
                connected_client(driver, "agent/a", agent_messages.ToAgent) as mine,
                connected_client(driver, "agent/b", agent_messages.ToAgent) as other,
            ):
                other.send(ev.WorkerExited(WORKER, -9))
                other.send(agent_messages.AgentHello("b", 1, {}))
                await until(lambda: len(driver.received) == 1)
                mine.send(ev.WorkerExited(WORKER, -9))
                await until(lambda: len(driver.received) == 2)
                assert driver.received == [
                    ("agent/b", agent_messages.AgentHello("b", 1, {})),
                    ("agent/a", ev.WorkerExited(WORKER, -9)),
                ]
                assert sum(driver.server.dropped.values()) == 1

    asyncio.run(story())


@pytest.mark.parametrize("missing_key", ["no key at all", "another cluster's key", "the server's key but no client's"])
def test_a_peer_without_the_key_has_no_access(missing_key):
    """Its messages have no effect, and it does not receive what is sent to the name that it claims."""

    async def story():
        async with running_driver() as driver:
            other = Keys.make()
            keys = {
                "another cluster's key": other,
                "the server's key but no client's": Keys(
                    driver.keys.server_public, "", other.client_public, other.client_secret
                ),
            }.get(missing_key)
            with raw_socket(driver, keys=keys, curve=keys is not None) as socket:
                for _ in range(10):
                    socket.send(encode(MESSAGE))
                # Another peer's exchange takes long enough for a handshake.
                async with connected_client(driver, "agent/a", agent_messages.ToAgent) as agent:
                    agent.send(agent_messages.AgentHello("a", 1, {}))
                    await until(lambda: driver.received_from("agent/a"))
                    driver.server.send(PEER, worker_messages.Abort(1, "secret"))
                    driver.server.send("agent/a", agent_messages.StopAgent())
                    await until(lambda: agent.received)
                assert socket.poll(100) == 0
            assert driver.received_from(PEER) == []
            assert PEER not in driver.server.heard_at
            assert not driver.server.dropped

    asyncio.run(story())


INVALID = {
    "no JSON": b"{",
    "not text": bytes(range(256)),
    "JSON of another kind": b"[1, 2, 3]",
    "an unknown tag": b'{"type": "Explode"}',
    "no tag": b'{"worker": "a"}',
    "a field of another type": b'{"type": "WorkerFormed", "worker": 3, "generation": "one"}',
    "a message of the other direction": encode(worker_messages.StopProgram("job-1", "now")),
    "an agent's message": encode(agent_messages.AgentHello("a", 1, {})),
    "deeply nested": b"[" * 100_000,
    "deeply nested fields": b'{"type":"WorkerFormed","x":' + b'{"x":' * 50_000 + b"1" + b"}" * 50_001,
    "another worker's message": encode(ev.WorkerFormed(WorkerId("a", 0, 2), 1)),
    "another host's worker": encode(ev.WorkerFormed(WorkerId("b", 0, 1), 1)),
    "an infinite number": b'{"type":"WorkerFormed","worker":{"host":"a","slot":0,"incarnation":1},"generation":1e999}',
    "an integer of 84 bits": b'{"type":"WorkerFormed","worker":{"host":"a","slot":0,"incarnation":1},"generation":1%s}'
    % (b"0" * 25),
    "an integer that no float holds": b'{"type":"WorkerFormed","worker":{"host":"a","slot":0,"incarnation":1},"generation":-1%s}'
    % (b"0" * 400),
    "too long": b'{"type":"WorkerFormed","pad":"' + b"x" * MAX_MESSAGE + b'"}',
    "several frames": [encode(MESSAGE), encode(MESSAGE)],
    "many empty frames": [b""] * 50,
    "a bundle with too few heads": [b"worker/a/0#1\nworker/a/1#1", bytes(HEAD.size), encode(MESSAGE)],
}


@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_message_is_counted_logged_once_and_dropped(kind, caplog):
    """From a peer with the key it is counted, logged the first time, and has no effect. The peer can go on."""
    invalid = INVALID[kind]

    async def story():
        async with running_driver() as driver:
            with raw_socket(driver) as socket:
                for _ in range(3):
                    socket.send_multipart(invalid if isinstance(invalid, list) else [invalid])
                await until(lambda: sum(driver.server.dropped.values()) == 3)
                assert driver.received == []
                assert not driver.server.heard_at
                socket.send(encode(MESSAGE))
                await until(lambda: driver.received)
                assert driver.received == [(PEER, MESSAGE)]

    with caplog.at_level(logging.WARNING, "nbelastic.transport"):
        asyncio.run(story())
    assert len(caplog.records) == 1
    assert len(caplog.text) < 1000


@pytest.mark.parametrize("size", [3, 64])
def test_a_huge_message_ends_its_senders_connection(size):
    """A message of more than twice the limit is not read into memory: its connection is closed, and other peers go on."""

    async def story():
        async with running_driver() as driver:
            with raw_socket(driver) as socket:
                async with connected_client(driver, "agent/a", agent_messages.ToAgent) as agent:
                    socket.send(b"x" * (size * MAX_MESSAGE))
                    agent.send(agent_messages.AgentHello("a", 1, {}))
                    await until(lambda: driver.received_from("agent/a"))
                    assert driver.received_from(PEER) == []
                    assert not driver.server.dropped

    asyncio.run(story())


def test_a_message_that_is_too_long_for_the_driver_is_dropped_by_its_sender(caplog):
    """It costs one line. Sent, it would end the connection, and be retransmitted on each next one."""

    async def story():
        async with (
            running_driver() as driver,
            connected_client(driver, "agent/a", agent_messages.ToAgent) as agent,
        ):
            agent.send(agent_messages.AgentHello("x" * (3 * MAX_MESSAGE), 1, {}))
            agent.send(agent_messages.AgentHello("a", 1, {}))
            await until(lambda: driver.received_from("agent/a"))
            assert driver.received_from("agent/a") == [agent_messages.AgentHello("a", 1, {})]

    asyncio.run(story())
    assert "a message AgentHello of 3145" in caplog.text


@pytest.mark.parametrize(
    "name", [None, b"worker", b"root/a", b"\x00\xff\xfe", b"worker/\xff", b"agent/", b"worker/a/b/c#d"]
)
def test_a_peer_with_an_invalid_name_is_ignored(name):
    """Messages of a peer whose name has another form are counted and dropped."""

    async def story():
        async with running_driver() as driver:
            with raw_socket(driver, name) as socket:
                socket.send(encode(MESSAGE))
                await until(lambda: sum(driver.server.dropped.values()) == 1)
                assert driver.received == []
                assert not driver.server.heard_at

    asyncio.run(story())


def test_invalid_peers_cost_no_memory(caplog):
    """Hundreds of peers that send invalid messages leave one count and one line in the log."""

    async def story():
        async with running_driver() as driver:
            with ExitStack() as stack:
                for number in range(200):
                    stack.enter_context(raw_socket(driver, f"worker/x{number}/0#1", context=context)).send(b"nonsense")
                await until(lambda: sum(driver.server.dropped.values()) == 200, timeout=30)
            assert not driver.server.heard_at
            assert len(driver.server.dropped) == 1

    with caplog.at_level(logging.WARNING, "nbelastic.transport"), zmq.Context() as context:
        asyncio.run(story())
    assert len(caplog.records) == 1


def mutated_message(rng):
    """A valid message with a random change, or random bytes."""
    sources = [
        encode(MESSAGE),
        encode(ev.WorkerReady(WORKER, "job-1", 0, 0, True, "127.0.0.1:1")),
        encode(worker_messages.WorkerProgress(WORKER, 1, 2, {"loss": 0.5})),
        encode(messages.WorkerOutput(WORKER, "out", "text", 4)),
    ]
    data = bytearray(rng.choice(sources))
    match rng.randrange(7):
        case 0:
            return [rng.randbytes(rng.randrange(200))]
        case 1:
            return [bytes(data[: rng.randrange(len(data))])]
        case 2:
            for _ in range(rng.randrange(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            return [bytes(data)]
        case 3:
            at = rng.randrange(len(data))
            return [bytes(data[:at] + rng.randbytes(rng.randrange(1, 30)) + data[at:])]
        case 4:
            value = json.loads(bytes(data))
            value[rng.choice(list(value))] = rng.choice([None, -1, 1e300, "x", [], {}, 2**80, True, "\ud800"])
            return [json.dumps(value).encode()]
        case 5:
            return [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(2, 6))]
        case _:
            return [bytes(data) * rng.randrange(2, 4)]


def test_many_mutated_messages():
    """Of 12,000 mutated messages the server accepts only valid ones, and it receives all messages of another peer."""
    count, rng = 12_000, random.Random(7)

    async def story():
        async with running_driver() as driver:
            with raw_socket(driver) as socket:
                async with connected_client(driver, "agent/a", agent_messages.ToAgent) as agent:

                    def send_all():
                        for _ in range(count):
                            socket.send_multipart(mutated_message(rng))
                        socket.send(encode(ev.LeaveAcknowledged(WORKER, 9, 9)))

                    sender = threading.Thread(target=send_all)
                    sender.start()
                    for number in range(100):
                        agent.send(agent_messages.AgentSample("a", float(number), 1, {}))
                        await asyncio.sleep(0.001)
                    await until(lambda: ev.LeaveAcknowledged(WORKER, 9, 9) in driver.received_from(PEER), timeout=60)
                    sender.join()
                    agent.send(agent_messages.AgentHello("a", 1, {}))
                    await until(lambda: agent_messages.AgentHello("a", 1, {}) in driver.received_from("agent/a"))
                    assert len(driver.received_from("agent/a")) == 101
                    assert sum(driver.server.dropped.values()) > count * 0.8
                    assert set(driver.server.heard_at) <= {PEER, "agent/a"}
                    assert all(message.worker == WORKER for message in driver.received_from(PEER))

    asyncio.run(story())


def test_keys_are_not_printed():
    """`repr`, `str` and formatted errors of keys do not contain them, and clients do not get the server's secret."""
    keys = Keys.make()
    shown = f"{keys} {keys!r} {[keys]} {keys.for_clients()!r}"
    secrets = [getattr(keys, name) for name in keys.__struct_fields__]
    assert not any(secret in shown for secret in secrets)
    assert keys.for_clients().server_secret == ""
    assert Keys.make() != keys
