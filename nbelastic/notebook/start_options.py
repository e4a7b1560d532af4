"""The options of `%elastic_start`, and their conversion to arguments of `Cluster`."""

from __future__ import annotations

from typing import Any

from nbelastic.notebook.magic_arguments import argument, several, split_pair

START_OPTIONS = (
    argument("--min", type=int, metavar="N", help="least number of workers to train with (default 1)"),
    argument("--max", type=int, metavar="N", help="greatest number of workers (default: as many as there are slots)"),
    several("--hosts", metavar="HOST", help="name, name:slots or user@name:slots; several with blanks or commas"),
    argument(
        "--discover",
        dest="discovery",
        metavar="SCRIPT",
        help="a script, run every second, that prints one host per line; or the name of a discovery, such as slurm",
    ),
    argument("--slots", type=int, metavar="N", help="slots of a host for which no number is given"),
    argument("--backend", choices=("auto", "gloo", "nccl"), help="backend of torch.distributed (default auto)"),
    argument("--spares", type=int, metavar="N", help="workers kept ready beyond --max (default 0)"),
    argument("--elastic-timeout", type=float, metavar="S", help="seconds below --min after which a job ends (600)"),
    argument("--reset-limit", type=int, metavar="N", help="recoveries after which a job ends (default: no limit)"),
    argument("--cooldown", type=float, nargs=2, metavar=("LOW", "HIGH"), help="seconds before a restart (5 300)"),
    argument("--silence", type=float, metavar="S", help="seconds after which an unresponsive worker is lost (10)"),
    argument("--stall", type=float, metavar="S", help="replace a worker that others wait for longer than S (never)"),
    argument(
        "--exclude-differing",
        action="store_true",
        default=None,
        help="leave a host out whose training state changes to other values than the others'",
    ),
    argument("--stop-timeout", type=float, metavar="S", help="seconds for a last checkpoint at a stop (60)"),
    several("--timeouts", metavar="NAMES", help="seconds for other waits, for example recover=30 form=120"),
    several("--nics", metavar="NAMES", help="network interfaces to use (default: found)"),
    argument("--python", metavar="PATH", help="Python on hosts other than this machine (default: this one's path)"),
    argument("--env", action="append", metavar="NAME=VALUE", help="variable for agents and workers; can be repeated"),
    argument("--cwd", metavar="FOLDER", help="where workers run (default: here; on other hosts, the home folder)"),
    argument(
        "--launcher",
        metavar="NAME",
        help="ssh (default), kubernetes, or a batch system: slurm, pbs, lsf, sge, htcondor",
    ),
    argument("--image", metavar="IMAGE", help="with --launcher kubernetes: the image of the pods"),
    argument(
        "--launcher-option",
        dest="launcher_options",
        action="append",
        metavar="NAME=VALUE",
        help="option of the launcher, such as queue=gpu; can be repeated",
    ),
    argument("--log-dir", metavar="FOLDER", help="folder for logs and the event log"),
    argument("--name", metavar="NAME", help="name of the cluster"),
    several(
        "--code-folders", metavar="FOLDERS", help="send modules to the hosts from here, beside the notebook's folder"
    ),
    argument(
        "--no-code-sync",
        dest="code_sync",
        action="store_false",
        default=None,
        help="do not send the notebook's modules to the hosts, nor import changed ones again",
    ),
    argument("--requirements", metavar="FILE", help="packages for the workers: each host makes an environment with uv"),
    several("--preload", metavar="MODULES", help="modules to import before workers fork"),
    argument(
        "--keep",
        action="store_true",
        default=None,
        help="keep the cluster when this kernel ends, so that another can attach",
    ),
    argument("--lease", type=float, metavar="S", help="with --keep: seconds without a kernel before it ends (3600)"),
    argument("--metrics-port", type=int, metavar="N", help="serve OpenMetrics on this port of 127.0.0.1"),
    argument(
        "--chaos", action="store_true", default=None, help="let clients inject faults, to see what the program survives"
    ),
    argument("--no-wait", action="store_true", help="return at once instead of waiting for --min workers"),
    argument("--timeout", type=float, metavar="S", help="how many seconds to wait for the workers"),
    argument("--no-dashboard", action="store_true", help="do not show the dashboard"),
    argument("--cluster", dest="cluster_variable", metavar="VARIABLE", help="variable that gets the Cluster"),
)


def cluster_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Convert options to arguments of `Cluster`: lists to tuples, NAME=VALUE to mappings."""
    for name in ("preload", "code_folders"):
        if name in options:
            options[name] = tuple(options[name])
    if "nics" in options:
        options["nics"] = ",".join(options["nics"])
    if "cooldown" in options:
        options["cooldown"] = tuple(options["cooldown"])
    if "timeouts" in options:
        options["timeouts"] = dict(split_pair("--timeouts", text) for text in options["timeouts"])
    for name, flag in (("env", "--env"), ("launcher_options", "--launcher-option")):
        if name in options:
            options[name] = dict(split_pair(flag, text) for text in options[name])
    if "image" in options:
        options["launcher_options"] = {**options.get("launcher_options", {}), "image": options.pop("image")}
    return options
