"""The one wire: who may speak, what is heard, and what nonsense costs."""

import asyncio
import json
import logging
import random
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from itertools import pairwise

import pytest
import zmq

from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.json_encoding import encode
from nbelastic.transport.client import Client
from nbelastic.transport.delivery import MAX_UNACKNOWLEDGED, RETRANSMIT_BATCH, WINDOW, Delivery
from nbelastic.transport.keys import Keys
from nbelastic.transport.server import Server
from nbelastic.transport.sockets import BATCH, HEARTBEAT, MAX_MESSAGE
from tests.support.waiting import until_async as until

W = WorkerId("a", 0, 1)
NAME = f"worker/{W}"
GOOD = ev.WorkerFormed(W, 1)


class Place:
    """A hub, and what it heard."""

    def __init__(self, heartbeat):
        self.keys = Keys.make()
        self.heard = []
        self.server = Server(self.keys, lambda peer, message: self.heard.append((peer, message)), heartbeat)

    def of(self, peer):
        return [message for who, message in self.heard if who == peer]


@asynccontextmanager
async def place(heartbeat=HEARTBEAT):
    there = Place(heartbeat)
    await there.server.start()
    try:
        yield there
    finally:
        await there.server.stop()


@asynccontextmanager
async def client(there, name=NAME, accepts=worker_messages.ToWorker, keys=None, heartbeat=HEARTBEAT):
    """A peer as agents and workers are; `.heard` is what reached it."""
    heard = []
    one = Client(
        there.server.address, keys or there.keys.for_clients(), name, accepts, heard.append, heartbeat=heartbeat
    )
    one.heard = heard
    one.start()
    try:
        yield one
    finally:
        await asyncio.to_thread(one.close)  # it says its last words, and this loop has to hear them


@contextmanager
def stranger(there, name=NAME, keys=None, curve=True, context=None):
    """A bare socket, to send what no Spoke would."""
    keys = keys or there.keys.for_clients()
    with nullcontext(context) if context else zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 100_000)
        if name is not None:
            socket.setsockopt(zmq.IDENTITY, name if isinstance(name, bytes) else name.encode())
        if curve:
            socket.curve_serverkey = keys.server_public.encode()
            socket.curve_publickey = keys.client_public.encode()
            socket.curve_secretkey = keys.client_secret.encode()
        socket.connect(there.server.address)
        yield socket


def test_messages_go_both_ways_in_order():
    """What a worker says reaches the driver in order, and what the driver says reaches the worker."""

    async def story():
        async with place() as there:
            async with client(there) as worker:
                for commit in range(100):
                    worker.send(ev.LeaveAcknowledged(W, 1, commit))
                await until(lambda: len(there.heard) == 100)
                assert [message.commit for message in there.of(NAME)] == list(range(100))
                for generation in range(100):
                    there.server.send(NAME, worker_messages.Abort(generation, "because"))
                await until(lambda: len(worker.heard) == 100)
                assert [message.generation for message in worker.heard] == list(range(100))

    asyncio.run(story())


def test_a_message_before_anybody_listens_is_kept():
    """A worker that speaks before its connection stands is heard all the same."""

    async def story():
        async with place() as there:
            one = Client(there.server.address, there.keys.for_clients(), NAME, worker_messages.ToWorker, lambda _: None)
            one.send(GOOD)
            one.start()
            await until(lambda: there.of(NAME) == [GOOD])
            await asyncio.to_thread(one.close)

    asyncio.run(story())


def test_closing_sends_what_is_queued():
    """The last words of an agent that ends arrive."""

    async def story():
        async with place() as there:
            async with client(there) as worker:
                worker.send(GOOD)
                await until(lambda: there.heard)  # the connection stands: there is half a second for the last words
                worker.send(ev.WorkerSucceeded(W, 1))
            await until(lambda: there.of(NAME) == [GOOD, ev.WorkerSucceeded(W, 1)])

    asyncio.run(story())


def test_an_agent_may_speak_for_its_workers_only():
    """News of a worker counts from its own host's agent, and from nobody else's."""

    async def story():
        async with place() as there:
            async with (
                client(there, "agent/a", agent_messages.ToAgent) as mine,
                client(there, "agent/b", agent_messages.ToAgent) as other,
            ):
                other.send(ev.WorkerExited(W, -9))
                other.send(agent_messages.AgentHello("b", 1, {}))
                await until(lambda: len(there.heard) == 1)
                mine.send(ev.WorkerExited(W, -9))
                await until(lambda: len(there.heard) == 2)
                assert there.heard == [
                    ("agent/b", agent_messages.AgentHello("b", 1, {})),
                    ("agent/a", ev.WorkerExited(W, -9)),
                ]
                assert sum(there.server.dropped.values()) == 1

    asyncio.run(story())


def test_heartbeats_go_both_ways():
    """Without a message both ends go on hearing each other."""

    async def story():
        async with place(0.05) as there:
            async with client(there, heartbeat=0.05) as worker:
                worker.send(GOOD)
                await until(lambda: NAME in there.server.heard_at)
                at, back = there.server.heard_at[NAME], worker.heard_at
                await until(lambda: there.server.heard_at[NAME] > at and worker.heard_at > back)
                assert there.heard == [(NAME, GOOD)]

    asyncio.run(story())


async def silent(server):
    """Whether the peer says nothing, not even a heartbeat, for the time of eight."""
    last = server.heard_at[NAME]
    await asyncio.sleep(0.4)
    return server.heard_at[NAME] == last


def test_silence_is_seen():
    """`heard_at` moves while a peer is there, and stands still when it has gone; `forget` ends that."""

    async def story():
        async with place(0.05) as there:
            async with client(there, heartbeat=0.05) as worker:
                worker.send(GOOD)
                await until(lambda: NAME in there.server.heard_at)
                at = there.server.heard_at[NAME]
                await until(lambda: there.server.heard_at[NAME] > at)
            await until(lambda: silent(there.server), what="its last words to have come")
            there.server.forget(NAME)
            assert not there.server.heard_at

    asyncio.run(story())


def test_a_returning_peer_takes_its_name_over():
    """A peer that connects a second time under its name is the one that hears from then on."""

    async def story():
        async with place() as there:
            async with client(there) as first:
                first.send(GOOD)
                await until(lambda: len(there.heard) == 1)
                async with client(there) as second:
                    second.send(GOOD)
                    await until(lambda: len(there.heard) == 2)
                    there.server.send(NAME, worker_messages.Abort(1, ""))
                    await until(lambda: second.heard)
                    assert not first.heard

    asyncio.run(story())


def test_sending_to_nobody_is_harmless():
    """A message to a peer that is not there is dropped without a word."""

    async def story():
        async with place() as there:
            there.server.send("worker/nobody/0#1", worker_messages.Abort(1, ""))
            async with client(there) as worker:
                worker.send(GOOD)
                await until(lambda: there.heard)

    asyncio.run(story())


@pytest.mark.parametrize("who", ["no key at all", "another cluster's key", "the server's key but no client's"])
def test_without_the_key_nobody_gets_anything(who):
    """Such a peer's words change nothing, and what is sent to the name it claims does not reach it."""

    async def story():
        async with place() as there:
            other = Keys.make()
            keys = {
                "another cluster's key": other,
                "the server's key but no client's": Keys(
                    there.keys.server_public, "", other.client_public, other.client_secret
                ),
            }.get(who)
            with stranger(there, keys=keys, curve=keys is not None) as socket:
                for _ in range(10):
                    socket.send(encode(GOOD))
                async with client(there, "agent/a", agent_messages.ToAgent) as good:  # time enough for a handshake
                    good.send(agent_messages.AgentHello("a", 1, {}))
                    await until(lambda: there.of("agent/a"))
                    there.server.send(NAME, worker_messages.Abort(1, "secret"))
                    there.server.send("agent/a", agent_messages.StopAgent())
                    await until(lambda: good.heard)
                assert socket.poll(100) == 0
            assert there.of(NAME) == []
            assert NAME not in there.server.heard_at
            assert not there.server.dropped

    asyncio.run(story())


NONSENSE = {
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
    "another worker's word": encode(ev.WorkerFormed(WorkerId("a", 0, 2), 1)),
    "another host's worker": encode(ev.WorkerFormed(WorkerId("b", 0, 1), 1)),
    "an infinite number": b'{"type":"WorkerFormed","worker":{"host":"a","slot":0,"incarnation":1},"generation":1e999}',
    "too long": b'{"type":"WorkerFormed","pad":"' + b"x" * MAX_MESSAGE + b'"}',
    "several frames": [encode(GOOD), encode(GOOD)],
    "many empty frames": [b""] * 50,
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_counted_logged_once_and_dropped(kind, caplog):
    """From a peer with the key: it is counted, logged the first time, changes nothing, and the peer can go on."""
    nonsense = NONSENSE[kind]

    async def story():
        async with place() as there:
            with stranger(there) as socket:
                for _ in range(3):
                    socket.send_multipart(nonsense if isinstance(nonsense, list) else [nonsense])
                await until(lambda: sum(there.server.dropped.values()) == 3)
                assert there.heard == []
                assert not there.server.heard_at
                socket.send(encode(GOOD))
                await until(lambda: there.heard)
                assert there.heard == [(NAME, GOOD)]

    with caplog.at_level(logging.WARNING, "nbelastic.transport"):
        asyncio.run(story())
    assert len(caplog.records) == 1
    assert len(caplog.text) < 1000


def test_a_flood_in_one_message_costs_the_sender_its_connection():
    """What is far too long is not even read into memory: the connection is closed, and nobody else notices."""

    async def story():
        async with place() as there:
            with stranger(there) as socket:
                async with client(there, "agent/a", agent_messages.ToAgent) as good:
                    socket.send(b"x" * (64 * MAX_MESSAGE))
                    good.send(agent_messages.AgentHello("a", 1, {}))
                    await until(lambda: there.of("agent/a"))
                    assert there.of(NAME) == []

    asyncio.run(story())


@pytest.mark.parametrize(
    "name", [None, b"worker", b"root/a", b"\x00\xff\xfe", b"worker/\xff", b"agent/", b"worker/a/b/c#d"]
)
def test_a_strange_name_is_nobody(name):
    """A peer whose name is none of ours can say nothing."""

    async def story():
        async with place() as there:
            with stranger(there, name) as socket:
                socket.send(encode(GOOD))
                await until(lambda: sum(there.server.dropped.values()) == 1)
                assert there.heard == []
                assert not there.server.heard_at

    asyncio.run(story())


def test_strangers_cost_no_memory(caplog):
    """Hundreds of names that talk nonsense leave no trace but one count, and one line in the log."""

    async def story():
        async with place() as there:
            with ExitStack() as stack:
                for number in range(200):
                    stack.enter_context(stranger(there, f"worker/x{number}/0#1", context=context)).send(b"nonsense")
                await until(lambda: sum(there.server.dropped.values()) == 200, timeout=30)
            assert not there.server.heard_at
            assert len(there.server.dropped) == 1

    with caplog.at_level(logging.WARNING, "nbelastic.transport"), zmq.Context() as context:
        asyncio.run(story())
    assert len(caplog.records) == 1


def mutated(rng):
    """A valid message with something broken, or pure noise."""
    sources = [
        encode(GOOD),
        encode(ev.WorkerReady(W, "job-1", 0, 0, True, "127.0.0.1:1")),
        encode(worker_messages.WorkerProgress(W, 1, 2, {"loss": 0.5})),
        encode(messages.WorkerOutput(W, "out", "text", 4)),
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


def test_ten_thousand_broken_messages():
    """After 12,000 mutated messages the hub has taken only what is valid, and a good peer's messages still arrive."""
    count, rng = 12_000, random.Random(7)

    async def story():
        async with place() as there:
            with stranger(there) as socket:
                async with client(there, "agent/a", agent_messages.ToAgent) as good:

                    def pour():
                        for _ in range(count):
                            socket.send_multipart(mutated(rng))
                        socket.send(encode(ev.LeaveAcknowledged(W, 9, 9)))

                    sender = threading.Thread(target=pour)
                    sender.start()
                    for number in range(100):
                        good.send(agent_messages.AgentSample("a", float(number), 1, {}))
                        await asyncio.sleep(0.001)
                    await until(lambda: ev.LeaveAcknowledged(W, 9, 9) in there.of(NAME), timeout=60)
                    sender.join()
                    good.send(agent_messages.AgentHello("a", 1, {}))
                    await until(lambda: agent_messages.AgentHello("a", 1, {}) in there.of("agent/a"))
                    assert len(there.of("agent/a")) == 101
                    assert sum(there.server.dropped.values()) > count * 0.8
                    assert set(there.server.heard_at) <= {NAME, "agent/a"}
                    assert all(message.worker == W for message in there.of(NAME))

    asyncio.run(story())


def test_a_spoke_drops_what_it_does_not_know(caplog):
    """A worker counts and drops what is none of its messages, and hears the next one."""

    async def story():
        async with place() as there:
            async with client(there) as worker:
                worker.send(GOOD)
                await until(lambda: there.heard)
                for frame in (b"{", b'{"type":"Retire"}', b"[" * 100_000, b"\xff\xfe"):
                    there.server._send_or_bundle(NAME, frame)
                there.server.send(NAME, worker_messages.Abort(1, ""))
                await until(lambda: worker.heard)
                assert worker.heard == [worker_messages.Abort(1, "")]
                assert worker.dropped == 4

    with caplog.at_level(logging.WARNING, "nbelastic.transport"):
        asyncio.run(story())
    assert len(caplog.records) == 1


def test_a_failing_receiver_does_not_silence_the_link(caplog):
    """An error in what is done with a message is logged; the next message is heard."""

    async def story():
        heard = []

        def fail_once(*message):
            heard.append(message)
            if len(heard) == 1:
                raise ValueError("a bug")

        there = Place(1.0)
        there.server = Server(there.keys, fail_once)
        await there.server.start()
        async with client(there) as worker:
            worker._on_message = fail_once
            worker.send(GOOD)
            worker.send(GOOD)
            await until(lambda: len(heard) == 2)
            heard.clear()
            there.server.send(NAME, worker_messages.Abort(1, ""))
            there.server.send(NAME, worker_messages.Abort(1, ""))
            await until(lambda: len(heard) == 2)
        await there.server.stop()

    with caplog.at_level(logging.ERROR, "nbelastic.transport"):
        asyncio.run(story())
    assert caplog.text.count("ValueError: a bug") == 2


def test_text_that_is_no_unicode_can_be_said():
    """A lone surrogate (from a file name, say) in an error's text does not keep the message from arriving."""

    async def story():
        async with place() as there:
            async with client(there) as worker:
                worker.send(ev.WorkerRaised(W, 1, True, "no such file: '\udcff'"))
                await until(lambda: there.heard)
                assert there.of(NAME)[0].error.startswith("no such file")

    asyncio.run(story())


def test_odd_text_can_be_written_down():
    """So it is with the event log, which is written in the same way: text that is no Unicode becomes `?`."""
    line = {"at": 1.5, "event": {"type": "ProgramEnded", "error": "\udcff", "more": ["a", None]}}
    assert json.loads(encode(line)) == {"at": 1.5, "event": {"type": "ProgramEnded", "error": "?", "more": ["a", None]}}


def test_keys_never_show():
    """Neither `repr` nor `str` of keys, nor a formatted error, tells them; clients do not get the server's secret."""
    keys = Keys.make()
    shown = f"{keys} {keys!r} {[keys]} {keys.for_clients()!r}"
    secrets = [getattr(keys, name) for name in keys.__struct_fields__]
    assert not any(secret in shown for secret in secrets)
    assert keys.for_clients().server_secret == ""
    assert Keys.make() != keys


def test_others_have_their_turn_while_messages_queue():
    """However many messages wait, after one batch of them everything else in the driver's loop runs."""

    async def story():
        async with place() as there:
            count, turns = 20_000, []
            with stranger(there) as socket:
                socket.send(encode(ev.LeaveAcknowledged(W, 1, 0)))  # the handshake needs this loop
                await until(lambda: there.heard)
                for number in range(1, count):  # none is read meanwhile, as by a process that is stopped
                    socket.send(encode(ev.LeaveAcknowledged(W, 1, number)))
                while len(there.heard) < count:
                    turns.append(len(there.heard))
                    await asyncio.sleep(0)
            batches = [after - before for before, after in pairwise([*turns, count])]
            assert max(batches) <= BATCH
            assert [message.commit for message in there.of(NAME)] == list(range(count))

    asyncio.run(story())


def test_reports_wait_while_words_queue():
    """Words are heard first and all of them, of the reports that queue with them few; the newest is the last heard."""

    async def story():
        async with place() as there:
            count, turns, delivery = 5000, 0, Delivery(1.0, 7)
            with stranger(there) as socket:
                socket.send(encode(GOOD))
                await until(lambda: there.heard)
                for number in range(1, count + 1):
                    delivery.enqueue(encode(ev.LeaveAcknowledged(W, 1, number)))
                    if delivery.pending < WINDOW:
                        socket.send_multipart(delivery.due(0.0)[0])
                    socket.send_multipart([delivery.head(), encode(worker_messages.WorkerProgress(W, 1, number, {}))])
                words = [ev.LeaveAcknowledged(W, 1, number) for number in range(1, WINDOW)]
                last = worker_messages.WorkerProgress(W, 1, count, {})
                while last not in there.of(NAME):
                    turns += 1
                    await asyncio.sleep(0)
            heard = there.of(NAME)[1:]
            assert [message for message in heard if isinstance(message, ev.LeaveAcknowledged)] == words
            reports = [message.commit for message in heard if isinstance(message, worker_messages.WorkerProgress)]
            assert reports == sorted(set(reports))
            assert len(reports) <= turns  # there are many, if this loop is faster than ZeroMQ
            assert len(reports) < count

    asyncio.run(story())


def test_a_stopped_driver_is_not_flooded():
    """A driver that does not read gets so many words and no more, and the first few again; and no reports."""

    async def story():
        async with place(heartbeat=0.1) as there:
            one = Client(
                there.server.address,
                there.keys.for_clients(),
                NAME,
                worker_messages.ToWorker,
                lambda _: None,
                heartbeat=0.1,
            )
            sent = count_sent(one)
            one.start()
            one.send(GOOD)
            await until(lambda: there.heard)
            words = [ev.LeaveAcknowledged(W, 1, number) for number in range(300)]
            for word in words:
                one.send(word)

            def stand_still(times):
                """Until the first word has gone out so often: meanwhile this loop, and with it the driver, does nothing."""
                one.report(worker_messages.WorkerProgress(W, 1, times, {}))
                while sent["LeaveAcknowledged"][encode(words[0])] < times:
                    one.report(worker_messages.WorkerProgress(W, 1, times, {}))
                    time.sleep(0.001)
                return sent["WorkerProgress"].total()

            stand_still(2)  # by now it has read what the driver had said before
            assert stand_still(3) == stand_still(4)
            assert sent["LeaveAcknowledged"].total() <= WINDOW + 3 * RETRANSMIT_BATCH
            await until(lambda: words[-1] in there.of(NAME))
            assert [message for message in there.of(NAME) if isinstance(message, ev.LeaveAcknowledged)] == words
            assert sent["LeaveAcknowledged"].total() <= len(words) + WINDOW + 3 * RETRANSMIT_BATCH
            await until(lambda: worker_messages.WorkerProgress(W, 1, 4, {}) in there.of(NAME))
            await asyncio.to_thread(one.close)

    asyncio.run(story())


def count_sent(one):
    """How often a spoke sends each of its messages, by kind and content."""
    sent = defaultdict(Counter)
    send_all = one._send_all

    def counted(socket, messages):
        for _, frame in messages:
            if frame:
                sent[json.loads(frame)["type"]][frame] += 1
        send_all(socket, messages)

    one._send_all = counted
    return sent


def test_a_report_that_did_not_go_out_is_replaced():
    """Of many reports that are made before there is a driver the newest of each kind arrives, and no other."""

    async def story():
        async with place() as there:
            one = Client(there.server.address, there.keys.for_clients(), NAME, worker_messages.ToWorker, lambda _: None)
            for number in range(100):
                one.report(worker_messages.WorkerProgress(W, 1, number, {}))
                one.report(worker_messages.StackShown(W, number, "", ""))
            one.start()
            await until(lambda: len(there.heard) == 2)
            one.send(GOOD)
            await until(lambda: GOOD in there.of(NAME))
            assert len(there.heard) == 3
            assert worker_messages.WorkerProgress(W, 1, 99, {}) in there.of(NAME)
            assert worker_messages.StackShown(W, 99, "", "") in there.of(NAME)
            await asyncio.to_thread(one.close)

    asyncio.run(story())


def test_what_is_heard_twice_is_not_decoded_twice():
    """A message that was sent again is dropped by its number: nonsense in its place is not even looked at."""

    async def story():
        async with place() as there:
            with stranger(there) as socket:
                delivery = Delivery(1.0, 7)
                delivery.enqueue(encode(GOOD))
                ((head, frame),) = delivery.due(0.0)
                socket.send_multipart([head, frame])
                await until(lambda: there.heard)
                socket.send_multipart([head, b"nonsense"])
                delivery.enqueue(encode(ev.LeaveAcknowledged(W, 1, 1)))
                socket.send_multipart(delivery.due(0.0)[0])
                await until(lambda: len(there.heard) == 2)
                assert not there.server.dropped

    asyncio.run(story())


def test_who_is_forgotten_stays_forgotten():
    """The last word of one that is dead is heard, but nothing is kept of it, and no heartbeat goes to it."""

    async def story():
        async with place() as there:
            dead = set()
            there.server._is_known = lambda peer: peer not in dead
            with stranger(there) as socket:
                delivery = Delivery(1.0, 7)
                delivery.enqueue(encode(GOOD))
                socket.send_multipart(delivery.due(0.0)[0])
                await until(lambda: there.heard)
                dead.add(NAME)
                there.server.forget(NAME)
                delivery.enqueue(encode(ev.WorkerSucceeded(W, 1)))
                socket.send_multipart(delivery.due(0.0)[0])
                await until(lambda: len(there.heard) == 2)
                assert not there.server.heard_at
                assert not there.server._deliveries

    asyncio.run(story())


def test_words_that_are_given_up_are_told(caplog):
    """To a driver that is away so many words wait and no more; the log says once that the oldest are lost."""

    async def story():
        async with place() as there:
            await there.server.stop()
            one = Client(there.server.address, there.keys.for_clients(), NAME, worker_messages.ToWorker, lambda _: None)
            one.start()
            for number in range(MAX_UNACKNOWLEDGED + 5):
                one.send(ev.LeaveAcknowledged(W, 1, number))
            await until(lambda: one._delivery.discarded == 5)
            assert one._delivery.pending == MAX_UNACKNOWLEDGED
            await asyncio.to_thread(one.close)

    with caplog.at_level(logging.WARNING, "nbelastic.transport"):
        asyncio.run(story())
    assert [record.message for record in caplog.records] == [
        "the driver acknowledges nothing: the oldest messages are discarded"
    ]
