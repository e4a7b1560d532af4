"""What a cell prints, between the main thread and the link thread."""

from __future__ import annotations

from nbelastic.protocol.cell_messages import CellPiece, CellResult
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.cell_pieces import CellPieces
from nbelastic.worker.output_buffer import MAX_TEXT

W = WorkerId("a", 0, 1)


def test_a_result_follows_all_that_its_cell_has_printed():
    """Text of one stream is one piece; a display is a piece of its own; the order stays."""
    pieces, result = CellPieces(W), CellResult(W, 3, "", "", "", "")
    for kind, text in (("out", "a"), ("out", "b\n"), ("display", "x"), ("display", "y"), ("err", "c")):
        pieces.put(3, kind, text)
    pieces.end(result)
    pieces.put(4, "out", "next")
    taken = [("out", "ab\n"), ("display", "x"), ("display", "y"), ("err", "c")]
    assert list(pieces.take()) == [*(CellPiece(W, 3, *one) for one in taken), result, CellPiece(W, 4, "out", "next")]
    assert list(pieces.take()) == []


def test_of_a_progress_bar_only_the_newest_frame_is_sent():
    """It replaces what was sent before."""
    pieces = CellPieces(W)
    for frame in ("\r 1%", "\r 2%", "\r 3%"):
        pieces.put(3, "err", frame)
    assert list(pieces.take()) == [CellPiece(W, 3, "err", "\r 3%")]
    nested = "\rinner\x1b[A", "\n\r     \r\x1b[A", "\router 1/2"
    for frame in nested:
        pieces.put(3, "err", frame)
    assert list(pieces.take()) == [CellPiece(W, 3, "err", "".join(nested))]  # no step to another line is lost


def test_of_a_long_text_only_the_end_is_sent():
    """A message has a limit. The first line says how much is only in the log file."""
    pieces = CellPieces(W)
    pieces.put(3, "out", "x" * (MAX_TEXT + 7))
    (piece,) = pieces.take()
    assert piece.text == "… 7 characters are only in the log file …\n" + "x" * MAX_TEXT
