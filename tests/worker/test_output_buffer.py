"""All output of a program reaches its job, once."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import termios
import threading
from functools import partial

import pytest

from nbelastic.worker.output_buffer import MAX_TEXT, OutputBuffer, OutputStream
from tests.support.waiting import until

HALF_A_PIPE = 1 << 15  # bytes


def test_nothing_is_lost_while_it_is_taken(monkeypatch):
    """Two threads print while a third takes the output: each word arrives, in each thread's order."""
    monkeypatch.setattr("nbelastic.worker.output_buffer.MAX_TEXT", 10**9)
    printed, done, found = OutputBuffer(), threading.Event(), []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def write(name):
        for i in range(20_000):
            printed.write("out", f"{name}{i} ")

    def take():
        while not done.is_set():
            found.extend(piece.text for piece in printed.take())

    writers = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    taker = threading.Thread(target=take)
    for thread in (*writers, taker):
        thread.start()
    for writer in writers:
        writer.join()
    done.set()
    taker.join()
    sys.setswitchinterval(before)
    found.extend(piece.text for piece in printed.take())
    words = "".join(found).split()
    for name in "ab":
        assert [word for word in words if word[0] == name] == [f"{name}{i}" for i in range(20_000)]


def test_too_long_output_keeps_its_end():
    """The number of missing characters is known; an empty stream gives no piece."""
    printed = OutputBuffer()
    printed.write("err", "x" * MAX_TEXT)
    printed.write("err", "the end")
    ((_, _, stream, text, end),) = printed.take()
    assert (stream, len(text), text[-7:], end) == ("err", MAX_TEXT, "the end", MAX_TEXT + 7)
    assert list(printed.take()) == []


def test_the_end_of_a_jobs_output_is_not_the_next_jobs():
    """Even if they are taken after the next job has begun."""
    printed = OutputBuffer()
    printed.job = "job-1"
    printed.write("out", "the")
    printed.write("out", " end\n")
    printed.job = "job-2"
    printed.write("out", "hello")
    assert list(printed.take()) == [("job-1", None, "out", "the end\n", 8), ("job-2", None, "out", "hello", 5)]


@pytest.mark.parametrize("wrong", [b"bytes of a subprocess", 5])
def test_what_is_no_text_is_the_programs_error_only(wrong, tmp_path):
    """`sys.stdout.write(b"…")` raises what Python's own streams raise. Other output is sent, and so is the job's result after it."""
    printed = OutputBuffer()
    with (tmp_path / "log").open("w") as log:
        stream = OutputStream(partial(printed.write, "out"), log.fileno())
        stream.write("before\n")
        with pytest.raises(TypeError, match=r"write\(\) argument must be str, not (bytes|int)"):
            stream.write(wrong)
    assert [piece.text for piece in printed.take()] == ["before\n"]


def test_output_that_no_driver_received_is_sent_again():
    """Output that was under way when the driver was lost, and later output, is sent again, up to the bound."""
    printed = OutputBuffer()
    printed.write("out", "one ")
    assert list(printed.take()) == [("", None, "out", "one ", 4)]
    printed.hold()
    printed.write("out", "two ")
    printed.hold()
    printed.write("out", "three")
    assert list(printed.take()) == [("", None, "out", "one two three", 13)]
    assert list(printed.take()) == []
    printed.hold()
    printed.write("out", "x" * MAX_TEXT)
    printed.hold()
    ((_, _, _, text, end),) = printed.take()
    assert (len(text), end) == (MAX_TEXT, MAX_TEXT + 13)


def test_a_line_belongs_to_the_rank_that_printed_it():
    """Even if the worker's rank changes before it is taken; a line printed before the first rank has none."""
    printed = OutputBuffer()
    for rank in (None, 2, 1):
        printed.rank = rank
        printed.write("out", f"as {rank}\n")
    assert [(piece.rank, piece.text) for piece in printed.take()] == [
        (None, "as None\n"),
        (2, "as 2\n"),
        (1, "as 1\n"),
    ]


def test_a_progress_bars_newest_frame_is_sent():
    """However many frames there were since the last one."""
    printed = OutputBuffer()
    for percent in range(100):
        printed.write("err", f"\r{percent} %")
    (piece,) = printed.take()
    assert (piece.text, piece.end) == ("\r99 %", 5)
    printed.write("err", "\r100 %\ndone\n")
    (piece,) = printed.take()
    assert (piece.text, piece.end) == ("\r100 %\ndone\n", 17)


def test_what_a_forked_process_prints_takes_no_memory(tmp_path):
    """A data loader's process prints a line per sample, for days. The log has the lines; nothing takes them to be sent."""
    printed = OutputBuffer()
    printed.write("out", "of the worker, before the fork\n")
    printed.discard()
    with (tmp_path / "log").open("w") as log:
        stream = OutputStream(partial(printed.write, "out"), log.fileno())
        for _ in range(100):
            stream.write("odd sample\n")
    assert (tmp_path / "log").read_text().count("odd sample\n") == 100
    assert not printed._streams["out"].parts


@pytest.fixture
def interrupted(request):
    """`interrupted(handler)`: a stream whose log takes no more text until a signal has called the handler."""
    reader, writer = os.pipe()
    printed = OutputBuffer()
    stream = OutputStream(partial(printed.write, "out"), writer)

    def begin(handler):
        def handle(*_):
            threading.Thread(target=drain, args=(reader,)).start()
            handler(stream)

        before = signal.signal(signal.SIGALRM, handle)
        request.addfinalizer(lambda: signal.signal(signal.SIGALRM, before))
        threading.Thread(target=interrupt, args=(reader,)).start()
        return stream, printed

    yield begin
    stream._file.close()
    os.close(writer)  # which ends the thread


def interrupt(reader):
    """Send the signal as the main thread waits until the full pipe takes more."""
    until(lambda: int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, b"1234"), sys.byteorder) >= HALF_A_PIPE)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)


def drain(reader):
    with open(reader, "rb") as pipe:
        pipe.read()


def test_a_signal_handler_may_print_while_the_program_prints(interrupted):
    """Such as one that shows the memory in use every minute. Both texts are sent."""
    stream, printed = interrupted(lambda stream: stream.write("in use: 3 GB\n"))
    stream.write("x" * MAX_TEXT * 2 + "\n")
    (piece,) = printed.take()
    assert piece.text.endswith("x\nin use: 3 GB\n")


def test_a_time_limit_of_the_program_ends_a_print(interrupted):
    """`TimeoutError` is an OSError, but not one of the log's disk."""

    def raise_error(_):
        raise TimeoutError("overdue")

    stream, _ = interrupted(raise_error)
    with pytest.raises(TimeoutError, match="overdue"):
        stream.write("x" * MAX_TEXT * 2 + "\n")


def test_threads_print_while_the_disk_is_full():
    """One gives up the file at the moment when another one prints: neither gets an error."""
    printed = OutputBuffer()

    class Stream(OutputStream):
        meets = False

        def _open(self):
            if self.meets:
                self.meets = False
                self.write("of another thread\n")
            return super()._open()

    with open("/dev/full", "w") as full:
        stream = Stream(partial(printed.write, "out"), full.fileno())
        stream.meets = True
        stream.write("one\n")
        stream.write("two\n")
        stream._file.close()
    assert [piece.text for piece in printed.take()] == ["one\nof another thread\ntwo\n"]
