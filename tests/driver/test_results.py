"""Values of programs as workers send them: in a message, in a file, or in pieces."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbelastic.driver import results
from nbelastic.driver.results import Outcome, Results
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import pickling

W, OTHER = WorkerId("a", 0, 1), WorkerId("b", 0, 1)
LONG = bytes(range(256)) * (pickling.PIECE // 256) * (2 * pickling.PIECES) + b"the end"


class Receiver:
    """A driver's results, and the requests that it sends to workers."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[tuple[WorkerId, worker_messages.FetchResult]] = []
        self.outcomes: list[Outcome] = []
        self.results = Results(folder, lambda w, message: self.requests.append((w, message)))

    def receive_value(self, value: messages.Blob | None, error: str = "", job: str = "job-1") -> None:
        self.results.receive(worker_messages.ProgramResult(W, job, error, "traceback", value), self.outcomes.append)

    def receive_requested_pieces(self, data: bytes = LONG) -> None:
        """Deliver all pieces that the driver requested from the worker."""
        while self.requests:
            w, fetch = self.requests.pop(0)
            for at, piece in pickling.pieces(data, fetch.offset):
                self.results.receive_piece(worker_messages.ResultPiece(w, fetch.job, at, piece))


@pytest.fixture
def receiver(tmp_path):
    return Receiver(tmp_path)


def test_a_short_value_arrives_with_the_message(receiver):
    """A short value arrives with the message."""
    receiver.receive_value(messages.Blob(3, b"abc"))
    assert receiver.outcomes == [Outcome(value=messages.Blob(3, b"abc"))]
    assert receiver.requests == []


def test_an_error_is_the_outcome(receiver):
    """An error of a program is its outcome, also if it has no message."""
    receiver.receive_value(None, "ValueError: no")
    receiver.receive_value(None)
    assert receiver.outcomes[0] == Outcome("ValueError: no", "traceback")
    assert receiver.outcomes[1].error == "an error without a message"


def test_a_value_in_a_file_stays_there(receiver, tmp_path):
    """The driver leaves a value in its file, for clients to map, until the job's results are removed."""
    path = tmp_path / "job-1" / "value"
    path.parent.mkdir()
    path.write_bytes(LONG)
    receiver.receive_value(messages.Blob(len(LONG), path=str(path)))
    assert receiver.outcomes == [Outcome(value=messages.Blob(len(LONG), path=str(path)))]
    receiver.results.remove("job-0")
    assert path.exists()
    receiver.results.remove("job-1")
    assert not path.exists()


@pytest.mark.parametrize(("size", "error"), [(None, "cannot be read: "), (2, "is incomplete: ")])
def test_a_missing_or_incomplete_file_is_an_error(receiver, tmp_path, size, error):
    """A file that is missing or incomplete makes the outcome an error."""
    path = tmp_path / "job-1" / "value"
    path.parent.mkdir()
    if size is not None:
        path.write_bytes(b"a" * size)
    receiver.receive_value(messages.Blob(3, path=str(path)))
    (outcome,) = receiver.outcomes
    assert outcome.error.startswith(f"the result of a/0#1 {error}")


def test_a_path_that_no_file_can_have_is_an_error(receiver, tmp_path):
    """The job would wait for the value."""
    receiver.receive_value(messages.Blob(3, path=str(tmp_path / "job-1" / "a\0b")))
    (outcome,) = receiver.outcomes
    assert outcome.error == "the result of a/0#1 cannot be read: embedded null byte"


@pytest.mark.parametrize("path", ["/etc/passwd", "folder/../value", "value"])
def test_a_file_elsewhere_is_not_opened(receiver, tmp_path, path):
    """A worker cannot make the driver read a file outside the folder for results."""
    (tmp_path / "value").write_bytes(b"abc")
    receiver.receive_value(messages.Blob(3, path=str(tmp_path / path) if path != "value" else path))
    (outcome,) = receiver.outcomes
    assert outcome.error.startswith("the result of a/0#1 is outside the folder for results: ")


@pytest.mark.parametrize("job", ["{elsewhere}", "../elsewhere", "job-1/../../elsewhere", "..", ".", ""])
def test_a_value_is_not_written_elsewhere(tmp_path, job):
    """A worker that names a folder instead of its job cannot make the driver write a file there."""
    (tmp_path / "results" / "job-1").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    receiver, value = Receiver(tmp_path / "results"), messages.Blob(len(LONG))
    receiver.receive_value(value, job=job.format(elsewhere=tmp_path / "elsewhere"))
    receiver.receive_requested_pieces()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    (outcome,) = receiver.outcomes
    assert outcome.error.startswith("the result of a/0#1 belongs to no job: ")


def test_a_value_of_another_machine_is_fetched(receiver):
    """A value on another machine is fetched in several pieces at a time, and a repeated piece counts once."""
    receiver.receive_value(messages.Blob(len(LONG)))
    assert receiver.outcomes == []
    receiver.requests.append(receiver.requests[0])
    receiver.receive_requested_pieces()
    assert [outcome.value.data for outcome in receiver.outcomes] == [LONG]


def test_a_result_that_is_reported_again_is_fetched_from_the_start(receiver):
    """A result that is reported again is fetched from the start: the driver may have missed pieces."""
    receiver.receive_value(messages.Blob(len(LONG)))
    _, fetch = receiver.requests.pop()
    at, piece = next(pickling.pieces(LONG, fetch.offset))
    receiver.results.receive_piece(worker_messages.ResultPiece(W, "job-1", at, piece))
    receiver.receive_value(messages.Blob(len(LONG)))
    receiver.receive_requested_pieces()
    assert [outcome.value.data for outcome in receiver.outcomes] == [LONG]


def test_pieces_of_other_jobs_and_workers_are_ignored(receiver):
    """Pieces of other jobs, and of other or lost workers, do not get into a value."""
    receiver.receive_value(messages.Blob(len(LONG)))
    receiver.results.receive_piece(worker_messages.ResultPiece(W, "job-0", 0, b"junk"))
    receiver.results.receive_piece(worker_messages.ResultPiece(OTHER, "job-1", 0, b"junk"))
    receiver.results.forget([OTHER])
    receiver.receive_requested_pieces()
    assert [outcome.value.data for outcome in receiver.outcomes] == [LONG]
    receiver.receive_value(messages.Blob(len(LONG)))
    receiver.results.forget([W])
    receiver.receive_requested_pieces()
    assert len(receiver.outcomes) == 1


@pytest.mark.parametrize("full", ["before", "after"])
def test_a_long_value_without_space_is_an_error_and_a_short_one_stays_in_memory(receiver, monkeypatch, full):
    """A full disk ends the job in words. A value without any space is not even fetched."""

    def refuse(path, pieces):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results, "replace_private", refuse)
    if full == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    receiver.receive_value(messages.Blob(len(LONG)))
    receiver.receive_requested_pieces()
    monkeypatch.setattr(pickling, "IN_MEMORY", 2000)
    receiver.receive_value(messages.Blob(len(LONG)))
    assert bool(receiver.requests) == (full == "after")
    receiver.receive_requested_pieces()
    short, long = receiver.outcomes
    assert short.value.data == LONG
    assert long.error.startswith("OSError: the result of a/0#1 (8.4 MB) cannot be saved in ")
    assert long.error.endswith(": No space left on device; free some space there")
