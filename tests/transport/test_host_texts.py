"""Hosts send texts that people see: in the event log, in the status and in a notebook."""

import asyncio
import typing

import msgspec
import pytest
from msgspec import inspect

from nbelastic.protocol import agent_messages, messages, node_messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.host_texts import KEPT, LINES, cleaned
from nbelastic.protocol.json_encoding import encode
from nbelastic.system.terminal_text import MOST_OF_A_LINE
from tests.support.waiting import until_async as until
from tests.transport.link_ends import PEER, WORKER, raw_socket, running_driver

HOSTILE = "\x1b]0;title\x07\x1b[31mred\r\n\x9b2J \u202e" + 100_000 * "x"
FROM_HOSTS = typing.get_args(agent_messages.FromAgent | worker_messages.FromWorker | node_messages.FromNode)


def hostile(kind):
    """A value of this type, as JSON has it, in which all texts are hostile."""
    match kind:
        case inspect.StrType():
            return HOSTILE
        case inspect.StructType():
            tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
            return tag | {field.encode_name: hostile(field.type) for field in kind.fields}
        case inspect.DictType():
            return {hostile(kind.key_type): hostile(kind.value_type)}
        case inspect.TupleType():
            return [hostile(each) for each in kind.item_types]
        case inspect.VarTupleType():
            return [hostile(kind.item_type)]
        case inspect.UnionType():
            return hostile(next(each for each in kind.types if not isinstance(each, inspect.NoneType)))
        case inspect.BoolType():
            return True
        case inspect.BytesType():
            return ""
        case inspect.IntType() | inspect.FloatType():
            return 1
    raise TypeError(kind)


def texts(value):
    """All texts in a message, except those that stay as they are."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in KEPT.get(type(value), ()) and name != LINES.get(type(value)):
                yield from texts(getattr(value, name))
    elif isinstance(value, dict):
        yield from texts((*value, *value.values()))
    elif isinstance(value, tuple):
        for each in value:
            yield from texts(each)


@pytest.mark.parametrize("kind", FROM_HOSTS, ids=lambda kind: kind.__name__)
def test_a_text_of_a_host_is_one_short_printable_line(kind):
    """In each message that an agent, a worker or a node may send. Only what programs print, tracebacks and stacks are kept."""
    arrived = msgspec.convert(hostile(inspect.type_info(kind)), kind)
    for text in texts(cleaned(arrived)):
        assert text.isprintable()
        assert len(text) <= MOST_OF_A_LINE
    assert cleaned(cleaned(arrived)) == cleaned(arrived)


def test_a_traceback_keeps_its_lines_and_colours():
    """And nothing that changes the terminal of its reader: its title, its clipboard, or what is above."""
    text = "Traceback:\n\tline \x1b[31m1\x1b[0m\nValueError: \x1b]52;c;aGE=\x07no\x1b[2J\x1b[A\r\x9b"
    shown = "Traceback:\n\tline \x1b[31m1\x1b[0m\nValueError: no"
    failed = sev.NodeFailed("a", 1, (sev.Failure(0, 0, 1, "no", text),))
    assert cleaned(failed).failures[0].traceback == shown
    for kind, name in LINES.items():
        sent = msgspec.structs.replace(msgspec.convert(hostile(inspect.type_info(kind)), kind), **{name: text})
        assert getattr(cleaned(sent), name) == shown


def test_what_a_worker_says_is_cleaned_before_the_driver_handles_it():
    """Its error is cut; what its program has printed arrives unchanged."""
    printed = messages.WorkerOutput(WORKER, "out", HOSTILE, len(HOSTILE), "job-1")

    async def story():
        async with running_driver() as driver:
            with raw_socket(driver) as socket:
                socket.send(encode(ev.WorkerRaised(WORKER, 1, True, HOSTILE)))
                socket.send(encode(printed))
                await until(lambda: len(driver.received) == 2)
                (_, raised), last = driver.received
                assert raised.error == f"red 2J  {'x' * MOST_OF_A_LINE}"[: MOST_OF_A_LINE - 1] + "…"
                assert last == (PEER, printed)

    asyncio.run(story())


def test_a_text_that_is_short_and_printable_stays_as_it_is():
    """A message without anything to clean is passed on as the same object."""
    message = ev.WorkerRaised(WORKER, 1, True, "ValueError: Größe 3 ≠ 4 → 日本")
    assert cleaned(message) is message
