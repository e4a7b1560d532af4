"""What a job keeps of its programs and of its output: finished and unfinished lines."""

from __future__ import annotations

from nbelastic.driver.job_run import JobRun
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.messages import Blob, WorkerOutput
from nbelastic.protocol.output_buffer import Line
from nbelastic.protocol.worker_messages import Program

ONE, TWO = WorkerId("a", 0, 1), WorkerId("a", 1, 1)


def add_output(run, *texts, worker=ONE, stream="out", rank=None, end=0):
    for text in texts:
        end += len(text)
        run.add_output(WorkerOutput(worker, stream, text, end, "job-1", rank))
    return end


def lines(run):
    return [line.text for _, line in run.output.since(0)]


def unfinished(run, worker=None):
    return [(str(w), line.stream, line.text) for w, line in run.output.unfinished_lines(worker)]


def test_an_unfinished_line_is_kept():
    """An unfinished line is kept as it grows and after the job; with its newline it becomes a finished line."""
    run = JobRun("job-1", None)
    end = add_output(run, "a line\nan", "other")
    assert (lines(run), unfinished(run)) == (["a line"], [("a/0#1", "out", "another")])
    end = add_output(run, " one\n", end=end)
    assert (lines(run), unfinished(run)) == (["a line", "another one"], [])
    add_output(run, "the last words", end=end)
    add_output(run, "of the other", worker=TWO, stream="err")
    assert unfinished(run) == [("a/0#1", "out", "the last words"), ("a/1#1", "err", "of the other")]
    assert unfinished(run, "a/1#1") == [("a/1#1", "err", "of the other")]


def test_a_progress_bar_is_one_line():
    """The newest frame of a progress bar replaces the earlier ones, however its text is split: the bar is one line."""
    run = JobRun("job-1", None)
    end = 0
    for text, shown in [
        ("\r  0%|     |", "  0%|     |"),
        ("\r 50%|", " 50%|"),
        ("##   |", " 50%|##   |"),
        ("\r", " 50%|##   |"),
        ("100%|#####|   ", "100%|#####|"),
    ]:
        end = add_output(run, text, end=end)
        assert unfinished(run) == [("a/0#1", "out", shown)]
    end = add_output(run, "\r\r\n\x1b[2K\r\x1b[31mred\x1b[0m\r\n", end=end)
    assert lines(run) == ["100%|#####|", "\x1b[31mred\x1b[0m"]
    add_output(run, "\r 1%\r    \rgone, and this is there\n", end=end)
    assert lines(run)[-1] == "gone, and this is there"
    assert not any("\r" in line for line in lines(run))


def test_a_line_does_not_change_the_terminal_of_its_reader():
    """%elastic_logs prints it with colours and tabs, without sequences that change the title, the clipboard, or what is above."""
    run = JobRun("job-1", None)
    end = add_output(
        run, "\x1b]52;c;aGE=\x07one\ttwo \x1b[31mred\x1b[0m\x1b[3A\x1b[2J\x08 \n\x1b]0;title\x1b\\end\x9b\x1bc\n"
    )
    assert lines(run) == ["one\ttwo \x1b[31mred\x1b[0m", "end"]
    add_output(run, "\x1b]0;title\x07bar", end=end)
    assert unfinished(run) == [("a/0#1", "out", "bar")]


def test_a_long_run_of_frames_needs_no_more_memory_than_one():
    """A progress bar that never ends is kept as its last frame."""
    run = JobRun("job-1", None)
    end = 0
    for i in range(5000):
        end = add_output(run, f"\r{i}" + "#" * 100, end=end)
    assert [len(line.text) for _, line in run.output.unfinished_lines()] == [104]
    assert unfinished(run)[0][2].startswith("4999#")


def test_a_line_keeps_the_rank_that_printed_it():
    """A line keeps the rank that its worker had when it was printed."""
    run = JobRun("job-1", None)
    end = add_output(run, "one\n", rank=2)
    add_output(run, "two\nthree", rank=1, end=end)
    assert [(line.text, line.rank) for _, line in run.output.since(0)] == [("one", 2), ("two", 1)]
    assert run.output.unfinished_lines()[0][1].rank == 1


def test_a_line_is_not_shown_twice_while_it_is_being_completed():
    """A reader between the two steps that complete a line finds it once, and the other stream's unfinished line."""
    run = JobRun("job-1", None)
    add_output(run, "half")
    add_output(run, "an error", stream="err")
    run.output.add(ONE, Line(1, "out", "half a line"))  # the unfinished line is cleared next
    assert [line.text for line in run.output.newest(ONE)] == ["half a line", "an error"]
    assert unfinished(run) == [("a/0#1", "err", "an error")]


def test_an_unfinished_line_that_equals_the_one_before_it():
    """A new unfinished line is shown, although it is equal to the beginning of the line before it."""
    run = JobRun("job-1", None)
    end = add_output(run, "again")
    add_output(run, " one\nagain", end=end)
    assert (lines(run), unfinished(run)) == (["again one"], [("a/0#1", "out", "again")])


def test_a_worker_that_is_starting_can_still_read_the_program_before_a_swap(tmp_path):
    """It was asked to run that one before the new one was kept. Older programs are removed, and all when the job ends."""
    programs = []
    for number in range(3):
        path = tmp_path / f"{number}.program"
        path.touch()
        programs.append(Program("job-1", "", call=Blob(9, path=str(path)), number=number))
    run = JobRun("job-1", programs[0])
    for new in programs[1:]:
        run.replace_program(new)
    assert [run.numbered(number) for number in range(3)] == [None, *programs[1:]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.program", "2.program"]
    run.forget_program()
    assert [*tmp_path.iterdir()] == []
