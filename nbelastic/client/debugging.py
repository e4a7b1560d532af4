"""The debugger of a program that waits at a breakpoint, in a notebook's cell or a terminal."""

from __future__ import annotations

from nbelastic.client.driver_link import DriverLink
from nbelastic.protocol.requests import Debug, DebuggerPrompt
from nbelastic.system.terminal_text import remove_controls


def debug(link: DriverLink, rank: int | None, timeout: float | None) -> None:
    """Wait for a breakpoint, then pass lines to its debugger until the program goes on. UsageError if no job runs."""
    where = "a program" if rank is None else f"rank {rank}"
    prompt: DebuggerPrompt = link.ask(Debug(rank), timeout, f"{where} to come to a breakpoint", cancel=True)
    name = prompt.worker if prompt.rank is None else f"rank {prompt.rank} ({prompt.worker})"
    print(f"{name} waits at a breakpoint; c lets it go on.")
    while prompt.number:
        shown, _, last = remove_controls(prompt.text).rpartition("\n")
        if shown:
            print(shown)
        line = input(last)
        prompt = link.ask(Debug(None, prompt.number, line), None, "the debugger to answer", cancel=True)
    print(f"{name} goes on.")
