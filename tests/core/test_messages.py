"""Messages are the same after encoding and decoding, and each direction accepts only its own messages."""

from __future__ import annotations

import typing

import msgspec
import pytest

from nbelastic.core import commands as cmd
from nbelastic.core import script_commands as scmd
from nbelastic.core.reasons import Missing, Reason
from nbelastic.protocol import (
    agent_messages,
    cell_messages,
    code_messages,
    ids,
    messages,
    node_messages,
    rank_reports,
    status,
    worker_messages,
)
from nbelastic.protocol import events as ev
from nbelastic.protocol import program_events as pev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.chaos import FaultKind
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.ids import HostSpec, Interface, WorkerId
from nbelastic.protocol.timeouts import Timeouts

W = WorkerId("gpu-1.example.org", 3, 12)
SPEC = HostSpec("::1", 4, "me")
FAILURE = sev.Failure(3, 1, -9, "SIGKILL", "Traceback …\n", 0.5)
SEAT = sev.Assignment("gpu-1", 4, "trainer")
FILL = {
    str: "text ü \n",
    bytes: b"\x00\xff",
    messages.Blob | None: messages.Blob(3, b"\x00\xff\n", "/run/one"),
    messages.Pushed | None: messages.Pushed(("data", "lr"), messages.Blob(3, path="/run/one")),
    cell_messages.Pull | None: cell_messages.Pull("job-1", "model", "state-1", "/run/one"),
    tuple[str, int, int] | None: ("/runs/one", 100, 3),
    int: 7,
    float: 0.5,
    bool: True,
    FaultKind: "kill",
    worker_messages.Checkpoint | None: None,
    WorkerId: W,
    HostSpec: SPEC,
    int | None: 9,
    bool | None: True,
    float | None: 1.5,
    WorkerId | None: W,
    dict[str, float]: {"loss": 0.25},
    dict[str, float | None]: {"loss": 0.25, "accuracy": None},
    dict[str, str]: {"torch": "2"},
    dict[str, tuple[float, int]]: {str(W): (99.5, 1 << 33)},
    tuple[int, ...]: (1, 2),
    tuple[str, ...]: ("10.0.0.1", "fd00::1"),
    tuple[Interface, ...]: (Interface("eth0", "10.0.0.1"), Interface("ib0", "fd00::1")),
    tuple[WorkerId, ...]: (W, WorkerId("b", 0, 1)),
    tuple[HostSpec, ...]: (SPEC,),
    tuple[tuple[str, int], ...]: (("a", 2), ("b", 1)),
    tuple[tuple[WorkerId, int], ...]: ((W, 4711),),
    tuple[tuple[int, dict[str, float | None]], ...]: ((8, {"loss": 0.25}), (9, {"loss": None})),
    dict[int, int]: {0: 3, 1: 1},
    dict[str, str] | None: {"einops": "0.8.2"},
    ev.WorkerReady | ev.WorkerRaised | ev.WorkerSucceeded | None: ev.WorkerRaised(
        W, 7, intact=True, error="ValueError: no"
    ),
    tuple[tuple[int, int, int], ...]: ((3, 0, 7), (9, 4, 1)),
    tuple[status.GpuStatus, ...]: (
        status.GpuStatus("GPU-1a", 97, 71_000, 81_559, 71),
        status.GpuStatus("MIG-2", 0, 1, 2),
    ),
    cmd.FormWorld: cmd.FormWorld(7, (W,), "127.0.0.1:1", 0, (1,)),
    sev.Terms: sev.Terms(2, 4, 9.0),
    Limits: Limits(2, 9, timeouts=Timeouts(node=3.0)),
    sev.Failure: FAILURE,
    sev.Failure | None: FAILURE,
    tuple[sev.Failure, ...]: (FAILURE,),
    tuple[sev.Assignment, ...]: (SEAT, sev.Assignment("b", 1, "reader")),
    tuple[tuple[float, int], ...]: ((99.5, 1 << 33),),
    tuple[tuple[int, int, int, int], ...]: ((0, 5, 0, 4), (4, 5, 0, 1)),
    Reason | None: Reason("too-few", 1, 2, missing=(Missing("node", "b"),)),
    agent_messages.Script: agent_messages.Script(
        "job-1", "/home/me/train.py", ("--generations", "10"), environment={"A": "b"}
    ),
    worker_messages.Formation: worker_messages.Formation(7, (("a", (0, 2)), ("b", (1,))), "127.0.0.1:1", 0, ((1, 3),)),
    worker_messages.Program: worker_messages.Program("job-1", "/logs/one", source="1 + 1", number=9),
    tuple[tuple[str, tuple[int, ...]], ...]: (("a", (0, 2)), ("b", (1,))),
    tuple[tuple[int, int], ...]: ((1, 3),),
    tuple[ids.Gpu, ...]: (ids.Gpu("GPU-1a", "NVML has reported Xid 79"), ids.Gpu("MIG-2")),
    code_messages.Code: code_messages.Code(("/home/me",), (code_messages.CodeFile(0, "a/b.py", "0" * 64, 9),)),
    code_messages.SomePieces: ((0, 0, 1 << 18),),
    rank_reports.ReplicaHashes | None: rank_reports.ReplicaHashes(7, 1 << 31, 40, {41: 1 << 31, 42: 0}),
    rank_reports.OwnTime | None: rank_reports.OwnTime(7, 100.5, 40.5, "train.py:88 in load"),
    worker_messages.Copies | None: worker_messages.Copies(9, 40, 0.5, 0.1, (2,), (3,), shared=True),
}


def kinds(base: type) -> list[type]:
    named = {
        **vars(ids),
        **vars(ev),
        **vars(cmd),
        **vars(sev),
        **vars(pev),
        **vars(scmd),
        **vars(messages),
        **vars(agent_messages),
        **vars(code_messages),
        **vars(worker_messages),
        **vars(cell_messages),
        **vars(node_messages),
    }.values()
    found = [kind for kind in named if isinstance(kind, type) and issubclass(kind, base) and kind is not base]
    return list(dict.fromkeys(found))


def sample(kind: type, *, least: bool = False):
    """A message with every field filled, or with only the `least` fields: those without a default."""
    hints = typing.get_type_hints(kind)
    fields = [f for f in msgspec.structs.fields(kind) if not (least and not f.required)]
    return kind(**{f.name: FILL[hints[f.name]] for f in fields})


ALL = kinds(ev.Event) + kinds(cmd.Command) + kinds(messages.Message)
UNIONS = {
    "FromAgent": agent_messages.FromAgent,
    "FromWorker": worker_messages.FromWorker,
    "FromNode": node_messages.FromNode,
    "ToNode": node_messages.ToNode,
    "ToAgent": agent_messages.ToAgent,
    "ToWorker": worker_messages.ToWorker,
}
ON_WIRE = [(name, kind) for name, union in UNIONS.items() for kind in typing.get_args(union)]


@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize(("direction", "kind"), ON_WIRE, ids=lambda x: getattr(x, "__name__", x))
def test_a_message_comes_back_as_it_went(direction, kind, least):
    """Each message, encoded as JSON, is decoded by its direction's union as the same message."""
    message = sample(kind, least=least)
    assert msgspec.json.decode(msgspec.json.encode(message), type=UNIONS[direction]) == message


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_events_and_commands_can_be_logged_and_read_again(kind):
    """Every event and command survives the event log's JSON lines, so that a log can be replayed as a test."""
    message = sample(kind)
    assert msgspec.json.decode(msgspec.json.encode(message), type=kind) == message


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_messages_are_frozen(kind):
    """A message cannot be changed."""
    message = sample(kind)
    for field in msgspec.structs.fields(kind):
        with pytest.raises(AttributeError):
            setattr(message, field.name, None)


def test_no_two_messages_have_one_name():
    """No two messages have the same tag, which is the name of the class."""
    tags = [kind.__struct_config__.tag for kind in ALL]
    assert len(tags) == len(set(tags)) > 40


@pytest.mark.parametrize("direction", UNIONS)
def test_messages_of_another_direction_are_rejected(direction):
    """Each role's union rejects the messages of other roles."""
    others = [kind for name, kind in ON_WIRE if name != direction and kind not in typing.get_args(UNIONS[direction])]
    for kind in [*others, *kinds(cmd.Command)]:
        with pytest.raises(msgspec.ValidationError, match="Invalid value"):
            msgspec.json.decode(msgspec.json.encode(sample(kind)), type=UNIONS[direction])


def test_workers_and_agents_send_only_events_of_their_own():
    """No client's request (add, remove, scale, submit, stop) and no tick is accepted over the transport."""
    orders = {ev.HostAdded, ev.HostRemoved, ev.HostsDiscovered, ev.Scaled, ev.JobSubmitted, ev.JobStopRequested}
    orders |= {
        ev.ExternalAccessOpened,
        ev.StopRequested,
        ev.Ticked,
        ev.WorkerRegistered,
        ev.ProgramEnded,
        ev.AgentReady,
    }
    orders |= {
        ev.SetupSubmitted,
        ev.SetupCleared,
        ev.SetupEnded,
        ev.DiscoveryFailed,
        ev.WorkerSilent,
        ev.WorkerResponded,
    }
    assert not orders & {*typing.get_args(UNIONS["FromAgent"]), *typing.get_args(UNIONS["FromWorker"])}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"type":"Exec","code":"1"}',
        b'{"worker":{"host":"a","slot":0,"incarnation":1},"generation":1}',
        b'{"type":"LeaveAcknowledged","worker":"a/0#1","generation":1,"commit":2}',
        b'{"type":"LeaveAcknowledged","worker":{"host":"a","slot":0,"incarnation":1},"generation":"1","commit":2}',
        b'{"type":"LeaveAcknowledged","worker":{"host":"a","slot":0,"incarnation":1},"generation":1}',
        b'{"type":"LeaveAcknowledged","worker":{"host":"a","slot":0.5,"incarnation":1},"generation":1,"commit":2}',
    ],
)
def test_junk_is_an_error_and_nothing_else(text):
    """A malformed, unknown, wrongly typed or incomplete message is msgspec's error."""
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(text, type=worker_messages.FromWorker)


@pytest.mark.parametrize("w", [W, WorkerId("a", 0, 1), WorkerId("fe80::1%eth0", 11, 2), WorkerId("", 0, 0)])
def test_a_workers_id_reads_back(w):
    """`parse` is the inverse of `str`."""
    assert WorkerId.parse(str(w)) == w
    assert hash(WorkerId.parse(str(w))) == hash(w)


@pytest.mark.parametrize("text", ["", "a", "a/0", "a/x#1", "a/0#", "0#1/a", "a/0#1#2"])
def test_text_that_is_not_a_worker_id(text):
    """Text that is not a worker id is a ValueError."""
    with pytest.raises(ValueError, match="int"):
        WorkerId.parse(text)


def test_workers_sort_by_host_slot_incarnation():
    """Worker ids sort numerically within a host: slot 2 comes before slot 10."""
    ids = [WorkerId("b", 0, 1), WorkerId("a", 10, 1), WorkerId("a", 2, 2), WorkerId("a", 2, 1)]
    assert [str(w) for w in sorted(ids)] == ["a/2#1", "a/2#2", "a/10#1", "b/0#1"]
