"""`%px` and `%%px` while a job trains: one line instead of a call that waits for the end of the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbelastic.errors import UsageError


def guard_px(shell: Any, present_job: Callable[[], str]) -> None:
    """Have ipyparallel's magics raise UsageError while `present_job()` names a job: the engines run its program."""
    owner = getattr(shell.magics_manager.magics["line"].get("px"), "__self__", None)
    if owner is None:  # ipyparallel has registered none
        return
    execute = owner.parallel_execute

    def refuse_during_job(*args: Any, **kwargs: Any) -> Any:
        job = present_job()
        if job:
            raise UsageError(
                f"{job} is running, and %px would wait for its end: write %%elastic_px --at-commit above the cell."
            )
        return execute(*args, **kwargs)

    owner.parallel_execute = refuse_during_job
