"""`nbelastic` in a terminal looks at the clusters of this machine and gives them orders, as an attached notebook does."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from io import TextIOWrapper

import msgspec

from nbelastic.cli.follow import TAIL, Output, follow_all, follow_job
from nbelastic.client.cluster import Cluster
from nbelastic.errors import ClusterStoppedError, NbelasticError, UsageError
from nbelastic.notebook.status_text import ClusterList, StatusView, limits
from nbelastic.system import versions
from nbelastic.system.terminal_text import plain

INTERRUPTED = 130  # the exit code of a command that Ctrl-C has ended, as shells have it


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 1 with one line on stderr that says what is wrong, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # it may be closed, and is None then
            stream.reconfigure(errors="replace")  # a terminal's encoding may not have all characters
    options = _parser().parse_args(words)
    try:
        options.command(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except NbelasticError as error:
        print(f"nbelastic: {plain(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # as of `nbelastic logs | head`
        _write_no_more()
    except OSError as error:
        print(f"nbelastic: {error}", file=sys.stderr)
        _write_no_more()
        return 1
    return 0


def _write_no_more() -> None:
    """Else Python tries, and complains, when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _list(_: Namespace) -> None:
    print(plain(str(ClusterList(Cluster.all(), attach="nbelastic attach"))))


def _status(options: Namespace) -> None:
    status = _attached(options).status()
    if options.json:
        print(msgspec.json.encode(status).decode())
    else:
        print(f"{status.name} is {plain(str(StatusView(status)))}")


def _logs(options: Namespace) -> None:
    cluster = _attached(options)
    output, job = Output(options.rank, options.tail), cluster.job
    if options.follow:
        follow_job(cluster, output)
    elif job is None:
        raise UsageError(f"no job has run yet on {cluster.name!r}.")
    else:
        output.finish(job)


def _add(options: Namespace) -> None:
    cluster = _attached(options)

    def add(host: str) -> str:
        cluster.add_host(host, by="nbelastic add")
        return f"{host} is being added"

    _of_each(cluster, options.hosts, add)


def _remove(options: Namespace) -> None:
    cluster = _attached(options)

    def remove(host: str) -> str:
        cluster.remove_host(host, now=options.now, by="nbelastic remove")
        return f"{host} is removed" if options.now else f"{host} leaves at the next commit"

    _of_each(cluster, options.hosts, remove)


def _of_each(cluster: Cluster, hosts: Sequence[str], order: Callable[[str], str]) -> None:
    """Give the order for each host, also if it is refused for another one; raise the first refusal."""
    refusals = []
    for host in hosts:
        try:
            print(f"{cluster.name}: {order(host)}.")
        except UsageError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


def _scale(options: Namespace) -> None:
    if options.min is None and options.max is None:
        raise UsageError("say --min N, --max N or both.")
    cluster = _attached(options)
    cluster.scale(min=options.min, max=options.max, by="nbelastic scale")
    status = cluster.status()
    print(f"{cluster.name}: {limits(status.min, status.max)} workers from now on.")


def _stop(options: Namespace) -> None:
    cluster = _attached(options)
    job = cluster.job
    if not options.job:
        cluster.stop(options.timeout, by="nbelastic stop")
        if cluster.status().phase != "finished":
            raise ClusterStoppedError(f"{cluster.name!r} has not stopped in time: {cluster.status().reason}.")
        print(f"{cluster.name}: stopped.")
    elif job is None or job.done():
        print(f"{cluster.name}: no job is running.")
    else:
        job.stop(by="nbelastic stop")
        print(f"{cluster.name}: {job.name} is being stopped.")


def _attach(options: Namespace) -> None:
    follow_all(_attached(options))


def _attached(options: Namespace) -> Cluster:
    if options.name is None and len(names := [info.name for info in Cluster.all()]) > 1:
        raise UsageError(f"say which cluster: {', '.join(names)}.")
    return Cluster.attach(options.name)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="nbelastic",
        description="Look at the elastic clusters of this machine, and give them orders.",
        epilog="nbelastic COMMAND --help shows the options of a command. A cluster is started in a notebook, or by\n"
        "nbelastic.Cluster in a program.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nbelastic {versions.ours()}")
    parser.set_defaults(command=lambda _: parser.print_help())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, act: Callable[[Namespace], None], text: str, *, named: str | None = "?") -> ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(command=act)
        if named is not None:
            optional = "; not needed if there is only one" if named == "?" else ""
            made.add_argument("name", nargs=named or None, metavar="NAME", help=f"of the cluster{optional}")
        return made

    command("list", _list, "Show your clusters on this machine.", named=None)
    status = command("status", _status, "Show hosts, workers and the job as they are now.")
    status.add_argument("--json", action="store_true", help="as JSON, for programs")
    logs = command("logs", _logs, "Print what the workers of the current or last job have printed.")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    logs.add_argument("--rank", type=int, metavar="N", help="of this rank alone")
    logs.add_argument("--tail", type=int, default=TAIL, metavar="N", help=f"begin with the last N lines ({TAIL})")
    add = command("add", _add, "Add hosts. A job that runs takes them in without losing a step.", named="")
    add.add_argument("hosts", nargs="+", metavar="HOST", help="name, name:slots or user@name:slots")
    remove = command("remove", _remove, "Remove hosts. Their workers leave at the next commit.", named="")
    remove.add_argument("hosts", nargs="+", metavar="HOST", help="the names of hosts")
    remove.add_argument("--now", action="store_true", help="at once, without waiting for the next commit")
    scale = command("scale", _scale, "Change how many workers there may be.")
    scale.add_argument("--min", type=int, metavar="N", help="train with no fewer workers")
    scale.add_argument("--max", type=int, metavar="N", help="and with no more")
    stop = command("stop", _stop, "Stop the cluster and every process of it; return when it has stopped.")
    stop.add_argument("--job", action="store_true", help="stop only the job; the workers stay")
    stop.add_argument("--timeout", type=float, metavar="S", help="seconds that programs have to end (stop_timeout)")
    command("attach", _attach, "Show events and output as they come, until Ctrl-C; the cluster goes on then.")
    return parser
