"""How a worker runs programs: how the call arrives, how the end is reported, and that no program runs twice."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from nbelastic.errors import JobStoppedError
from nbelastic.programs import program
from nbelastic.programs.program import Runner
from nbelastic.protocol import cell_messages, messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import pickling
from nbelastic.system.pickling import INLINE
from nbelastic.worker.output_buffer import OutputBuffer, OutputStream
from nbelastic.worker.worker_report import WorkerFacts

W = WorkerId("a", 0, 1)
RAN: list[str] = []


def called(value: object = 7) -> object:
    RAN.append("called")
    return value() if callable(value) else value


class FakeSession:
    """The part of a worker's session that a runner uses."""

    worker, checkpoints, is_rank_0, relay = W, None, True, Path()

    def __init__(self) -> None:
        self.facts, self.output = WorkerFacts(), OutputBuffer()
        self.link = SimpleNamespace(send=self.sent_to_driver, disconnected=False)
        self.answer = lambda message: None
        self.value, self.stopped = b"", ""
        self.programs = SimpleNamespace(end=None, raise_if_rejected=lambda: None)

    def sent_to_driver(self, message: messages.Message) -> None:
        self.answer(message)

    def begin(self, job: str, program: int = 0) -> None:
        self.refuse_if_stopped(job)

    def finish(self) -> None:
        """The program has ended."""

    cell_pieces = SimpleNamespace(put=lambda *_: None)

    def cell_ended(self, result: cell_messages.CellResult) -> None:
        self.link.send(result)

    def refuse_if_stopped(self, job: str) -> None:
        if self.stopped == job:
            raise JobStoppedError("the job is over")

    def program_begins(self, job: str) -> None:
        self.facts.begin(job)

    def program_ended(self, result: worker_messages.ProgramResult, value: bytes) -> None:
        self.facts.result, self.value = result, value
        self.repeat_result()

    def repeat_result(self) -> None:
        self.results.put_nowait(self.facts.result)


@pytest.fixture
def session(monkeypatch):
    """Redirection of this process's standard streams is switched off."""
    RAN.clear()
    monkeypatch.setattr(program, "log_to", lambda *_: None)
    monkeypatch.setattr(program, "frameworks", lambda: SimpleNamespace(begin=lambda _: None, end=lambda: None))
    monkeypatch.setattr(program, "get_ipython", lambda: SimpleNamespace(user_ns={"there": 5}, display_pub=None))
    return FakeSession()


def call(function=called, *args, **options) -> tuple[bytes, worker_messages.Program]:
    """The packed call, and the message to run it, which has `options` instead of the bytes if there are any."""
    data = b"".join(pickling.pack((function, args, {}, {})))
    blob = messages.Blob(len(data), **options) if options else messages.Blob(len(data), data)
    return data, worker_messages.Program("job-1", "", call=blob)


def run(session, *programs):
    """Run the programs of these messages. Returns the results that the driver receives."""

    async def story():
        session.runner, session.results = Runner(session, "", ""), asyncio.Queue()
        serving = asyncio.create_task(session.runner.serve())
        for program_message in programs:
            session.runner.take(program_message)
        results = [await session.results.get() for _ in programs]
        serving.cancel()
        return results

    return asyncio.run(asyncio.wait_for(story(), 20))


def value(result):
    assert not result.error
    return pickling.unpack(result.value.data)


def test_a_call_in_a_message(session):
    """What the function returned is sent back, packed."""
    (result,) = run(session, call(called, "text")[1])
    assert (value(result), result.job, result.worker) == ("text", "job-1", W)


def test_a_cell_is_compiled_as_in_a_notebook(session, monkeypatch):
    """Not with the `__future__` imports of nbelastic's modules: an annotation is the class, not its name."""
    shell = SimpleNamespace(user_ns={}, display_pub=None, transform_cell=lambda source: source)
    monkeypatch.setattr(program, "get_ipython", lambda: shell)
    cell = "class Options:\n    rate: float\nOptions.__annotations__['rate'] is float"
    assert value(run(session, worker_messages.Program("job-1", "", source=cell))[0]) is True


def test_a_call_in_a_file(session, tmp_path):
    """The file is mapped into memory: it may have any size."""
    path = tmp_path / "program"
    data, program_message = call(called, "text", path=str(path))
    path.write_bytes(data)
    assert value(run(session, program_message)[0]) == "text"


def test_a_file_that_is_gone_ends_the_program_alone(session, tmp_path):
    """The worker stays, and runs the next program."""
    program_message = call(called, path=str(tmp_path / "nowhere"))[1]
    gone, there = run(session, program_message, worker_messages.Program("job-2", "", call=call(called, 8)[1].call))
    assert gone.error.startswith("FileNotFoundError: ")
    assert value(there) == 8


def test_a_call_from_another_machine_is_fetched_in_pieces(session):
    """Several pieces are requested at a time. Pieces that arrive twice, or belong to another job, are ignored."""
    array = os.urandom((pickling.PIECES + 2) * pickling.PIECE)
    data, _ = call(len, array)
    requested = []

    def answer(message):
        if isinstance(message, worker_messages.FetchCall):
            requested.append(message.offset)
            session.runner.take(worker_messages.CallPiece("job-0", message.offset, b"junk"))
            session.runner.take(worker_messages.CallPiece("job-1", message.offset, b"of a new program", number=3))
            for at, piece in pickling.pieces(data, message.offset):
                for _ in "ab":
                    session.runner.take(worker_messages.CallPiece("job-1", at, piece))

    session.answer = answer
    (result,) = run(session, worker_messages.Program("job-1", "", call=messages.Blob(len(data))))
    assert value(result) == len(array)
    assert requested == [0, pickling.PIECES * pickling.PIECE]


def test_a_piece_that_does_not_come_is_asked_for_again(session, monkeypatch):
    """A new driver may have lost the request. Time without a driver does not count. In the end the program fails."""
    for name, seconds in {"POLL": 0.001, "REPEAT": 0.01, "FETCH_TIMEOUT": 0.05}.items():
        monkeypatch.setattr(program, name, seconds)
    data, _ = call()
    requested, reads = [], iter(range(10**6))

    class Link:
        send = session.sent_to_driver

        @property
        def disconnected(self):
            """For longer than the timeout."""
            return next(reads) < 100

    def answer(message):
        if isinstance(message, worker_messages.FetchCall):
            requested.append(next(reads))
            if requested[-1] > 100:
                session.runner.take(worker_messages.CallPiece("job-1", 0, data))

    session.answer, session.link = answer, Link()
    assert value(run(session, worker_messages.Program("job-1", "", call=messages.Blob(len(data))))[0]) == 7
    assert len(requested) == 2
    session.answer = lambda message: None
    (result,) = run(session, worker_messages.Program("job-2", "", call=messages.Blob(len(data))))
    assert result.error == f"OSError: the program did not arrive: 0 of {len(data)} bytes, none for 0.05 s"


def test_a_program_that_comes_twice_runs_once(session):
    """A new driver may send a program again: the worker repeats the result."""
    _, program_message = call()
    first, second = run(session, program_message, program_message)
    assert first == second
    assert RAN == ["called"]


def test_a_program_of_a_job_that_is_over_does_not_begin(session):
    """The message that the job is over may arrive before the program starts."""
    session.stopped = "job-1"
    (result,) = run(session, call()[1])
    assert result.error.endswith("JobStoppedError: the job is over")
    assert result.traceback == ""
    assert RAN == []


def test_a_job_that_ends_while_its_call_is_fetched(session):
    """The driver has forgotten the job, and sends no more pieces: the worker stops waiting."""
    data, _ = call(called, os.urandom(2 * pickling.PIECE))

    def answer(message):
        session.stopped = "job-1"

    session.answer = answer
    (result,) = run(session, worker_messages.Program("job-1", "", call=messages.Blob(len(data))))
    assert result.error.endswith("JobStoppedError: the job is over")


def test_a_long_result_is_in_a_file_of_this_machine(session, tmp_path):
    """Only its owner can read it; its name contains worker and job."""
    program_message = call(called, "x" * INLINE)[1]
    (result,) = run(session, worker_messages.Program("job-1", "", call=program_message.call, results=str(tmp_path)))
    (file,) = tmp_path.iterdir()
    assert (file.name, result.value.path) == ("a-0#1.job-1", str(file))
    assert pickling.unpack(pickling.mapped(file)) == "x" * INLINE


def test_a_long_result_for_another_machine_is_kept(session):
    """Until the driver has fetched it."""
    (result,) = run(session, call(called, "x" * INLINE)[1])
    assert (result.value.data, result.value.path) == (b"", "")
    assert (len(session.value), pickling.unpack(session.value)) == (result.value.size, "x" * INLINE)


def test_a_result_for_which_there_is_no_room(session, tmp_path):
    """The disk is full, or the folder is gone: the driver fetches it, as from another machine. No training is lost for that."""
    program_message = call(called, "x" * INLINE)[1]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a-0#1.job-1").mkdir()  # nothing can replace it
    for job, folder in (("job-1", tmp_path / "folder"), ("job-2", tmp_path / "nowhere")):
        (result,) = run(session, worker_messages.Program(job, "", call=program_message.call, results=str(folder)))
        assert (result.error, result.value.path, result.value.data) == ("", "", b"")
        assert pickling.unpack(session.value) == "x" * INLINE


def test_the_driver_always_receives_the_result(session, monkeypatch):
    """The log folder is missing, or its disk full: the program fails or prints nowhere, and the next one runs."""

    def gone(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as broken:
        broken.setattr(program, "log_to", gone)
        (result,) = run(session, call()[1])
        assert result.error == "PermissionError: [Errno 13] Permission denied"
    with open("/dev/full", "w") as full:
        broken_output = lambda taken, fd: OutputStream(taken, full.fileno())
        with monkeypatch.context() as broken:
            broken.setattr(program, "OutputStream", broken_output)
            (result,) = run(session, worker_messages.Program("job-2", "", call=call(called, loud)[1].call))
    assert value(result) == "said"
    assert "loud" in "".join(piece.text for piece in session.output.take())


def loud():
    print("loud" * 10_000)
    return "said"


def test_a_result_that_cannot_be_pickled(session):
    """It is an error of the program, and is printed as one."""
    (result,) = run(session, call(called, threading.Lock)[1])
    assert result.error == "TypeError: the result cannot be sent: cannot pickle '_thread.lock' object"
    (piece,) = [piece for piece in session.output.take() if piece.stream == "err"]
    assert result.error in piece.text


def test_a_call_that_cannot_be_unpickled(session):
    """Junk in a file, or a module that is missing: an error of this program, with its traceback."""
    data, _ = call()
    junk = messages.Blob(len(data), data[:40] + bytes(len(data) - 40))
    (result,) = run(session, worker_messages.Program("job-1", "", call=junk))
    assert "Error" in result.error
    assert result.traceback.startswith("Traceback")


def test_an_error_has_its_traceback_from_the_users_first_line_on(session):
    """Without the frames of nbelastic before it."""

    def failing():
        raise ValueError("no\ud800")

    (result,) = run(session, call(called, failing)[1])
    assert result.error == "ValueError: no?"
    assert "program.py" not in result.traceback.replace("test_program.py", "")
    assert result.traceback.endswith("ValueError: no?\n")


def test_a_long_exit_code_is_shortened_as_a_long_error_is(session):
    """`sys.exit(text)` with megabytes of text: the link would drop the result, and the job would never end."""
    (result,) = run(session, call(sys.exit, "x" * 2_000_000)[1])
    assert result.error.startswith("SystemExit: the program called sys.exit('xxx")
    assert len(result.error) < 1000


def test_a_notebooks_function_finds_what_cells_have_defined_here(session):
    """As long as the notebook itself does not define the name."""
    namespace = {"__name__": "__main__", "here": 1}
    exec("def used():\n    return here + there", namespace)
    assert value(run(session, call(namespace["used"])[1])[0]) == 6
    program_message = worker_messages.Program("job-3", "", call=call(partial(namespace["used"]))[1].call)
    assert value(run(session, program_message)[0]) == 6
    namespace["there"] = 10
    program_message = worker_messages.Program("job-2", "", call=call(namespace["used"])[1].call)
    assert value(run(session, program_message)[0]) == 11


def run_cell(session, cell):
    """Run a cell. Returns its result, and the namespace after it."""
    results = []

    async def story():
        ended = asyncio.Event()
        session.answer = lambda message, before=session.answer: (
            (results.append(message), ended.set()) if isinstance(message, cell_messages.CellResult) else before(message)
        )
        session.runner = Runner(session, "", "")
        serving = asyncio.create_task(session.runner.serve())
        session.runner.take(cell)
        await ended.wait()
        serving.cancel()

    asyncio.run(asyncio.wait_for(story(), 20))
    return results[0]


@pytest.fixture
def namespace(monkeypatch):
    """Of cells. The cells themselves are not run."""

    async def run(worker, cell, *_):
        return cell_messages.CellResult(worker, cell.number, "", "", "", "")

    names = {}
    monkeypatch.setattr(program.cells, "run", run)
    monkeypatch.setattr(program, "get_ipython", lambda: SimpleNamespace(user_ns=names))
    return names


def pushed_cell(data, **where):
    return cell_messages.Cell(3, "", messages.Pushed(("x", "y"), messages.Blob(len(data), **where)))


def test_pushed_values_are_set_from_a_file(session, namespace, tmp_path):
    """They are in the namespace of cells before the cell's end is reported."""
    data = b"".join(pickling.pack({"x": 1, "y": "text"}))
    (tmp_path / "values").write_bytes(data)
    assert run_cell(session, pushed_cell(data, path=str(tmp_path / "values"))).error == ""
    assert namespace == {"x": 1, "y": "text"}


def test_pushed_values_are_fetched_in_pieces(session, namespace):
    """A worker of another machine asks for them, as for a long call."""
    data = b"".join(pickling.pack({"x": os.urandom(2 * pickling.PIECE), "y": 2}))

    def answer(message):
        assert message == worker_messages.FetchCall(W, "push-3", 0)
        for at, piece in pickling.pieces(data, 0):
            session.runner.take(worker_messages.CallPiece("push-3", at, piece))

    session.answer = answer
    assert run_cell(session, pushed_cell(data)).error == ""
    assert (len(namespace["x"]), namespace["y"]) == (2 * pickling.PIECE, 2)


def test_pushed_values_that_cannot_be_taken_are_an_error(session, namespace):
    """It names the values. The namespace stays as it was."""
    result = run_cell(session, pushed_cell(b"", path="/nowhere"))
    assert result.error == "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere' (while x, y arrived)"
    assert namespace == {}


def test_a_long_result_without_space_is_an_error_in_words(session, monkeypatch, tmp_path):
    """The job fails instead of filling the driver's memory; a shorter result is fetched by the driver."""

    def refuse(path, pieces):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(program, "replace_private", refuse)
    message = msgspec.structs.replace(call(os.urandom, 2 * INLINE)[1], results=str(tmp_path))
    short = run(session, message)[0]
    monkeypatch.setattr(pickling, "IN_MEMORY", INLINE)
    long = run(session, message)[0]
    assert short.value == messages.Blob(short.value.size)
    assert long.error == (
        f"OSError: the result (0.1 MB) cannot be saved in {tmp_path}: No space left on device; free some space there"
    )
