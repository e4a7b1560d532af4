"""The debugger reports each time that it is left, however the user does that."""

from __future__ import annotations

import sys

import pytest

from nbelastic.programs.debugger import _Debugger


class Terminal:
    """A user who enters these lines."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)
        self.times_left = 0

    def readline(self) -> str:
        return next(self._lines)

    def left(self) -> None:
        self.times_left += 1

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("line", ["c", "q", "r"])
def test_a_program_that_goes_on_from_a_generator(line):
    """With `r` too: pdb does not stop at a `yield`, so the program would train on and still count as waiting."""
    terminal = Terminal("n", line)

    def samples():
        for number in range(3):
            if number == 1:
                _Debugger(terminal).set_trace(sys._getframe())
            yield number

    assert list(samples()) == [0, 1, 2]
    assert terminal.times_left == 1
