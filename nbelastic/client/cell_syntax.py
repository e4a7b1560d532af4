"""Whether a cell can be sent to the workers."""

from __future__ import annotations

import ast
import traceback
import warnings

from nbelastic.errors import UsageError

LONGEST = 1_000_000  # characters of a cell


def check_cell(source: str, *, awaits: bool) -> None:
    """Raise SyntaxError if no worker could compile this cell, which may hold IPython's syntax (`!ls`, `%time`); UsageError if
    it is too long for a message.

    `awaits`: `await` may stand outside of functions. The error points to the line, so that nothing has to be sent first.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    if len(source) > LONGEST:
        raise UsageError(
            f"the cell has {len(source)} characters, and {LONGEST} are possible: read long data from a file."
        )
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
