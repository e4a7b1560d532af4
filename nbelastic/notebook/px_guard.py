"""ipyparallel's magics for the workers: they connect on first use, and while a job trains they refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from IPython.core.magic import no_var_expand

from nbelastic.errors import UsageError

LINE_MAGICS = ("px", "autopx", "pxconfig", "pxresult")


def register_px(shell: Any, connect: Callable[[], Any], present_job: Callable[[], str]) -> None:
    """Have `%px`, `%%px` and their like run on the engines of `connect()`, ipyparallel's client. Each use calls it.

    So each knows newcomers, and raises ClusterStoppedError if the cluster does not run. They raise UsageError while
    `present_job()` names a job, as they would wait for its end: the engines run its program.
    """

    def register(run: Callable[..., Any], kind: str, name: str) -> None:
        first_use = partial(_first_use, shell, connect, present_job, run, name)
        shell.register_magic_function(no_var_expand(first_use), kind, name)  # `run` expands variables

    for name in LINE_MAGICS:
        register(shell.run_line_magic, "line", name)
    register(shell.run_cell_magic, "cell", "px")


def _first_use(
    shell: Any,
    connect: Callable[[], Any],
    present_job: Callable[[], str],
    run: Callable[..., Any],
    name: str,
    *arguments: str,
) -> Any:
    """Replace these magics by ipyparallel's, and run the one that was used."""
    _refuse_during_job(present_job)
    connect().activate()
    owner = shell.magics_manager.magics["line"]["px"].__self__
    execute = owner.parallel_execute

    def execute_with_present_client(*args: Any, **kwargs: Any) -> Any:
        _refuse_during_job(present_job)
        client, view = connect(), owner.view
        if view.client is not client:
            owner.view = client.direct_view(view.targets)
            owner.view.block = view.block
        return execute(*args, **kwargs)

    owner.parallel_execute = execute_with_present_client
    return run(name, *arguments)


def _refuse_during_job(present_job: Callable[[], str]) -> None:
    job = present_job()
    if job:
        raise UsageError(
            f"{job} is running, and %px would wait for its end: write %%elastic_px --at-commit above the cell."
        )
