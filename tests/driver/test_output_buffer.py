"""The lines of a job that drivers and clients keep: fewer per worker if there are many workers."""

from __future__ import annotations

from types import SimpleNamespace

from nbelastic.client.job import Job
from nbelastic.client.job_copy import JobCopy
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.output_buffer import LEAST, LONG, MOST, TAIL, Line, OutputBuffer
from tests.core.story import wid


def print_lines(buffer, worker, count, text="x"):
    for _ in range(count):
        buffer.add(wid(worker), Line(buffer.line_count + 1, "out", text))


def kept(buffer):
    return {str(worker): len(lines) for worker, lines in buffer.lines.items()}


def test_few_workers_have_many_lines_each():
    """The newest ones."""
    buffer = OutputBuffer()
    print_lines(buffer, "a/0#1", TAIL + 5)
    print_lines(buffer, "a/1#1", 7)
    assert kept(buffer) == {"a/0#1": TAIL, "a/1#1": 7}
    assert buffer.lines[wid("a/0#1")][0].number == 6


def test_workers_share_the_room_before_one_of_them_loses_all():
    """With each worker more, the others keep fewer lines. None is dropped while each can keep the least."""
    dropped = []
    buffer = OutputBuffer(dropped.append)
    for n in range(50):
        print_lines(buffer, f"a/{n}#1", TAIL)
    assert dropped == []
    assert set(kept(buffer).values()) == {MOST // 50}
    for n in range(50, 150):
        print_lines(buffer, f"a/{n}#1", LEAST)
    assert sum(kept(buffer).values()) == MOST
    assert set(kept(buffer).values()) == {LEAST}
    assert len(dropped) == 50


def test_long_lines_count_as_several():
    """Else pictures or JSON that a program prints as text would fill gigabytes of the driver and of each client."""
    dropped = []
    buffer = OutputBuffer(dropped.append)
    print_lines(buffer, "a/0#1", 1000, "x" * (64 * LONG))
    assert kept(buffer) == {"a/0#1": TAIL // 65}
    print_lines(buffer, "a/0#1", TAIL)
    assert kept(buffer) == {"a/0#1": TAIL}
    print_lines(buffer, "a/1#1", 1, "x" * (2 * LONG * MOST))
    assert kept(buffer) == {"a/1#1": 1}
    assert dropped == [wid("a/0#1")]
    print_lines(buffer, "a/1#1", 1)
    assert kept(buffer) == {"a/1#1": 1}


def test_logs_can_be_read_while_workers_print(monkeypatch):
    """Another thread takes in lines at any moment: `job.logs()` returns what there is, and never fails."""
    copy, name_of = JobCopy("job-1"), WorkerId.__str__
    job = Job(lambda: SimpleNamespace(status=SimpleNamespace(workers=())), copy)
    for worker in ("a/0#1", "a/1#1"):
        print_lines(copy.output, worker, 1)

    def print_meanwhile(worker):
        copy.output.add(worker, Line(copy.output.line_count + 1, "out", "y"))
        return name_of(worker)

    monkeypatch.setattr(WorkerId, "__str__", print_meanwhile)
    assert job.logs(tail=1).splitlines() == ["a/0#1 | y", "a/1#1 | y"]


def test_no_lines_are_no_lines():
    """`job.lines_since(number, most=0)` returns none, and not all."""
    buffer = OutputBuffer()
    print_lines(buffer, "a/0#1", 3)
    assert [len(buffer.since(0, most=most)) for most in (0, 2, 9)] == [0, 2, 3]
