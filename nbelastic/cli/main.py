"""The terminal command `nbelastic` shows and changes the clusters on this machine, as an attached notebook does."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from io import TextIOWrapper

import msgspec

from nbelastic.cli.follow import TAIL, Output, follow_all, follow_job
from nbelastic.cli.replay import EventLogFile, show
from nbelastic.client.cluster import Cluster
from nbelastic.client.doctor import examine
from nbelastic.errors import ClusterStoppedError, HostError, NbelasticError, UsageError
from nbelastic.notebook.status_text import ClusterList, FindingList, StatusView, limits, print_unanswered
from nbelastic.system import running_agents, versions
from nbelastic.system.argument_types import check_time_left
from nbelastic.system.terminal_text import remove_controls

INTERRUPTED = 130  # the exit code after Ctrl-C, as in shells


def main(words: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit code: 0, 1 with one line about the error on stderr, or 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a closed stream is None
            stream.reconfigure(errors="replace")  # a terminal's encoding may lack characters
    options = _parser().parse_args(words)
    try:
        options.command(options)
        _flush()
    except NbelasticError as error:
        _end_output()
        print(f"nbelastic: {remove_controls(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # for example, `nbelastic logs | head`
        _silence_output()
    except OSError as error:
        print(f"nbelastic: {error}", file=sys.stderr)
        _silence_output()
        return 1
    return 0


def _end_output() -> None:
    """Write what was printed before an error: its line on stderr may go to the same file. A pipe may have no reader."""
    try:
        _flush()
    except OSError:
        _silence_output()


def _flush() -> None:
    if sys.stdout is not None:  # it was closed before the start
        sys.stdout.flush()


def _silence_output() -> None:
    """Write nothing more, else Python tries it at its end and prints an error."""
    if sys.stdout is not None:  # it was closed before the start
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _list(_: Namespace) -> None:
    print(remove_controls(str(ClusterList(Cluster.all(), attach="nbelastic attach"))))


def _status(options: Namespace) -> None:
    shown = StatusView.of(_attached(options))
    if options.json:
        print(msgspec.json.encode(shown.status).decode())
    else:
        print(f"{shown.status.name} is {remove_controls(str(shown))}")


def _logs(options: Namespace) -> None:
    cluster = _attached(options)
    output, job = Output(options.rank, options.tail, timestamps=options.timestamps), cluster.job
    if options.follow:
        follow_job(cluster, output)
    elif job is None:
        raise UsageError(f"no job has run yet on {cluster.name!r}.")
    else:
        output.finish(job)


def _debug(options: Namespace) -> None:
    _attached(options).debug(rank=options.rank)


def _add(options: Namespace) -> None:
    cluster = _attached(options)

    def add(host: str) -> str:
        cluster.add_host(host, by="nbelastic add")
        return f"{host} is being added"

    _for_each(cluster, options.hosts, add)


def _remove(options: Namespace) -> None:
    cluster = _attached(options)

    def remove(host: str) -> str:
        cluster.remove_host(host, now=options.now, by="nbelastic remove", within=options.within)
        return f"{host} is removed" if options.now else f"{host} leaves at the next commit"

    _for_each(cluster, options.hosts, remove)


def _drain(options: Namespace) -> None:
    check_time_left("--in", options.within)
    agents = [one for one in running_agents.find() if running_agents.announce_end(one, options.within)]
    for agent in agents:
        print(f"{agent.host}: its workers leave at the next commit; it ends in {options.within:g} s.")
    if not agents:
        raise HostError("no agent of yours runs on this machine: run this on a host of the cluster.")


def _for_each(cluster: Cluster, hosts: Sequence[str], change: Callable[[str], str]) -> None:
    """Apply a change to each host, even if it is refused for another host. Raise the first refusal."""
    refusals = []
    for host in hosts:
        try:
            print(f"{cluster.name}: {change(host)}.")
        except UsageError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


def _scale(options: Namespace) -> None:
    if options.min is None and options.max is None:
        raise UsageError("give --min N, --max N or both.")
    cluster = _attached(options)
    cluster.scale(min=options.min, max=options.max, by="nbelastic scale")
    status = cluster.status()
    print(f"{cluster.name}: {limits(status.min, status.max)} workers from now on.")


def _stop(options: Namespace) -> None:
    if options.job and options.timeout is not None:
        raise UsageError("--timeout is for the stop of the cluster: leave out it or --job.")
    cluster = _attached(options)
    job = cluster.job
    if not options.job:
        cluster.stop(options.timeout, by="nbelastic stop")
        if cluster.status().phase != "finished":
            raise ClusterStoppedError(f"{cluster.name!r} has not stopped in time: {cluster.status().reason}.")
        print(f"{cluster.name}: stopped.")
        print_unanswered(cluster)
    elif job is None or job.done():
        print(f"{cluster.name}: no job is running.")
    else:
        job.stop(by="nbelastic stop")
        print(f"{cluster.name}: {job.name} is being stopped.")


def _attach(options: Namespace) -> None:
    follow_all(_attached(options))


def _dashboard(options: Namespace) -> None:
    from nbelastic.cli.dashboard_server import serve  # imports the server, which no other command needs

    if not 0 <= options.port < 1 << 16:
        raise UsageError(f"--port {options.port}: 0 to 65535.")
    serve(_attached(options), options.port)


def _doctor(options: Namespace) -> None:
    found = FindingList(examine(options.hosts, options.python))
    print(remove_controls(str(found)))
    if not found.is_well:
        raise HostError("not all is well: the lines marked `wrong` say what to do.")


def _replay(options: Namespace) -> None:
    lines = EventLogFile(options.file)
    if options.last is not None and options.last < 0:
        raise UsageError(f"--until {options.last}: the first event is 0.")
    if options.share or options.test:
        if options.share:
            print(lines.share(options.share, options.last))
        if options.test:
            print(lines.write_test(options.test, options.last))
    elif not show(lines, options.first, options.last, options.only):
        raise NbelasticError("the last step raised an error: this is a bug of nbelastic.")


def _attached(options: Namespace) -> Cluster:
    if options.name is None and len(names := [info.name for info in Cluster.all()]) > 1:
        raise UsageError(f"say which cluster: {', '.join(names)}.")
    return Cluster.attach(options.name)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="nbelastic",
        description="Show and change the elastic clusters on this machine.",
        epilog="nbelastic COMMAND --help shows the options of a command. Start a cluster in a notebook, or with\n"
        "nbelastic.Cluster in a program.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nbelastic {versions.nbelastic_version()}")
    parser.set_defaults(command=lambda _: parser.print_help())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(
        name: str, run: Callable[[Namespace], None], text: str, *, name_count: str | None = "?"
    ) -> ArgumentParser:
        subparser = commands.add_parser(name, help=text, description=text)
        subparser.set_defaults(command=run)
        if name_count is not None:
            optional = "; not needed if there is only one" if name_count == "?" else ""
            subparser.add_argument(
                "name", nargs=name_count or None, metavar="NAME", help=f"name of the cluster{optional}"
            )
        return subparser

    command("list", _list, "Show your clusters on this machine.", name_count=None)
    status = command("status", _status, "Show hosts, workers and the job as they are now.")
    status.add_argument("--json", action="store_true", help="print JSON, for programs")
    logs = command("logs", _logs, "Print what the workers of the current or last job have printed.")
    logs.add_argument("-f", "--follow", action="store_true", help="continue until the job has ended")
    logs.add_argument("--rank", type=int, metavar="N", help="print the lines of this rank only")
    logs.add_argument("--tail", type=int, default=TAIL, metavar="N", help=f"begin with the last N lines ({TAIL})")
    logs.add_argument("-t", "--timestamps", action="store_true", help="begin each line with its time, in UTC")
    debug = command("debug", _debug, "Open the debugger of a program that waits at a breakpoint().")
    debug.add_argument("--rank", type=int, metavar="N", help="of this rank (default: any)")
    _add_host_commands(command)
    stop = command("stop", _stop, "Stop the cluster and all its processes; return when it has stopped.")
    stop.add_argument("--job", action="store_true", help="stop only the job; the workers stay")
    stop.add_argument(
        "--timeout", type=float, metavar="S", help="seconds in which programs have to end (default: stop_timeout)"
    )
    doctor = command(
        "doctor", _doctor, "Examine this machine and other hosts before a cluster uses them.", name_count=None
    )
    doctor.add_argument("hosts", nargs="*", metavar="HOST", help="name or user@name, as ssh knows it")
    doctor.add_argument("--python", metavar="PATH", help="Python on the other hosts (default: this one's path)")
    _add_replay(command)
    dashboard = command("dashboard", _dashboard, "Serve the dashboard as a page on this machine, until Ctrl-C.")
    dashboard.add_argument("--port", type=int, default=0, metavar="N", help="port of 127.0.0.1 (default: a free one)")
    command("attach", _attach, "Show events and output as they arrive, until Ctrl-C; the cluster goes on.")
    return parser


def _add_replay(command: Callable[..., ArgumentParser]) -> None:
    text = "Step through the decisions of a cluster's event log (events.jsonl in its log folder)."
    options = command("replay", _replay, text, name_count=None)
    options.add_argument("file", metavar="FILE", help="the event log")
    options.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="print from event N on")
    options.add_argument("--until", dest="last", type=int, metavar="N", help="stop after event N")
    options.add_argument("--only", metavar="TEXT", help="print only events and decisions that name this worker or host")
    options.add_argument(
        "--share", metavar="FILE", help="write a copy for a bug report: without texts of your program; print nothing"
    )
    options.add_argument(
        "--test", metavar="FILE", help="write a pytest test that replays the log, and such a copy beside it"
    )


def _add_host_commands(command: Callable[..., ArgumentParser]) -> None:
    """The commands that change the hosts and the number of workers."""
    add = command("add", _add, "Add hosts. A running job includes them without losing a step.", name_count="")
    add.add_argument("hosts", nargs="+", metavar="HOST", help="name, name:slots or user@name:slots")
    remove = command("remove", _remove, "Remove hosts. Their workers leave at the next commit.", name_count="")
    remove.add_argument("hosts", nargs="+", metavar="HOST", help="the names of hosts")
    remove.add_argument("--now", action="store_true", help="remove at once, without waiting for the next commit")
    remove.add_argument(
        "--in", dest="within", type=float, metavar="S", help="the hosts end in S seconds, whatever still runs there"
    )
    drain = command(
        "drain",
        _drain,
        "Announce that this machine ends soon: its workers leave before, in all clusters.",
        name_count=None,
    )
    drain.add_argument(
        "--in", dest="within", type=float, default=30.0, metavar="S", help="the machine ends in S seconds (30)"
    )
    scale = command("scale", _scale, "Change how many workers there may be.")
    scale.add_argument("--min", type=int, metavar="N", help="least number of workers to train with")
    scale.add_argument("--max", type=int, metavar="N", help="greatest number of workers")
