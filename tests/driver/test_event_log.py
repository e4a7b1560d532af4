"""The event log: two files of bounded size, and no decision that waits for them."""

from __future__ import annotations

import errno

from nbelastic.cli.replay import EventLogFile
from nbelastic.core import commands as cmd
from nbelastic.driver import event_log
from nbelastic.driver.event_log import EventLog
from nbelastic.protocol import worker_messages
from nbelastic.protocol.events import Ticked
from nbelastic.protocol.ids import WorkerId
from nbelastic.system.private_files import append_private


def texts(log):
    return [record.text for record in log.kept()[0]]


def closed_log(path, records):
    """The log of a driver that has ended, with this many records."""
    log = EventLog(path)
    for number in range(records):
        log.record(cmd.Record("test", f"record {number}"), 0.0, 0)
    log.close()
    return log


def test_the_size_of_the_files_is_bounded(tmp_path, monkeypatch):
    """A full file replaces the older one, and the next driver reads both."""
    monkeypatch.setattr(event_log, "MAX_SIZE", 3000)
    closed_log(tmp_path / "events.jsonl", 100)
    assert {path.name for path in tmp_path.iterdir()} == {"events.jsonl", "events.old"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 3200
    again = EventLog(tmp_path / "events.jsonl", append=True)
    found = texts(again)
    again.close()
    assert len(found) > 15
    assert found == [f"record {number}" for number in range(100 - len(found), 100)]


def test_the_next_driver_counts_on(tmp_path, monkeypatch):
    """More records than are in memory count: by their number, a client such as `nbelastic attach` finds the new ones."""
    monkeypatch.setattr(event_log, "EVENTS_IN_MEMORY", 5)
    log = closed_log(tmp_path / "events.jsonl", 8)
    again = EventLog(tmp_path / "events.jsonl", append=True)
    again.close()
    assert (texts(again), again.count) == (texts(log), log.count)


def test_the_next_driver_counts_on_after_a_long_time(tmp_path, monkeypatch):
    """The oldest records are in no file any more. They count, or `nbelastic attach` would print no event until as many new ones came."""
    monkeypatch.setattr(event_log, "MAX_SIZE", 3000)
    log = closed_log(tmp_path / "events.jsonl", 100)
    for _ in range(2):
        again = EventLog(tmp_path / "events.jsonl", append=True)
        assert (again.count, len(texts(again)) < 50) == (100, True)
        again.close()
    assert log.count == 100


class SmallDisk:
    """A file on a disk with room for `room` bytes."""

    def __init__(self, file, room):
        self._file, self.room, self.close = file, room, file.close

    def write(self, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(data[: self.room])
        self.room -= written
        return written

    def tell(self):
        return self._file.tell()


def test_a_full_disk_loses_only_lines_of_the_log(tmp_path):
    """With a full disk each record is still shown, one more reports the loss, also in the file, which stays readable."""
    log = EventLog(tmp_path / "events.jsonl")
    log.record(cmd.Record("test", "before"), 0.0, 0)
    log._file = disk = SmallDisk(log._file, 5)
    for number in range(3):
        log.record(cmd.Record("test", f"lost {number}"), 0.0, 0)
    disk.room = 10_000
    log.record(cmd.Record("test", "after"), 0.0, 0)
    log.close()
    report = "lines are missing in the event log: [Errno 28] No space left on device"
    assert texts(log) == ["before", "lost 0", "lost 1", report, "lost 2", "after"]
    again = EventLog(tmp_path / "events.jsonl", append=True)
    assert texts(again) == ["before", report, "after"]
    assert again.count == log.count
    again.close()


def test_each_time_that_the_disk_is_full_is_reported(tmp_path):
    """The disk was freed and is full again, days later: a replay of either time knows that lines are missing."""
    log = EventLog(tmp_path / "events.jsonl")
    log._file = disk = SmallDisk(log._file, 10_000)
    for number in range(2):
        disk.room = 0
        for _ in range(3):
            log.note(Ticked(), 1.0)
        disk.room = 10_000
        log.record(cmd.Record("test", f"freed {number}"), 0.0, 0)
    log.close()
    replayed = EventLogFile(str(tmp_path / "events.jsonl"))
    assert len(list(replayed.lines())) == 4
    kinds = [record.kind for record in replayed.records]
    assert kinds == ["log-incomplete", "test"] * 2 == [record.kind for record in log.kept()[0]]


def test_a_file_that_cannot_be_opened_again_costs_no_line(tmp_path, monkeypatch):
    """Where a link takes the place of the full file, lines go to the full one. The link is not followed."""
    monkeypatch.setattr(event_log, "MAX_SIZE", 500)
    log = EventLog(tmp_path / "events.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(event_log, "append_private", lambda path: append_private(_with_a_link(path)))
        for number in range(10):
            log.record(cmd.Record("test", f"record {number}"), 0.0, 0)
    assert not (tmp_path / "mine").exists()
    assert [text for text in texts(log) if "lines are missing in the event log: [Errno 1] it is a link" in text]
    (tmp_path / "events.jsonl").unlink(missing_ok=True)
    log.record(cmd.Record("test", "after"), 0.0, 0)
    log.record(cmd.Record("test", "in the new file"), 0.0, 0)
    log.close()
    assert "record 9" in (tmp_path / "events.old").read_text()
    assert "in the new file" in (tmp_path / "events.jsonl").read_text()


def _with_a_link(path):
    path.unlink(missing_ok=True)
    path.symlink_to(path.with_name("mine"))
    return path


def test_the_first_step_of_a_job_is_not_counted_from_the_end_of_the_job_before(tmp_path):
    """A job has failed. Minutes later another one begins: its first commit reports no time of a change of the world."""
    log = EventLog(tmp_path / "events.jsonl")
    log.note_leave(100.0, broken=True)
    log.record(cmd.Record("job-started", "job-2 was submitted"), 400.0, 0)
    worker = WorkerId("a", 0, 1)
    log.note_formation(cmd.FormWorld(2, (worker,), "", 0, ()), 401.0, 0)
    log.note_first_step(worker_messages.WorkerProgress(worker, 2, 1, {}, first=5.0), 402.0, 1)
    log.close()
    took = log.kept()[0][-1].took
    assert took == {"first step": 5.0}
