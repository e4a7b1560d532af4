"""The magics that run cells on the workers."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from IPython.core.magic import magics_class

from nbelastic.client.notebook_line import show_in_one_line
from nbelastic.errors import UsageError
from nbelastic.notebook.cell_output import CellDisplay, cell_id, raise_errors, short_syntax_errors
from nbelastic.notebook.cluster_magics import ClusterMagics
from nbelastic.notebook.magic_arguments import argument, magic, out, several, was_given

INTERRUPTED = "the cell is interrupted on the workers, which stay."
_TIMEOUT = argument("--timeout", type=float, metavar="S", help="with a cell: how many seconds to wait for it")
_CELL_OPTIONS = (
    argument(
        "--setup",
        nargs="?",
        const="",
        metavar="KEY",
        help="with a cell: run it as a setup cell with this KEY (default: the cell's id)",
    ),
    _TIMEOUT,
    argument("--at-commit", action="store_true", help="with a cell: run it in the middle of the running program"),
    several("--rank", each=int, metavar="RANK", help="with --at-commit: only on these ranks"),
    argument("--limit", type=float, metavar="S", help="with --at-commit: interrupt the cell after S seconds (30)"),
    out("each worker's output and error"),
)


@magics_class
class CellMagics(ClusterMagics):
    """The part of `ElasticMagics` that runs cells on workers."""

    @magic("cell", *_CELL_OPTIONS)
    def elastic_px(self, options: Namespace, cell: str) -> None:
        """Run the cell on every ready worker, and show what they print.

        While a job trains, %%elastic_px --at-commit runs the cell between two steps, with the names of the program.
        """
        self._run_cell(options, cell)

    @magic("line_cell", *_CELL_OPTIONS)
    def elastic(self, options: Namespace, cell: str | None) -> None:
        """%elastic is %elastic_dashboard; %%elastic is %%elastic_px."""
        if cell is not None:
            self._run_cell(options, cell)
            return
        if any(map(was_given, vars(options).values())):
            raise UsageError("options need a cell: write %%elastic_px above it.")
        self._show_dashboard()

    @magic(
        "line_cell",
        argument("key", nargs="?", metavar="KEY", help="with a cell: it replaces the setup cell with this KEY"),
        argument(
            "--clear",
            nargs="?",
            const=True,
            metavar="KEY",
            help="forget the setup cell with this KEY; without KEY, all",
        ),
        _TIMEOUT,
        out("each worker's output and error"),
    )
    def elastic_setup(self, options: Namespace, cell: str | None) -> None:
        """%%elastic_setup runs its cell on every worker, and on each later one before its program.

        %elastic_setup lists these cells in the order in which each new worker runs them: the key, then the first line.
        """
        cluster = self._cluster()
        if cell is not None:
            if options.clear is not None:
                raise UsageError("--clear needs no cell: write %elastic_setup --clear.")
            self._run_setup(options.key, cell, options)
        elif options.key is not None or options.timeout is not None or options.out_variable is not None:
            raise UsageError("KEY, --timeout and --out need a cell: write %%elastic_setup above it.")
        elif options.clear is not None:
            cluster.clear_setup(None if options.clear is True else options.clear)
        else:
            for key, source in cluster.setup_cells.items():
                print(f"{key}: {source.strip().partition(chr(10))[0]}")

    def _run_cell(self, options: Namespace, cell: str) -> None:
        self._check_variable(options.out_variable)
        given = {"ranks": options.rank, "limit": options.limit}
        at_commit = {name: value for name, value in given.items() if value is not None}
        if at_commit and not options.at_commit:
            raise UsageError("--rank and --limit need --at-commit.")
        if options.at_commit:
            if options.setup is not None:
                raise UsageError("a setup cell runs between jobs: leave out --setup or --at-commit.")
            self._show_cell([], cell, options, at_commit=True, **at_commit)
        elif options.setup is not None:
            self._run_setup(options.setup, cell, options)
        else:
            self._show_cell(self._ready_workers(), cell, options)

    def _run_setup(self, key: str | None, cell: str, options: Namespace) -> None:
        self._show_cell(self._ready_workers(), cell, options, setup=True, key=key or cell_id(self.shell))

    def _ready_workers(self) -> list[str]:
        return [worker.id for worker in self._cluster().workers if worker.state == "ready"]

    def _show_cell(self, workers: list[str], cell: str, options: Namespace, **how: Any) -> None:
        """Run a cell, and show its output while it runs. `workers` run it, as far as known."""
        cluster, shown = self._cluster(), CellDisplay(workers)
        try:
            with short_syntax_errors():
                rows = cluster.execute(cell, on_output=shown.update, timeout=options.timeout, **how)
        except KeyboardInterrupt as error:
            show_in_one_line(error, INTERRUPTED)
            raise
        finally:
            shown.end()
        self._keep(options.out_variable, rows)
        raise_errors(rows)
