"""What holds of a story once all have answered and every deadline is over."""

from __future__ import annotations

from nbelastic.core.state import HostPhase, Stage
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from nbelastic.protocol.connection_events import HostReconnected
from tests.core.story import Story

LONG_ENOUGH = 4  # times ten minutes: every deadline is over by then


def settle(story: Story) -> None:
    """Networks are mended, debuggers left, hosts added again; all answer and time passes. Then every worker that can train does."""
    story.mend()
    for name in sorted(story.cluster.disconnected):
        story.send(HostReconnected(name))
    story.send(ev.ResumeRequested("a test"))
    story.leave_debugger(*story.fakes)
    for name in [name for name in story.cluster.hosts if story.cluster.hosts[name].phase is not HostPhase.DRAINING]:
        story.add(f"{name}:{story.cluster.hosts[name].spec.slots}")  # clears its failures
    for _ in range(LONG_ENOUGH):
        story.quiet(600.0)
        if story.cluster.stage is Stage.RUNNING:  # newcomers that could not be joined are tried again
            story.commit(3)
    story.quiet(40.0)
    for _ in story.cluster.workers:  # those that could not be joined before are joined one at a time
        if story.cluster.stage is Stage.RUNNING:
            story.commit(3).quiet(5.0)
    assert deadline(story.cluster, story.now) > story.now
    check_settled(story)


def check_settled(story: Story) -> None:
    """Every worker that can train does, or the reason says what is missing."""
    cluster = story.cluster
    job, limits = cluster.active, cluster.limits
    assert not cluster.suspects
    assert not cluster.stopped, "workers that were asked to end have ended"
    assert not cluster.probing
    assert not any(worker.breakpoint_at for worker in cluster.workers.values()), "no program waits in the debugger"
    assert all(host.phase in (HostPhase.UP, HostPhase.DRAINING) for host in cluster.hosts.values())
    if job is None:
        assert all(not fake.job for fake in story.fakes.values()), "a program of no job runs on"
        return
    if job.succeeded:
        assert any(fake.job for fake in story.fakes.values()), "the job has ended programs only"
        return
    able = {w for w in cluster.workers if w not in cluster.failed and story.fakes[w].job == job.name}
    able -= {w for w in able if story.fakes[w].returned}
    # A worker that hung in the last job too never reaches its elastic function, which has no deadline.
    able -= {w for w in able if w in story.silent and not story.fakes[w].generation}
    if cluster.stage is Stage.PREPARING and story.silent & cluster.awaiting & cluster.member_set:
        return  # it hangs, so that no newcomer can be joined with it: they are tried again and again
    if cluster.held_back:  # the same, between two tries
        assert "is left out" in story.reason, story.reason
        return
    if limits.elastic_timeout is None and "the others wait without end" in story.reason:
        return
    asked = cluster.stage in (Stage.RUNNING, Stage.PREPARING, Stage.ASKED)
    if (
        asked and cluster.postponements and story.silent & cluster.member_set
    ):  # it alone holds the state, and never answers
        return
    if cluster.stage is Stage.HALTED and cluster.awaiting == story.stuck & cluster.member_set == cluster.member_set:
        return  # no member waits for another, as while they train: only `stall` would tell
    size = len(cluster.members)
    if cluster.stage is Stage.RUNNING:
        best = int(min(limits.most, len(able)))
        assert size == best or best < limits.min, f"{size} of {best} train: {story.reason}"
        assert all(story.fakes[w].generation == cluster.generation for w in cluster.members)
        return
    assert cluster.stage is Stage.GATHERING, f"stuck in {cluster.stage}: {story.reason}"
    assert len(able) < limits.min, f"{len(able)} could train: {story.reason}"
    assert "of min" in story.reason
