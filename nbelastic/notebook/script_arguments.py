"""The options of `%elastic_run script.py`, named as torchrun's where it has them."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbelastic.notebook.magic_arguments import argument, split_pair, was_given

SCRIPT_OPTIONS = (
    argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as with python -m"),
    argument("--no-python", action="store_true", help="SCRIPT is a program: run it without Python"),
    argument("--cold", action="store_true", help="start new interpreters instead of forks with torch loaded"),
    argument("--max-restarts", type=int, metavar="N", help="restarts of all workers after a failure (0)"),
    argument("--monitor-interval", type=float, metavar="S", help="seconds between checks of the workers (0.1)"),
    argument("--nproc", type=int, metavar="N", help="workers per host (default: its slots)"),
    argument("--role", metavar="ROLE", help="role of the workers (default)"),
    argument(
        "-r",
        "--redirects",
        metavar="STREAMS",
        help="streams that go to files only: 3 (both) or, by local rank, 0:1,1:2",
    ),
    argument("-t", "--tee", metavar="STREAMS", help="streams that go to files and are shown too"),
    argument("--env", action="append", metavar="NAME=VALUE", help="variable for the script; can be repeated"),
    argument(
        "--exit-barrier-timeout", type=float, metavar="S", help="seconds that finished hosts wait for others (300)"
    ),
    argument(
        "--shutdown-timeout", type=float, metavar="S", help="seconds between SIGTERM and SIGKILL of a worker (30)"
    ),
)


def script_options(options: Namespace) -> dict[str, Any]:
    """The options that were given, as arguments of `Cluster.run_script`."""
    names = [max(each.names, key=len).lstrip("-").replace("-", "_") for each in SCRIPT_OPTIONS]
    given = {name: vars(options)[name] for name in names if was_given(vars(options)[name])}
    if "env" in given:
        given["env"] = dict(split_pair("--env", text) for text in given["env"])
    return given
