"""Cells, before a kernel sends them."""

from __future__ import annotations

import pytest

import nbelastic as nbe
from nbelastic.client.cell_syntax import MAX_CHARACTERS, check_cell


def test_a_cell_that_no_message_can_hold_is_refused():
    """A cell that is longer than a message may be is refused: it would break the connection to each worker."""
    check_cell("#" * MAX_CHARACTERS, awaits=False)
    with pytest.raises(nbe.UsageError, match=r"the cell has 1000001 characters, and the limit is 1000000: read"):
        check_cell("#" * (MAX_CHARACTERS + 1), awaits=True)
