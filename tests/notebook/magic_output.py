"""The output of a cell with magics."""

from __future__ import annotations


def output_of(ip, capsys, source):
    """Run a cell and return its stdout followed by its stderr."""
    capsys.readouterr()
    ip.run_cell(source)
    captured = capsys.readouterr()
    return (captured.out + captured.err).strip()
