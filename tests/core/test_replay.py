"""A user's event log, stepped through again: the same events give the same decisions."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import replay, takeover
from nbelastic.core.cluster_snapshot import snapshot_of
from nbelastic.core.state import SetupCell
from nbelastic.errors import UsageError
from nbelastic.protocol import events as ev
from nbelastic.protocol import program_events, script_events
from nbelastic.protocol.agent_messages import AgentHello
from nbelastic.protocol.json_encoding import encode
from nbelastic.protocol.messages import Blob, Pushed
from nbelastic.protocol.worker_messages import WorkerReport
from tests.core.fakes import wid
from tests.core.long_story import LongStory
from tests.core.story import Story


class Recorder(Story):
    """A story that keeps its event log, as the driver does."""

    def __init__(self, *hosts: str, **limits) -> None:
        self.log: list[bytes] = []
        super().__init__(**limits)
        self.write(replay.Started("1.0", self.cluster.limits))
        for host in hosts:
            self.add(host)

    def write(self, entry: object) -> None:
        self.log.append(encode(replay.line_of(self.now, entry)))

    def send(self, *events: ev.Event) -> tuple[cmd.Command, ...]:
        for event in events:
            self.write(event)
        return super().send(*events)


def played(log) -> list[replay.Played]:
    return list(replay.play([replay.parse(line) for line in log]))


def test_a_replay_makes_the_same_decisions():
    """From the log of a training with a death, a newcomer and an end, a replay gives the same commands and the same state."""
    story = Recorder("a:2", "b:2", min=2)
    story.run().commit(3).kill("a/0#1").quiet(2.0).add("c:1").quiet(2.0).finish()
    steps = played(story.log)
    assert [command for each in steps for command in each.commands] == story.said
    assert steps[-1].cluster == story.cluster
    assert steps[-1].number == len(story.heard)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_long_log_is_replayed_to_the_same_end(seed):
    """Hosts that come, go and fail to reach each other: their events, written down and read again, lead to the same state."""
    story = LongStory(seed, Recorder).play(120, one_driver=True).story
    steps = played(story.log)
    assert len(steps) > 300
    assert [command for each in steps for command in each.commands] == story.said
    assert steps[-1].cluster == story.cluster


def takeover_of(story):
    """The beginning of the next driver, with the reports of all workers, which it also returns by worker."""
    saved = snapshot_of(story.cluster)
    saved = replace(saved, setup=(SetupCell("k", "password = 'xyzzy'", 1, Pushed(("data",), Blob(3, b"abc"))),))
    reports = {w: WorkerReport(w, 7, reports=((1, {"loss": 0.5}),)) for w in story.cluster.workers}
    agents = {
        host: AgentHello(host, 1, {}, workers=tuple((w, 7) for w in reports if w.host == host), newest={0: 1})
        for host in ("a", "b")
    }
    return replay.TakenOver("1.0", saved, agents, tuple(reports.values()), {"a": "", "b": ""}, ()), reports


def test_a_driver_that_has_taken_over_is_replayed():
    """The log of the next driver begins with the reports that it received; the state before is not needed."""
    story = Recorder("a:1", "b:1", min=1)
    story.run().commit(3)
    entry, reports = takeover_of(story)
    saved, agents = entry.cluster, entry.agents
    state, commands = takeover.resume(saved, agents, reports, story.now, problems=entry.problems)
    line = encode(replay.line_of(story.now, entry))
    assert not any(word in line for word in (b"xyzzy", b"YWJj", b"loss"))  # the second one is abc in base64
    (one,) = played([line])
    assert one.commands == commands
    assert replay.summary(one.cluster, story.now) == replay.summary(state, story.now)


@pytest.mark.parametrize(
    "event",
    [
        ev.SetupSubmitted("key", "token = 'xyzzy'", 1),
        ev.SetupSubmitted("push:a", "a", 2, Pushed(("a",), Blob(5, b"xyzzy"))),
        program_events.BreakpointReached(wid("a/0#1"), 1, "train.py:3", "(Pdb) xyzzy"),
        script_events.NodeFailed("a", 1, (script_events.Failure(0, 0, 1, "KeyError", "xyzzy"),)),
    ],
    ids=lambda event: type(event).__name__,
)
def test_the_log_has_neither_code_nor_values(event):
    """The source of a cell, pushed values, the debugger's text and tracebacks are not written."""
    line = encode(replay.line_of(1.0, event))
    assert b"xyzzy" not in line
    assert b"eHl6enk" not in line  # in base64
    assert type(replay.parse(line).event) is type(event)


def test_equal_sources_stay_equal():
    """The core compares the sources of cells, so a replay can, too."""
    one, same, other = (replay.parse(encode(replay.line_of(1.0, ev.SetupSubmitted("k", s, 1)))) for s in "aab")
    assert one == same != other


def test_a_shared_line_has_no_text_of_the_program():
    """For others, errors and reasons are removed. Whether there was one stays, as decisions depend on it."""
    event = ev.ProgramEnded(wid("a/0#1"), "job-1", "ValueError: xyzzy")
    line = replay.shared(replay.line_of(1.0, event))
    assert replay.parse(encode(line)).event == replace(event, error=replay.REMOVED)
    well = replace(event, error="")
    assert replay.parse(encode(replay.shared(replay.line_of(1.0, well)))).event == well
    assert replay.shared({"at": 1.0, "record": {"kind": "job-failed", "text": "xyzzy"}}) is None


def test_a_shared_line_has_no_names_of_the_user():
    """Neither of a notebook nor of variables. Equal names stay equal: a pushed value replaces that of its name."""
    first, second = (
        replay.parse(encode(replay.shared(replay.line_of(1.0, ev.SetupSubmitted(f"push:{a}", "", 1, pushed)))))
        for a, pushed in (
            ("xyzzy", Pushed(("xyzzy",), Blob(1, b"1"))),
            ("xyzzy,b", Pushed(("b", "xyzzy"), Blob(1, b"1"))),
        )
    )
    assert "xyzzy" not in str((first, second))
    assert first.event.key != second.event.key
    assert first.event.pushed.names[0] in second.event.pushed.names
    added = replay.shared(replay.line_of(1.0, ev.HostRemoved("a", by="you (xyzzy.ipynb)")))
    assert replay.parse(encode(added)).event.by == "you"
    assert replay.shared({"begins": {"paused_by": "you (xyzzy.ipynb)"}}) == {"begins": {"paused_by": "you"}}
    stopping = replay.shared({"begins": {"stopping": "stopped by you (xyzzy.ipynb)"}})
    assert stopping == {"begins": {"stopping": replay.REMOVED}}


def test_a_step_that_raises_ends_the_replay(monkeypatch):
    """The bug itself is the last step of the replay."""
    story = Recorder("a:1")
    story.run()

    def fail(*_):
        raise KeyError("xyzzy")

    monkeypatch.setattr(replay, "step", fail)
    *_, last = played(story.log)
    assert isinstance(last.error, KeyError)
    assert last.number == 1


def test_a_takeover_that_raises_ends_the_replay(monkeypatch):
    """When the core cannot take over, the replay ends with the error, and with the state before."""
    story = Recorder("a:1", "b:1", min=1)
    story.run()
    entry, _ = takeover_of(story)
    before = played(story.log)[-1]

    def fail(*_, **__):
        raise KeyError("xyzzy")

    monkeypatch.setattr(takeover, "resume", fail)
    *_, last = played([*story.log, encode(replay.line_of(story.now, entry))])
    assert isinstance(last.error, KeyError)
    assert (last.number, last.cluster) == (before.number, before.cluster)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "not a line of an event log of this version"),
        ('{"at": 1.0}', "not a line of an event log"),
        ('{"at": 1.0, "event": {"type": "Thawed"}}', "Thawed"),
        ("[]", "of this version"),
    ],
)
def test_other_lines_are_refused(line, why):
    """For another text, or an unknown event, the error is one line that says so."""
    with pytest.raises(UsageError, match=why) as caught:
        replay.parse(line)
    assert "\n" not in str(caught.value)


def test_a_log_without_its_beginning_is_refused():
    """Without the state from which the driver began, nothing can be replayed."""
    with pytest.raises(UsageError, match="first events are missing"):
        played([encode(replay.line_of(1.0, ev.Ticked()))])


def test_the_summary_names_the_script_that_runs():
    """Or the one that ran last."""
    story = Story("a:1").answer()
    story.send(script_events.ScriptSubmitted("script-1", "train.py", script_events.Terms()))
    assert "script-1 running" in replay.summary(story.cluster, story.now)
    story.send(ev.JobStopRequested("script-1", "a test"))
    assert "script-1 stopped" in replay.summary(story.cluster, story.now)
