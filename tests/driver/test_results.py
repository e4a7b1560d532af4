"""Values of programs as they come from workers: in a message, in a file, or in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbelastic.driver.results import Outcome, Results
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import pickling

W, OTHER = WorkerId("a", 0, 1), WorkerId("b", 0, 1)
LONG = bytes(range(256)) * (pickling.PIECE // 256) * (2 * pickling.PIECES) + b"the end"


class Receiver:
    """A driver's results, and what workers are asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[tuple[WorkerId, worker_messages.FetchResult]] = []
        self.outcomes: list[Outcome] = []
        self.results = Results(folder, lambda w, message: self.asked.append((w, message)))

    def takes(self, value: messages.Blob | None, error: str = "", job: str = "job-1") -> None:
        self.results.receive(worker_messages.ProgramResult(W, job, error, "traceback", value), self.outcomes.append)

    def gets_pieces(self, data: bytes = LONG) -> None:
        """All that the worker is asked for."""
        while self.asked:
            w, fetch = self.asked.pop(0)
            for at, piece in pickling.pieces(data, fetch.offset):
                self.results.receive_piece(worker_messages.ResultPiece(w, fetch.job, at, piece))


@pytest.fixture
def receiver(tmp_path):
    return Receiver(tmp_path)


def test_a_short_value_is_there_at_once(receiver):
    """It came with the message."""
    receiver.takes(messages.Blob(3, b"abc"))
    assert receiver.outcomes == [Outcome(value=messages.Blob(3, b"abc"))]
    assert receiver.asked == []


def test_an_error_is_the_outcome(receiver):
    """Even one without a message is one."""
    receiver.takes(None, "ValueError: no")
    receiver.takes(None)
    assert receiver.outcomes[0] == Outcome("ValueError: no", "traceback")
    assert receiver.outcomes[1].error == "an error without a message"


def test_a_value_in_a_file_stays_there(receiver, tmp_path):
    """The driver does not read it: who wants it maps it. When nobody may ask for it any more, it goes with its job's folder."""
    path = tmp_path / "job-1" / "value"
    path.parent.mkdir()
    path.write_bytes(LONG)
    receiver.takes(messages.Blob(len(LONG), path=str(path)))
    assert receiver.outcomes == [Outcome(value=messages.Blob(len(LONG), path=str(path)))]
    receiver.results.remove("job-0")
    assert path.exists()
    receiver.results.remove("job-1")
    assert not path.exists()


@pytest.mark.parametrize(("size", "error"), [(None, "cannot be read: "), (2, "is incomplete: ")])
def test_a_file_that_is_not_there_or_not_whole_is_an_error(receiver, tmp_path, size, error):
    path = tmp_path / "job-1" / "value"
    path.parent.mkdir()
    if size is not None:
        path.write_bytes(b"a" * size)
    receiver.takes(messages.Blob(3, path=str(path)))
    (outcome,) = receiver.outcomes
    assert outcome.error.startswith(f"the result of a/0#1 {error}")


@pytest.mark.parametrize("path", ["/etc/passwd", "folder/../value", "value"])
def test_a_file_elsewhere_is_not_opened(receiver, tmp_path, path):
    """Whoever has the workers' key gets no other file of the notebook's user read."""
    (tmp_path / "value").write_bytes(b"abc")
    receiver.takes(messages.Blob(3, path=str(tmp_path / path) if path != "value" else path))
    (outcome,) = receiver.outcomes
    assert outcome.error.startswith("the result of a/0#1 is outside the folder for results: ")


def test_a_value_of_another_machine_is_fetched(receiver):
    """Several pieces at a time, the next ones when they have come; those that come twice count once."""
    receiver.takes(messages.Blob(len(LONG)))
    assert receiver.outcomes == []
    receiver.asked.append(receiver.asked[0])
    receiver.gets_pieces()
    assert [outcome.value.data for outcome in receiver.outcomes] == [LONG]


def test_a_result_that_is_said_again_is_fetched_from_the_start(receiver):
    """As it is to a driver that has missed pieces."""
    receiver.takes(messages.Blob(len(LONG)))
    _, fetch = receiver.asked.pop()
    at, piece = next(pickling.pieces(LONG, fetch.offset))
    receiver.results.receive_piece(worker_messages.ResultPiece(W, "job-1", at, piece))
    receiver.takes(messages.Blob(len(LONG)))
    receiver.gets_pieces()
    assert [outcome.value.data for outcome in receiver.outcomes] == [LONG]


def test_pieces_of_the_dead_and_of_others_are_ignored(receiver):
    """Nothing of another job or worker gets into a value."""
    receiver.takes(messages.Blob(len(LONG)))
    receiver.results.receive_piece(worker_messages.ResultPiece(W, "job-0", 0, b"junk"))
    receiver.results.receive_piece(worker_messages.ResultPiece(OTHER, "job-1", 0, b"junk"))
    receiver.results.forget([OTHER])
    receiver.gets_pieces()
    assert [outcome.value.data for outcome in receiver.outcomes] == [LONG]
    receiver.takes(messages.Blob(len(LONG)))
    receiver.results.forget([W])
    receiver.gets_pieces()
    assert len(receiver.outcomes) == 1
