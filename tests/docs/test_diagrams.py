"""The state diagrams of docs/how-it-works.md are those of the code."""

from __future__ import annotations

import pytest

from nbelastic.core.state import WorkerState
from tests.docs.draw_states import PAGE, STAGES, diagrams, drawn, redraw


@pytest.mark.soak(share=0.2)
def test_the_page_shows_what_the_code_does():
    """Every transition that can be seen is drawn, with what causes it, and no other.

    The walks reach every state, so that no diagram lacks one; a lost worker has left the cluster.
    """
    workers, stages = diagrams()
    assert drawn(PAGE.read_text()) == [workers, stages], "draw them again: python -m tests.docs.draw_states --write"
    assert {state for state in WorkerState if f"--> {state}:" not in workers} == {WorkerState.LOST}
    assert all(f"--> {stage}:" in stages for stage in STAGES)
    page = PAGE.read_text()
    assert redraw(page.replace("a death, HostRemoved", "nothing")) == page, "`--write` leaves the text alone"
