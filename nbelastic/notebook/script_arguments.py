"""The options of `%elastic_run script.py`: torchrun's, where it has them."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbelastic.notebook.magic_arguments import argument, pair

SCRIPT_OPTIONS = (
    argument("-m", "--module", action="store_true", help="the script is a module's name, as with python -m"),
    argument("--no-python", action="store_true", help="the script is a program: run it as it is"),
    argument("--cold", action="store_true", help="start fresh interpreters, not forks that have torch loaded"),
    argument("--max-restarts", type=int, metavar="N", help="how often workers may fail and all begin again (0)"),
    argument("--monitor-interval", type=float, metavar="S", help="seconds between looks at the workers (0.1)"),
    argument("--nproc", type=int, metavar="N", help="workers a host (default: its slots)"),
    argument("--role", metavar="ROLE", help="of the workers (default)"),
    argument(
        "-r", "--redirects", metavar="STREAMS", help="to files only, as 3 (both streams) or 0:1,1:2 (by local rank)"
    ),
    argument("-t", "--tee", metavar="STREAMS", help="of those, what is shown as well"),
    argument("--env", action="append", metavar="NAME=VALUE", help="for the script; may be given again"),
    argument(
        "--exit-barrier-timeout", type=float, metavar="S", help="how long hosts that are done wait for others (300)"
    ),
    argument("--shutdown-timeout", type=float, metavar="S", help="between SIGTERM and SIGKILL of a worker (30)"),
)


def script_options(options: Namespace) -> dict[str, Any]:
    """The options that were given, as arguments of `Cluster.run_script`."""
    names = [max(each.names, key=len).lstrip("-").replace("-", "_") for each in SCRIPT_OPTIONS]
    given = {name: vars(options)[name] for name in names if vars(options)[name] not in (None, False)}
    if "env" in given:
        given["env"] = dict(pair("--env", text) for text in given["env"])
    return given
