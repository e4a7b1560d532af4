"""Notebook cells before they are sent, and the errors that come back from them."""

from __future__ import annotations

import ast
import re
import traceback
import warnings
from typing import Any

from nbelastic.core.messages import WorkerId

Executed = tuple[str, str, str, str | None]  # worker, stdout, stderr, error
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PROMPT = re.compile(r"^( *)Cell In\[\d+\]", re.MULTILINE)  # the engine's own count, which differs between workers
_RULE = re.compile(r"\A-+\n")


def check_cell(source: str, *, awaits: bool) -> None:
    """Raise SyntaxError if no worker could compile this cell, which may hold IPython's syntax (`!ls`, `%time`).

    `awaits`: `await` may stand outside of functions. The error points to the line, so that nothing has to be sent first.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    code = TransformerManager().transform_cell(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the worker gives them
        try:
            compile(code, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if awaits else 0, dont_inherit=True)
        except SyntaxError as error:
            lines = code.splitlines()
            if error.text is None and error.lineno is not None and error.lineno <= len(lines):
                error.text = lines[error.lineno - 1]
            raise error.with_traceback(None) from None


def described(error: SyntaxError) -> str:
    """The line, the caret and the message, as Python shows them."""
    return "".join(traceback.format_exception_only(error)).rstrip()


def executed(w: WorkerId, result: Any) -> Executed:
    """What a cell printed on one worker, and its error."""
    return str(w), str(result.stdout), str(result.stderr), traceback_of(result) or None


def error_of(result: Any) -> str:
    """The error of an executed cell in one line, or nothing."""
    error = _raised(result)
    return "" if error is None else _in_one_line(error)


def traceback_of(result: Any) -> str:
    """The error of an executed cell with its remote traceback, without colours; or nothing."""
    error = _raised(result)
    if error is None:
        return ""
    text = _COLOURS.sub("", str(getattr(error, "traceback", "") or "")).strip()
    text = _PROMPT.sub(r"\1Cell", _RULE.sub("", text))
    return text or _in_one_line(error)


def _raised(result: Any) -> Exception | None:
    try:
        result.get(timeout=0)
    except Exception as error:  # noqa: BLE001  (the user's own error, whatever it is)
        return error
    return None


def _in_one_line(error: Exception) -> str:
    name = getattr(error, "ename", type(error).__name__)
    return f"{name}: {getattr(error, 'evalue', error)}"
