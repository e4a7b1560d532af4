"""Checks a cell before it is sent to the workers, and makes the request that sends it."""

from __future__ import annotations

import ast
import hashlib
import traceback
import warnings
from collections.abc import Iterable, Sequence

from nbelastic.errors import UsageError
from nbelastic.protocol import requests
from nbelastic.system.argument_types import SECONDS, WHOLE, check_kind

MAX_CHARACTERS = 1_000_000
MAX_LIMIT = 86_400.0  # seconds


def check_cell(source: str, *, awaits: bool) -> None:
    """Raise SyntaxError if workers cannot compile this cell; UsageError if it is too long for a message.

    The cell may use IPython's syntax (`!ls`, `%time`). `awaits`: it may use `await` outside functions. The SyntaxError points
    to the line.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    if len(source) > MAX_CHARACTERS:
        raise UsageError(
            f"the cell has {len(source)} characters, and the limit is {MAX_CHARACTERS}: read long data from a file."
        )
    code = TransformerManager().transform_cell(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the worker shows the warnings
        try:
            compile(code, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if awaits else 0, dont_inherit=True)
        except SyntaxError as error:
            lines = code.splitlines()
            if error.text is None and error.lineno is not None and error.lineno <= len(lines):
                error.text = lines[error.lineno - 1]
            raise error.with_traceback(None) from None


def cell_request(
    source: str, *, setup: bool, key: str | None, at_commit: bool, ranks: Sequence[int], limit: float
) -> requests.AnyRequest:
    """The request of `Cluster.execute`. UsageError for wrong arguments, SyntaxError as from `check_cell`."""
    if at_commit and (setup or key is not None):
        raise UsageError("a setup cell runs between jobs, not at a commit: leave out setup and key.")
    check_cell(source, awaits=not at_commit)
    if at_commit:
        return requests.ExecuteAtCommit(source, check_ranks(ranks), check_limit(limit))
    if setup:
        return requests.ExecuteSetup(key or f"cell-{hashlib.sha256(source.encode()).hexdigest()[:8]}", source)
    return requests.Execute(source)


def check_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks on which a cell is to run. UsageError for a wrong one."""
    chosen = tuple(ranks) if isinstance(ranks, Iterable) else (ranks,)
    for rank in chosen:
        check_kind("ranks", rank, WHOLE)
        if rank < 0:
            raise UsageError(f"ranks={rank}: ranks count from 0.")
    return tuple(sorted(set(chosen)))


def check_limit(limit: float) -> float:
    """The seconds for which a cell may run at a commit. UsageError for a wrong number."""
    check_kind("limit", limit, SECONDS)
    if not 0 < limit <= MAX_LIMIT:
        raise UsageError(
            f"limit={limit:g}: more than 0 s, and at most {MAX_LIMIT:g} s, as all ranks wait for the cell."
        )
    return float(limit)


def describe_error(error: SyntaxError) -> str:
    """Return the line, the caret and the message, as Python shows them."""
    return "".join(traceback.format_exception_only(error)).rstrip()
