"""Output of a notebook: a line that changes in place, and an interrupt without its traceback."""

from __future__ import annotations

import sys
from typing import Any

NO_LONGER_WAITING = "no longer waiting; the cluster and its job go on, and %elastic_dashboard shows them."


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows widgets and can change output that it has shown."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def show_in_one_line(error: KeyboardInterrupt, text: str = NO_LONGER_WAITING) -> None:
    """Have IPython show the interrupt without a traceback. The first text that is set stays."""
    vars(error).setdefault("_render_traceback_", lambda: [f"KeyboardInterrupt: {text}"])


class NotebookLine:
    """For the thread that runs the cell. The first text and the last one are empty: a stored output does not depend on time."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Show this text instead of the last one."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display({"text/plain": ""}, raw=True, display_id=True)
        self._handle.update({"text/plain": text}, raw=True)
