"""The instructions of compiled code."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType


def code_steps(code: CodeType) -> Iterator[dis.Instruction]:
    """The instructions of the code, and those of the functions inside it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_steps(constant)
