"""The global names that a function reads in each of its calls, found from the control flow of its bytecode.

The compilers of Python 3.11 to 3.14 place branches and loops differently. So nothing here depends on the order of
instructions. It follows their jumps.
"""

from __future__ import annotations

import dis
from bisect import bisect_left
from collections.abc import Iterator
from types import CodeType

UNCONDITIONAL = frozenset(
    {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE", "JUMP_NO_INTERRUPT"}
)
RETURNS = frozenset({"RETURN_VALUE", "RETURN_CONST"})
RAISES = frozenset({"RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT"})
FILLERS = frozenset({"NOT_TAKEN", "EXTENDED_ARG", "NOP"})  # do nothing


def certain_reads(code: CodeType) -> set[str]:
    """The global names that each call reads before it returns, if no exception is raised and each loop runs at least once."""
    steps = list(dis.get_instructions(code))
    names = list({step.argval for step in steps if step.opname == "LOAD_GLOBAL"})
    bits = {name: 1 << number for number, name in enumerate(names)}
    reads = [bits[step.argval] if step.opname == "LOAD_GLOBAL" else 0 for step in steps]
    read_until = _read_until(reads, _successors(steps))
    ends = [i for i in read_until if steps[i].opname in RETURNS]
    if not ends:  # it ends with an exception only
        ends = [i for i in read_until if steps[i].opname in RAISES or _is_back(steps[i])]
    certain = (1 << len(names)) - 1 if ends else 0
    for end in ends:
        certain &= read_until[end]
    return {name for name in names if bits[name] & certain}


def _read_until(reads: list[int], successors: list[set[int]]) -> dict[int, int]:
    """For each instruction that a call may reach: the names that all ways to it, and itself, have read."""
    found = {0: reads[0]}
    pending = [0]
    while pending:
        i = pending.pop()
        for after in successors[i]:
            names = found[i] | reads[after]
            if after in found:
                names &= found[after]
            if found.get(after) != names:
                found[after] = names
                pending.append(after)
    return found


def _successors(steps: list[dis.Instruction]) -> list[set[int]]:
    """The instructions that may follow each one. The end of a loop follows its body, and not the test before it."""
    offsets = [step.offset for step in steps]
    targets = {i: bisect_left(offsets, step.argval) for i, step in enumerate(steps) if _is_jump(step)}
    successors: list[set[int]] = []
    for i, step in enumerate(steps):
        goes_on = step.opname not in UNCONDITIONAL | RETURNS | RAISES and i + 1 < len(steps)
        successors.append({*([i + 1] if goes_on else ()), *([targets[i]] if i in targets else ())})
    for test, jumps_back in list(_loops(steps, targets, successors)):
        successors[test].discard(targets[test])
        for jump in jumps_back:
            successors[jump].add(targets[test])
    return successors


def _loops(
    steps: list[dis.Instruction], targets: dict[int, int], successors: list[set[int]]
) -> Iterator[tuple[int, set[int]]]:
    """For each loop: the jump that leaves it before its first turn, and the jumps back at the ends of its body."""
    for begin in {target for i, target in targets.items() if target <= i}:
        jumps_back = {i for i, target in targets.items() if target == begin <= i}
        body = _body(begin, jumps_back, successors)
        leaves = [i for i, target in targets.items() if target not in body and steps[i].opname not in UNCONDITIONAL]
        inside = [i for i in leaves if i in body]
        before = [i for i in leaves if i < begin and _is_same(steps, i + 1, begin)]
        if before:  # the test of a `while` is repeated after the body
            yield before[0], jumps_back
        elif inside and _is_first_test(steps, begin, inside):
            yield inside[0], jumps_back


def _body(begin: int, jumps_back: set[int], successors: list[set[int]]) -> set[int]:
    """The instructions of a loop: those from which a jump back can be reached."""
    before: dict[int, set[int]] = {}
    for i, after in enumerate(successors):
        for one in after:
            before.setdefault(one, set()).add(i)
    body, pending = {begin}, list(jumps_back)
    while pending:
        i = pending.pop()
        if i not in body:
            body.add(i)
            pending += before.get(i, ())
    return body


def _is_same(steps: list[dis.Instruction], one: int, other: int) -> bool:
    """Whether only fillers are between two instructions."""
    low, high = sorted((one, other))
    return all(step.opname in FILLERS for step in steps[low:high])


def _is_first_test(steps: list[dis.Instruction], begin: int, ways_out: list[int]) -> bool:
    """Whether a loop begins with the first of these jumps.

    In a `while`, it is the only one, and what comes before it is an expression without conditions.
    """
    test = ways_out[0]
    if steps[test].opname == "FOR_ITER":
        return _is_same(steps, begin, test)
    between = steps[begin:test]
    is_expression = not any(_is_jump(step) or step.opname.startswith(("POP_TOP", "STORE")) for step in between)
    return is_expression and len(ways_out) == 1


def _is_jump(step: dis.Instruction) -> bool:
    return step.opcode in dis.hasjrel or step.opcode in dis.hasjabs


def _is_back(step: dis.Instruction) -> bool:
    return _is_jump(step) and step.argval <= step.offset
