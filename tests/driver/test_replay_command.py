"""`nbelastic replay`: the event log that a driver has written, stepped through in a terminal."""

from __future__ import annotations

import runpy

import pytest

from nbelastic.cli.main import main
from nbelastic.core import replay
from nbelastic.protocol import events as ev
from nbelastic.protocol.json_encoding import encode
from tests.driver.fakes import DriverWithFakes, run_story


@pytest.fixture
def log(tmp_path):
    """The event log of a cluster whose worker was killed, and whose cells and errors name a password."""

    async def story():
        async with DriverWithFakes(tmp_path / "cluster", "a:2", min=1) as fakes:
            fakes.driver.post(ev.SetupSubmitted("key", "password = 'xyzzy'", 1))
            await fakes.advance_time(1.0)
            for w in fakes.driver.cluster.workers:
                fakes.driver.post(ev.SetupEnded(w, 1, "NameError: xyzzy" if w.slot else ""))
            await fakes.settle()
            fakes.submit()
            await fakes.advance_time(2.0)
            fakes.train()
            fakes.kill("a/0#1")
            await fakes.advance_time(2.0)

    (tmp_path / "cluster").mkdir()
    run_story(story)
    return tmp_path / "cluster" / "events.jsonl"


def test_a_replay_prints_events_decisions_and_states(log, capsys):
    """Each event is followed by the decisions it led to and the new state; the records of the log are decided again."""
    assert main(["replay", str(log)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (at,) = (i for i, line in enumerate(lines) if "WorkerExited worker=a/0#1 code=-9" in line)
    assert "→ record worker-lost: a/0#1 died (SIGKILL)" in lines[at + 1]
    assert "→ StartWorker worker=a/0#2" in "\n".join(lines[at : at + 5])
    assert "= waiting (gathering) · generation 1 · members" in "\n".join(lines[at : at + 6])
    assert "differs" not in lines[-1]


def test_a_part_of_a_log_is_printed(log, capsys):
    """`--from` and `--until` give the first and the last event, `--only` a worker."""
    assert main(["replay", str(log), "--from", "3", "--until", "5"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " s  " in line] == ["3", "4", "5"]
    assert main(["replay", str(log), "--only", "a/1#1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown
    assert not any("WorkerExited worker=a/0#1" in line for line in shown)


def test_a_log_that_this_version_decides_otherwise_is_reported(log, capsys):
    """If a record of the log is not decided again, the replay names the first event that differs."""
    log.write_text(log.read_text().replace('"text":"a/0#1 died (SIGKILL)"', '"text":"a/0#1 was abducted"'))
    assert main(["replay", str(log)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("The log differs from event ")


def test_a_copy_for_others_has_no_text_of_the_program(log, tmp_path, capsys):
    """The copy has neither errors nor records, and can be replayed; only its owner can read the file."""
    copy = tmp_path / "copy.jsonl"
    assert "xyzzy" in log.read_text(), "the error of the cell"
    assert main(["replay", str(log), "--share", str(copy)]) == 0
    assert "has been written" in capsys.readouterr().out
    assert "xyzzy" not in copy.read_text()
    assert copy.stat().st_mode & 0o077 == 0
    assert main(["replay", str(copy)]) == 0
    assert "→ StartWorker worker=a/0#2" in capsys.readouterr().out
    kept = log.read_text()
    assert main(["replay", str(log), "--share", str(log)]) == 1
    assert "that is the log itself" in capsys.readouterr().err
    assert log.read_text() == kept


def test_a_test_is_written_that_replays_the_log(log, tmp_path):
    """The test passes on the copy beside it, and fails if the log has another end."""
    test = tmp_path / "test_bug.py"
    assert main(["replay", str(log), "--test", str(test), "--until", "20"]) == 0
    runpy.run_path(str(test))["test_the_last_decisions_of_the_log"]()
    data = test.with_suffix(".jsonl")
    data.write_bytes(data.read_bytes() + encode(replay.line_of(2000.0, ev.StopRequested())) + b"\n")
    with pytest.raises(AssertionError):
        runpy.run_path(str(test))["test_the_last_decisions_of_the_log"]()


def test_the_older_file_comes_first(log, capsys):
    """A long log is in two files: the replay begins with the older one."""
    assert main(["replay", str(log)]) == 0
    whole = capsys.readouterr().out
    lines = log.read_bytes().splitlines(keepends=True)
    log.with_suffix(".old").write_bytes(b"".join(lines[:10]))
    log.write_bytes(b"".join(lines[10:]))
    assert main(["replay", str(log)]) == 0
    assert capsys.readouterr().out == whole


def test_a_line_that_was_cut_off_is_left_out(log, capsys):
    """After a kill in the middle of a line, the rest is replayed."""
    log.write_bytes(log.read_bytes()[:-20])
    assert main(["replay", str(log)]) == 0
    assert "cut off" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read: No such file"),
        ("", "has no events"),
        ("hello\n", "line 1: it is not a line of an event log"),
        ('{"at": 1.0, "event": {"type": "Thawed"}}\n', "line 1: it is not a line of an event log of this version"),
        (
            b'{"at": 1.0, "record": {"kind": "\xff", "text": "b"}}\n',
            "has no events",
        ),
        ('{"at": 1.0, "event": ' + "[" * 100_000 + "\n", "has no events"),
        ('{"at": 1.0, "event": {"type": "Ticked"}}\n', "its first events are missing"),
        ('{"at": 1.0, "record": {"kind": "a", "text": "b"}}\n', "no driver's beginning"),
    ],
)
def test_a_file_that_cannot_be_replayed_gives_one_line(tmp_path, capsys, text, why):
    """The error names the file and says what is wrong."""
    path = tmp_path / "some.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["replay", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert why in line
    assert str(path) in line


def test_a_copy_ends_where_the_replay_does(log, tmp_path, capsys):
    """`--until` counts for `--share`, as for `--test`."""
    copy = tmp_path / "copy.jsonl"
    assert main(["replay", str(log), "--until", "5", "--share", str(copy)]) == 0
    capsys.readouterr()
    assert main(["replay", str(copy)]) == 0
    shown = capsys.readouterr().out
    assert main(["replay", str(log), "--until", "5"]) == 0
    assert capsys.readouterr().out == shown


def test_a_copy_does_not_replace_the_older_half_of_the_log(log, capsys):
    """Its errors and records would be lost, and the log could not be replayed any more."""
    lines = log.read_bytes().splitlines(keepends=True)
    older = log.with_suffix(".old")
    older.write_bytes(b"".join(lines[:10]))
    log.write_bytes(b"".join(lines[10:]))
    assert main(["replay", str(log), "--share", str(older)]) == 1
    assert "that is the log itself" in capsys.readouterr().err
    assert older.read_bytes() == b"".join(lines[:10])


def test_an_end_before_the_first_event_is_refused(log, tmp_path, capsys):
    """There would be nothing to show or to test. Events are counted from 0, the driver's beginning."""
    test = tmp_path / "test_bug.py"
    assert main(["replay", str(log), "--until", "-1", "--test", str(test)]) == 1
    assert capsys.readouterr().err == "nbelastic: --until -1: the first event is 0.\n"
    assert not test.exists()


def test_a_test_needs_a_name_that_pytest_finds(log, tmp_path, capsys):
    """Another name is refused, and nothing is written."""
    assert main(["replay", str(log), "--test", str(tmp_path / "bug.py")]) == 1
    assert "test_" in capsys.readouterr().err
    assert not (tmp_path / "bug.py").exists()
