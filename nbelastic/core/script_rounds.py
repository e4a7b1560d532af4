"""`advance(group, event, now) -> (group, commands)`: which nodes are in a script's next round, and when all restart.

A script cannot change its world while it runs. So each change ends its workers and starts them again, as in
torchelastic. Nodes join by seniority, survivors first, each with all its workers, up to `max`. Failures of workers
count against `max_restarts`; changes of the membership never do. Each wait has a reason.
"""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import script_commands as scmd
from nbelastic.core.backoff import backoff_seconds
from nbelastic.core.commands import Commands
from nbelastic.core.persistent import without_key
from nbelastic.core.reasons import Missing, Reason, in_words
from nbelastic.core.script_group import (
    Group,
    GroupState,
    Node,
    Stage,
    first_failure,
    ranks_by_node,
    was_killed,
    workers_in,
)
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.cluster_limits import NEVER

_INSIDE = (GroupState.HEALTHY, GroupState.UNHEALTHY)  # states of nodes that have not left their round
MOST_STARTS = 3  # of a node in a row without a round; then the others do not count on its host


def advance(group: Group, event: ev.Event, now: float) -> tuple[Group, tuple[cmd.Command, ...]]:
    """The group after `event`, received at `now` (seconds, monotonic), and the commands to carry out."""
    out: Commands = []
    if group.stage is not Stage.ENDED:
        group = _handle(group, event, now, out)
    if group.stage is not Stage.ENDED:
        group = _progress(replace(group, until=NEVER), now, out)
    return group, tuple(out)


def deadline(group: Group) -> float:
    """When to send `Ticked` if nothing else happens; infinity: never."""
    if group.stage is Stage.ENDED:
        return NEVER
    short = NEVER
    if group.too_few_since is not None and group.leave_by == NEVER:  # nodes that are late have to leave first
        short = group.too_few_since + group.limits.patience
    retries = (node.retry_at for node in group.nodes.values() if node.retry_at)
    return min(group.until, group.judge_at, group.leave_by, short, *retries)


def _handle(group: Group, event: ev.Event, now: float, out: Commands) -> Group:
    match event:
        case sev.HostsChanged():
            return _hosts(group, event, now, out)
        case sev.NodeReady():
            return _ready(group, event, now)
        case sev.NodeMoved(host=host):
            node = group.nodes.get(host)
            return group if node is None else _with_node(group, host, replace(node, ready=False, store=""))
        case sev.NodeStarted(host=host, round=number, pids=pids):
            node = group.nodes.get(host)
            return group if node is None or number != group.round else _with_node(group, host, replace(node, pids=pids))
        case sev.NodeFailed():
            return _failed(group, event, now)
        case sev.NodesHeard(hosts=hosts):
            return replace(group, heard=hosts)
        case sev.NodeSucceeded(host=host, round=number) if _in_round(group, host, number):
            return _with_node(group, host, replace(group.nodes[host], state=GroupState.SUCCEEDED, starts=0))
        case sev.NodeLeft():
            return _left(group, event, now, out)
        case sev.ScriptStopped(reason=reason):
            return _end(group, "stopped", reason, out)
    return group


def _hosts(group: Group, event: sev.HostsChanged, now: float, out: Commands) -> Group:
    """Start nodes on new hosts, and remove the nodes of hosts that have left."""
    group = replace(group, limits=event.limits, hosts_seen=event)
    present = dict(event.hosts)
    finished = (GroupState.SUCCEEDED, GroupState.UNKNOWN)  # they stay known when their hosts have left
    ours = [host for host, node in group.nodes.items() if not node.external and node.state not in finished]
    for host in [host for host in ours if host not in present]:
        out.append(scmd.EndNode(host, f"{host} has left the cluster", error=False))
        lost = host in event.lost
        why = f"host {host} was lost" if lost else f"host {host} leaves"
        group = _remove_node(group, host, why, now, out, broken=lost)
    for host, slots in present.items():
        wanted = group.terms.nproc or slots
        node = group.nodes.get(host)
        if node is None:
            group = _with_node(replace(group, joined=group.joined + 1), host, Node(group.joined, wanted, since=now))
            out.append(scmd.StartNode(host))
        elif node.slots != wanted and not node.external:
            group = _with_node(group, host, replace(node, slots=wanted))
    return group


def _ready(group: Group, event: sev.NodeReady, now: float) -> Group:
    host, node = event.host, group.nodes.get(event.host)
    if node is None:
        if not event.external or event.job not in ("", group.job):
            return group  # of another job, or of a host that has left
        node = Node(group.joined, event.workers, external=True)
        group = replace(group, joined=group.joined + 1)
    if group.stage is Stage.RUNNING and group.assigns(host):
        if event.round != group.round or node.state is GroupState.SUCCEEDED:
            return group  # it reported before it received the round
        if node.state is GroupState.HEALTHY:  # it left by itself, so its workers have failed
            group = _failed(group, sev.NodeFailed(host, event.round), now)
            node = group.nodes[host]
    elif node.state in (GroupState.HEALTHY, GroupState.UNHEALTHY) and event.round != group.round:
        return group
    state = GroupState.STOPPED if node.state is GroupState.HEALTHY else node.state
    node = replace(node, ready=True, store=event.store, role=event.role, state=state)
    node = replace(node, starts=0, pid=event.pid, pids=(), retry_at=0.0)
    return _with_node(group, host, node)


def _failed(group: Group, event: sev.NodeFailed, now: float) -> Group:
    """The node's workers have failed. The failure is judged when all nodes have reported, or after the grace."""
    host = event.host
    if not _in_round(group, host, event.round) or group.nodes[host].state is GroupState.UNHEALTHY:  # it was reported
        return group
    group = _with_node(group, host, replace(group.nodes[host], state=GroupState.UNHEALTHY, pids=(), starts=0))
    if group.stage is not Stage.RUNNING:
        return group
    unknown = sev.Failure(_first_rank(group, host), 0, 1, "its workers failed")
    failures = group.failures + tuple((host, each, now - each.ago) for each in event.failures or (unknown,))
    judge_at = min(group.judge_at, now + group.limits.timeouts.grace)
    return replace(group, failures=failures, heard=(), judge_at=judge_at)


def _left(group: Group, event: sev.NodeLeft, now: float, out: Commands) -> Group:
    """A node has ended. If its host is still in the cluster, it is started again: at once if it had lived for `healthy` seconds.

    If it ends soon after it was ready, again and again, it has a back-off, like a slot. If it ends before it is ready, again and
    again, the others go on without it. The script fails if they are too few, unless the last round had enough without it: then
    `elastic_timeout` decides, as a lost host may be back by then.
    """
    host, reason = event.host, event.reason
    node = group.nodes.get(host)
    if node is None or node.retry_at:
        return group
    intended = node.external and not event.broken and node.state is not GroupState.UNHEALTHY  # a user ended it
    group = _remove_node(group, host, f"{host}: {reason}", now, out, broken=not intended)
    if node.external or _is_finishing(group) or group.stage is Stage.ENDED:
        return group
    pause, ends = 0.5 * node.starts, node.ends
    if not node.starts:  # it was ready
        ends = 1 if now - node.since >= group.limits.healthy else ends + 1
        pause = backoff_seconds(group.limits, ends - 1)
        if pause:
            text = f"the elastic agent on {host} has ended {ends} times soon after its start: {reason}"
            out.append(cmd.Record("worker-failed", f"{text}; tried again in {pause:g} s", host=host))
    if node.starts >= MOST_STARTS:
        text = f"the elastic agent on {host} has ended {node.starts} times in a row: {reason}"
        others = (other.slots for name, other in group.nodes.items() if name != host and other.starts < MOST_STARTS)
        is_needed = group.assigns(host) or not group.assignments
        if is_needed and sum(others) < group.limits.min:
            return _end(group, "failed", text, out)
        pause = max(pause, backoff_seconds(group.limits, node.starts + 1 - MOST_STARTS))
        out.append(cmd.Record("worker-failed", f"{text}; tried again in {pause:g} s", host=host))
    at = now + pause
    again = Node(node.joined, node.slots, since=at, starts=node.starts + 1, ends=ends, retry_at=at, why=reason)
    return _with_node(group, host, again)


def _remove_node(group: Group, host: str, why: str, now: float, out: Commands, *, broken: bool) -> Group:
    """Remove the node. The others cannot go on without it, unless some have finished.

    `broken`: no user wanted that.
    """
    node = group.nodes[host]
    group = replace(group, nodes=without_key(group.nodes, host))
    if node.external:
        out.append(cmd.Record("host-gone", why, host=host))
    if not group.assigns(host) or group.stage is not Stage.RUNNING:
        return group
    if node.state is GroupState.SUCCEEDED or _is_finishing(group):
        state = node.state if node.state is GroupState.SUCCEEDED else GroupState.UNKNOWN
        return _with_node(group, host, replace(node, state=state, ready=False, pids=()))
    kind = "world-broken" if broken else "change-planned"
    out.append(cmd.Record(kind, why, host=host, generation=group.round))
    return _leave(group, why, now, out)


def _progress(group: Group, now: float, out: Commands) -> Group:
    """Do the next step if it is possible; else set the reason to wait."""
    for host, node in group.nodes.items():
        if node.retry_at and now >= node.retry_at:
            out.append(scmd.StartNode(host))
            group = _with_node(group, host, replace(node, retry_at=0.0))
    if group.stage is Stage.RUNNING:
        return _run(group, now, out)
    late = _not_left(group)
    if late and group.leave_by == NEVER:  # a node has moved after all had ended: it must offer another store
        group = replace(group, leave_by=now + group.terms.leave)
    if late and now >= group.leave_by and not group.end_sent:
        for host in late:
            out.append(scmd.EndNode(host, f"it did not end its workers within {group.terms.leave:g} s"))
        group = replace(group, leave_by=now + group.limits.timeouts.node, end_sent=True)
    elif late and now >= group.leave_by:
        for host in late:
            why = f"it did not end within {group.limits.timeouts.node:g} s"
            group = _left(group, sev.NodeLeft(host, why, broken=True), now, out)
        return group if group.stage is Stage.ENDED else _progress(group, now, out)
    if late:
        return replace(group, reason=Reason("round-over", generation=group.round, names=tuple(late)))
    return _gather(replace(group, leave_by=NEVER, end_sent=False), now, out)


def _run(group: Group, now: float, out: Commands) -> Group:
    states = {assignment.host: group.nodes[assignment.host].state for assignment in group.assignments}
    done = [host for host, state in states.items() if state is GroupState.SUCCEEDED]
    if group.failures:
        return _judge(group, now, out)
    if done:
        missing = [host for host, state in states.items() if state is GroupState.UNKNOWN]
        if len(done) + len(missing) == len(states):
            lost = f", but {', '.join(missing)} did not" if missing else ""
            return _end(group, "succeeded", f"every worker ended well{lost}", out)
        return replace(group, reason=Reason("nodes-finished", len(done), len(states)))
    reason = _round_reason(group)
    target = _target(group)
    if target == group.assignments or workers_in(target) < group.limits.min:
        return replace(group, reason=reason, enough=False)
    since = group.since if group.enough else now
    group = replace(group, enough=True, since=since)
    coming = _not_ready(group)
    settled = since + group.limits.timeouts.settle
    if coming and now < settled and not _is_full(group, target):
        return replace(group, until=settled, reason=replace(reason, missing=coming))
    size = workers_in(target)
    change = f"from {group.size} to {size} workers"
    out.append(cmd.Record("change-planned", change, generation=group.round))
    gathering = replace(_leave(group, change, now, out), enough=True)  # nodes that are starting were waited for already
    return _progress(gathering, now, out)


def _judge(group: Group, now: float, out: Commands) -> Group:
    """Workers have failed, and no node was lost: restart, if restarts are left.

    A node that has not reported may have died before: then it is the cause, and its host will be lost.
    """
    host, first = first_failure(group.failures)
    first_at = min(at for _, _, at in group.failures)
    healthy = [each.host for each in group.assignments if group.nodes[each.host].state is GroupState.HEALTHY]
    all_reported, may_be_dead = not healthy, not {*healthy} <= {*group.heard}
    decisive = was_killed(first) and group.restarts < group.terms.max_restarts
    if may_be_dead and group.judge_at <= now < first_at + group.limits.timeouts.reconnect:
        group = replace(group, judge_at=now + group.limits.timeouts.grace)
    if not (all_reported or decisive or now >= group.judge_at):
        text = f"rank {first.rank} on {host} failed ({first.error})"
        return replace(group, reason=Reason("rank-failed", text=text))
    text = f"rank {first.rank} on {host} failed: {first.error}"
    if _is_finishing(group) or group.restarts >= group.terms.max_restarts:
        used = f" after {group.restarts} restarts" if group.terms.max_restarts else ""
        return _end(group, "failed", text + used, out, failure=first, host=host)
    count = group.restarts + 1
    why = f"{text}; restart {count} of {group.terms.max_restarts}"
    out.append(cmd.Record("world-broken", why, host=host, generation=group.round))
    return _progress(_leave(replace(group, restarts=count), why, now, out), now, out)


def _leave(group: Group, why: str, now: float, out: Commands) -> Group:
    """End the round: all its nodes end their workers."""
    inside = tuple(assignment.host for assignment in group.assignments if assignment.host in group.nodes)
    if inside:
        out.append(scmd.LeaveRound(group.round, inside, why))
    group = replace(group, stage=Stage.GATHERING, failures=(), judge_at=NEVER, enough=False)
    return replace(group, leave_by=now + group.terms.leave, end_sent=False)


def _not_left(group: Group) -> list[str]:
    known = ((each.host, group.nodes[each.host]) for each in group.assignments if each.host in group.nodes)
    return [host for host, node in known if node.has_workers]


def _gather(group: Group, now: float, out: Commands) -> Group:
    """Form a round if there are enough nodes and no other is expected; else wait."""
    target = _target(group)
    size = workers_in(target)
    coming = _not_ready(group)
    if size < group.limits.min or not target:
        since = group.too_few_since if group.too_few_since is not None else now
        later = (
            Missing("backoff", h, node.why, until=node.retry_at) for h, node in group.nodes.items() if node.retry_at
        )
        reason = Reason("too-few", size, group.limits.min, missing=(*coming, *later))
        if now >= since + group.limits.patience:
            text = f"{in_words(reason, now)} for {group.limits.patience:g} s (elastic_timeout)"
            return _end(group, "failed", text, out)
        return replace(group, too_few_since=since, enough=False, reason=reason)
    group = replace(group, too_few_since=None, since=group.since if group.enough else now, enough=True)
    settled = group.since + group.limits.timeouts.settle
    if coming and now < settled and not _is_full(group, target):
        return replace(group, until=settled, reason=Reason("ready", size, missing=coming))
    return _form(group, target, out)


def _form(group: Group, target: tuple[sev.Assignment, ...], out: Commands) -> Group:
    number = group.round + 1
    out.append(scmd.FormRound(number, target, group.nodes[target[0].host].store, group.restarts))
    out.append(cmd.Record("world-formed", f"{_describe(target)} in round {number}", generation=number))
    assigned = {assignment.host for assignment in target}
    nodes = {
        host: replace(node, state=GroupState.HEALTHY, ready=False, store="") if host in assigned else node
        for host, node in group.nodes.items()
    }
    group = replace(
        group, stage=Stage.RUNNING, round=number, assignments=target, nodes=nodes, enough=False, failures=()
    )
    return replace(group, reason=_round_reason(group))


def _round_reason(group: Group) -> Reason:
    return Reason("round", generation=group.round, text=_describe(group.assignments))


def _describe(assignments: tuple[sev.Assignment, ...]) -> str:
    workers, nodes = workers_in(assignments), len(assignments)
    return f"{workers} worker{'s' if workers != 1 else ''} on {nodes} node{'s' if nodes != 1 else ''}"


def _target(group: Group) -> tuple[sev.Assignment, ...]:
    """Assignments of a round that would form now: hosts of the last one first; external nodes only with all their workers."""
    order = {assignment.host: rank for rank, assignment in enumerate(group.assignments)}
    inside = group.stage is Stage.RUNNING
    able = {
        host: node
        for host, node in group.nodes.items()
        if node.ready or (inside and host in order and node.state is GroupState.HEALTHY)
    }
    room = group.limits.most
    assignments = []
    for host, node in sorted(able.items(), key=lambda item: (order.get(item[0], len(order)), item[1].joined)):
        workers = node.slots if node.external else int(min(node.slots, room))
        if 0 < workers <= room:
            assignments.append(sev.Assignment(host, workers, node.role))
            room -= workers
    return tuple(assignments)


def _is_full(group: Group, target: tuple[sev.Assignment, ...]) -> bool:
    return workers_in(target) >= group.limits.most


def _not_ready(group: Group) -> tuple[Missing, ...]:
    """Nodes that were started and are not ready yet."""
    inside = {assignment.host for assignment in group.assignments} if group.stage is Stage.RUNNING else set()
    nodes = group.nodes.items()
    coming = (h for h, node in nodes if not (node.ready or node.external or node.retry_at or h in inside))
    return tuple(Missing("node", host) for host in coming)


def _end(
    group: Group, outcome: str, reason: str, out: Commands, *, failure: sev.Failure | None = None, host: str = ""
) -> Group:
    bad = outcome != "succeeded"
    out.extend(scmd.EndNode(name, f"{group.job} {outcome}: {reason}", error=bad) for name in group.nodes)
    out.append(cmd.Record(f"job-{outcome}", f"{group.job} {outcome}: {reason}", host=host))
    out.append(scmd.EndScript(outcome, reason, group.round, group.assignments, failure, host))
    states = {
        name: replace(node, state=GroupState.FAILED if bad and node.state in _INSIDE else node.state)
        for name, node in group.nodes.items()
    }
    return replace(group, stage=Stage.ENDED, outcome=outcome, reason=Reason("script-ended", text=reason), nodes=states)


def _is_finishing(group: Group) -> bool:
    return any(node.state is GroupState.SUCCEEDED for node in group.nodes.values())


def _in_round(group: Group, host: str, number: int) -> bool:
    return number == group.round and group.assigns(host) and host in group.nodes


def _first_rank(group: Group, host: str) -> int:
    hosts = [assignment.host for assignment in group.assignments]
    return ranks_by_node(group.assignments)[hosts.index(host)][0]


def _with_node(group: Group, host: str, node: Node) -> Group:
    return replace(group, nodes={**group.nodes, host: node})
