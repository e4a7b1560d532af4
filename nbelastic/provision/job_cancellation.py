"""Cancels a batch job from a process that outlives this one, and that waits for a controller which is away for some minutes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

# A refusal may mean that the job has ended, or is not known yet: three tries. A controller that does not answer may be
# restarting: more tries, for ten minutes. Standard error is the driver's log.
PAUSES = "2 2 2 4 8 15 30 60 60 60 120 120 120"  # seconds after each try
_SCRIPT = """
tries=0
for pause in $PAUSES; do
    text=$("$@" 2>&1) && exit
    tries=$((tries + 1))
    case $text in
        *"slurm controller"*|*"standby mode"*|*"timed out"*|*"ailed to connect"*|*"annot connect"*|*"not connected"*|\
        *"onnection refused"*|*"not responding"*) ;;
        *) [ $tries -lt 3 ] || { echo "nbelastic: a batch job could not be cancelled: \\`$*\\`: $text" >&2; exit; } ;;
    esac
    sleep $pause
done
echo "nbelastic: a batch job may still be queued, as its system did not answer for ten minutes: run \\`$*\\` ($text)" >&2
"""
_IN_BACKGROUND = f"PAUSES=$1; shift; ({_SCRIPT}) </dev/null >/dev/null &"


def cancel(command: Sequence[str], job: str) -> None:
    """Run this command of the batch system with the job's number, until it succeeds. Return at once."""
    words = ["/bin/sh", "-c", _IN_BACKGROUND, "sh", PAUSES, *command, job]
    subprocess.run(words, stdin=subprocess.DEVNULL, start_new_session=True, check=False)
