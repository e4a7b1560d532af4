"""The magics that run a program on the workers, and wait for it."""

from __future__ import annotations

from argparse import REMAINDER, Namespace
from typing import TYPE_CHECKING

from IPython.core.magic import magics_class

from nbelastic.errors import UsageError
from nbelastic.notebook.cell_output import short_syntax_errors
from nbelastic.notebook.cluster_magics import ClusterMagics
from nbelastic.notebook.failed_jobs import show_failure_here
from nbelastic.notebook.magic_arguments import argument, magic, out
from nbelastic.notebook.script_arguments import SCRIPT_OPTIONS, script_options

if TYPE_CHECKING:
    from nbelastic.client.job import Job


@magics_class
class RunMagics(ClusterMagics):
    """The part of `ElasticMagics` that runs cells and scripts as jobs."""

    @magic(
        "line_cell",
        argument("--job", "--out", dest="job_variable", metavar="VARIABLE", help="variable that gets the Job"),
        argument("--wait", action="store_true", help="return when the job has ended"),
        argument("--timeout", type=float, metavar="S", help="wait for at most S seconds"),
        argument(
            "--checkpoint",
            metavar="FOLDER",
            help="for a cell: start from the newest checkpoint in this folder, and save there",
        ),
        argument("--checkpoint-every", type=int, metavar="N", help="for a cell: commits between two checkpoints (100)"),
        argument("--checkpoint-keep", type=int, metavar="K", help="for a cell: how many checkpoints are kept (3)"),
        argument(
            "--swap",
            action="store_true",
            help="for a cell: replace the program of the job that runs, between two steps",
        ),
        *SCRIPT_OPTIONS,
        argument(
            "script", nargs=REMAINDER, metavar="SCRIPT", help="instead of a cell: a torchrun script and its arguments"
        ),
    )
    def elastic_run(self, options: Namespace, cell: str | None) -> Job:
        """Train: %%elastic_run runs its cell as the program of every worker, %elastic_run runs a torchrun script.

        Returns a Job at once. If it fails, its error appears below the cell. With --swap the cell takes over the training of
        the job that runs, and returns that job.
        """
        self._check_variable(options.job_variable)
        checkpoints = {name: value for name, value in vars(options).items() if name.startswith("checkpoint")}
        script = script_options(options)
        if cell is None:
            if not options.script:
                raise UsageError("name a script, or write %%elastic_run above a cell.")
            if any(value is not None for value in checkpoints.values()):
                raise UsageError("--checkpoint options need a cell: a script saves its own checkpoints.")
            if options.swap:
                raise UsageError("--swap needs a cell: a script makes no commits, at which it could be replaced.")
            job = self._cluster().run_script(*options.script, **script)
        elif options.script or script:
            raise UsageError("a script and its options cannot be combined with a cell: write %elastic_run.")
        else:
            with short_syntax_errors():
                job = self._cluster().run_cell(cell, swap=options.swap, **checkpoints)
        self._keep(options.job_variable, job)
        try:
            if options.wait or options.timeout is not None:
                job.result(timeout=options.timeout)
        finally:
            show_failure_here(job)  # it may fail later: the wait may be too short, or interrupted
        return job

    @magic(
        "line",
        argument("rank", nargs="?", type=int, metavar="RANK", help="the rank whose program waits (default: any)"),
        argument("--timeout", type=float, metavar="S", help="wait for a breakpoint for at most S seconds"),
    )
    def elastic_debug(self, options: Namespace) -> None:
        """Open the debugger of a program that has come to a breakpoint(), while the other ranks wait for it."""
        self._cluster().debug(rank=options.rank, timeout=options.timeout)

    @magic(
        "line",
        argument("--world", type=int, metavar="N", help="wait until N workers are in one world"),
        argument("--timeout", type=float, metavar="S", help="give up after S seconds and report what is missing"),
        out("the job's values by rank or, with --world, the Status"),
    )
    def elastic_wait(self, options: Namespace) -> None:
        """Wait until the job has ended or, with --world, until a world of that size runs."""
        self._check_variable(options.out_variable)
        value: object
        if options.world is None:
            value = self._job().result(timeout=options.timeout)
        else:
            limit = {} if options.timeout is None else {"timeout": options.timeout}
            cluster = self._cluster()
            value = cluster.wait(options.world, **limit)
            job = cluster.job
            if job is not None and job.done() and job._values is None:  # this notebook has not asked for its result yet
                print(
                    f"{job.name} has ended ({job.status}): {options.world} workers are ready, and none of them trains."
                )
        self._keep(options.out_variable, value)
