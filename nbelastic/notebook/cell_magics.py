"""The magics that run cells on the workers."""

from __future__ import annotations

from argparse import Namespace

from IPython.core.magic import magics_class

from nbelastic.errors import UsageError
from nbelastic.notebook.cell_output import cell_id, short_syntax_errors, show_commit_output, show_output
from nbelastic.notebook.cluster_magics import ClusterMagics
from nbelastic.notebook.magic_arguments import argument, magic


@magics_class
class CellMagics(ClusterMagics):
    """The part of `ElasticMagics` that runs cells on workers. `%elastic` without a cell shows the dashboard."""

    @magic(
        "line_cell",
        argument(
            "--setup",
            nargs="?",
            const="",
            metavar="KEY",
            help="with a cell: run it on later workers too; it replaces the setup cell with this KEY (default: the cell's id)",
        ),
        argument("--timeout", type=float, metavar="S", help="with a cell: how many seconds to wait for it"),
        argument("--at-commit", action="store_true", help="with a cell: run it in the middle of the running program"),
        argument(
            "--rank", type=int, action="append", metavar="RANK", help="with --at-commit: only on this rank (repeatable)"
        ),
        argument("--limit", type=float, metavar="S", help="with --at-commit: interrupt the cell after S seconds (30)"),
    )
    def elastic(self, options: Namespace, cell: str | None) -> None:
        """%elastic shows the dashboard; %%elastic runs its cell on every ready worker and shows what they print.

        While a job trains, %%elastic --at-commit runs the cell between two steps, with the names of the program.
        """
        cluster = self._cluster()
        given = {"ranks": options.rank, "limit": options.limit}
        at_commit = {name: value for name, value in given.items() if value is not None}
        if at_commit and not options.at_commit:
            raise UsageError("--rank and --limit need --at-commit.")
        if cell is None:
            if options.at_commit or options.setup is not None or options.timeout is not None:
                raise UsageError("--setup, --at-commit and --timeout need a cell: write %%elastic above it.")
            self._show_dashboard()
        elif options.at_commit:
            if options.setup is not None:
                raise UsageError("a setup cell runs between jobs: leave out --setup or --at-commit.")
            with short_syntax_errors():
                rows = cluster.execute(cell, at_commit=True, timeout=options.timeout, **at_commit)
            show_commit_output(rows)
        else:
            with short_syntax_errors():
                is_setup = options.setup is not None
                key = (options.setup or cell_id(self.shell)) if is_setup else None
                outputs = cluster.execute(cell, setup=is_setup, key=key, timeout=options.timeout)
            show_output(outputs)

    @magic(
        "line",
        argument(
            "--clear", nargs="?", const="", metavar="KEY", help="forget the setup cell with this KEY; without KEY, all"
        ),
    )
    def elastic_setup(self, options: Namespace) -> None:
        """List the setup cells in the order in which each new worker runs them: the key, then the first line."""
        cluster = self._cluster()
        if options.clear is not None:
            cluster.clear_setup(options.clear or None)
            return
        for key, source in cluster.setup_cells.items():
            print(f"{key}: {source.strip().partition(chr(10))[0]}")
