"""Cells, before a kernel sends them, and what it shows when they end."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

import nbelastic as nbe
from nbelastic.client.cell_syntax import MAX_CHARACTERS, check_cell
from nbelastic.protocol.requests import Piece


def test_a_cell_that_no_message_can_hold_is_refused():
    """A cell that is longer than a message may be is refused: it would break the connection to each worker."""
    check_cell("#" * MAX_CHARACTERS, awaits=False)
    with pytest.raises(nbe.UsageError, match=r"the cell has 1000001 characters, and the limit is 1000000: read"):
        check_cell("#" * (MAX_CHARACTERS + 1), awaits=True)


@pytest.mark.parametrize("end", [nbe.ClusterStoppedError("it has stopped"), KeyboardInterrupt(), None])
def test_the_last_words_of_a_cell_are_shown(monkeypatch, end):
    """What workers print just before the cluster stops, Ctrl-C or the end of the timeout is shown, before the error."""
    last, shown = Piece("a/0#1", "out", "last words\n"), []

    def request(_, on_piece):
        on_piece(last)
        answer = Future()
        if end is not None:
            answer.set_exception(end)
        return answer

    cluster = nbe.Cluster(code_sync=False)
    driver = SimpleNamespace(status=SimpleNamespace(reason="no reason"), request=request)
    monkeypatch.setattr(cluster._link, "running", lambda: driver)
    with pytest.raises(type(end) if end is not None else nbe.WaitTimeoutError):
        cluster.execute("train()", on_output=shown.extend, timeout=0.01)
    assert shown == [last]
