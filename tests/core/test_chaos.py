"""Which worker or host an injected fault hits: drawn by a seed, and never more than the job can lose."""

from __future__ import annotations

from time import process_time

import pytest
from msgspec.structs import replace

from nbelastic.core.chaos import Fault, Withheld, choose
from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from nbelastic.protocol.chaos import KINDS, draw, pause_before
from nbelastic.protocol.ids import WorkerId
from tests.core.fakes import wid
from tests.core.story import Story, with_stage


def chosen(story, *, kinds=KINDS, seeds=range(60), hit=(), below_min=False):
    """The faults that different seeds choose."""
    hit = {wid(w) for w in hit}
    return [choose(story.cluster, kinds, seed, 1, hit, below_min=below_min) for seed in seeds]


def test_a_seed_makes_the_same_choices():
    """The same seed and state give the same fault; different seeds reach each kind and each victim."""
    story = Story("a:2", "b:2", min=1).run()
    assert chosen(story) == chosen(story)
    assert set(chosen(story)) == {
        *(Fault(kind, w[0], wid(w)) for kind in ("kill", "stop") for w in story.names),
        *(Fault("host", host) for host in "ab"),
    }


def test_the_order_in_which_hosts_came_changes_no_choice():
    """A seed gives the same fault after a restart of the hosts in another order."""
    assert chosen(Story("a:2", "b:2", min=1).run()) == chosen(Story("b:2", "a:2", min=1).run())


def test_a_seed_is_the_same_everywhere():
    """Draws do not depend on Python's version or hash seed, and are spread from 0 to 1."""
    assert [round(draw(7, n, "victim"), 6) for n in range(3)] == [0.078445, 0.197765, 0.434886]
    draws = [draw(seed, 1, "kill") for seed in range(1000)]
    assert (min(draws) < 0.01, max(draws) > 0.99, 0.45 < sum(draws) / 1000 < 0.55) == (True, True, True)


def test_pauses_are_about_as_long_as_asked_for():
    """The moments are random: a pause is at least half and less than one and a half times as long."""
    pauses = [pause_before(3, number, 60.0) for number in range(1000)]
    assert (30 <= min(pauses) < 31, 89 < max(pauses) < 90, 58 < sum(pauses) / 1000 < 62) == (True, True, True)


@pytest.mark.parametrize("stage", Stage)
def test_enough_workers_stay_for_min(stage):
    """In each stage at least `min` workers would stay, and one of them has the training state."""
    story = with_stage(stage, min=2)
    for fault in chosen(story):
        if isinstance(fault, Fault):
            gone = {
                w for w in story.cluster.workers if w == fault.worker or (fault.worker is None and w.host == fault.host)
            }
            left = (story.cluster.member_set | story.cluster.newcomers) - gone
            assert len(left) >= 2
            assert stage is Stage.FORMING or any(story.cluster.workers[w].has_state for w in left)


def test_a_fault_below_min_is_withheld_unless_asked_for():
    """Two workers with min 2: no fault, and the reason has both numbers. With `below_min` one may go, but not both."""
    story = Story("a:2", min=2).run()
    (withheld,) = set(chosen(story, kinds=("kill",), seeds=[1]))
    assert withheld.why in {f"without {w} 1 workers would be left, and min is 2" for w in story.names}
    assert all(isinstance(each, Withheld) for each in chosen(story))
    below = chosen(story, below_min=True)
    assert {fault.kind for fault in below} == {"kill", "stop"}, "the host has the last workers with the training state"


def test_a_worker_that_was_hit_counts_as_gone():
    """A worker that was stopped a moment ago is not known to be lost: it is neither hit again nor counted."""
    story = Story("a:3", min=2).run()
    assert all(isinstance(each, Withheld) for each in chosen(story, kinds=("stop",), hit=["a/0#1"]))
    story = Story("a:4", min=2).run()
    assert {each.worker for each in chosen(story, kinds=("stop",), hit=["a/0#1"])} == {
        wid(f"a/{n}#1") for n in (1, 2, 3)
    }


def test_newcomers_are_no_victims_but_count():
    """The death of a newcomer would disturb no training, so members are hit; the newcomer could replace one."""
    story = with_stage(Stage.PREPARING, min=2)
    assert story.cluster.newcomers == {wid("d/0#1")}
    assert {fault.host for fault in chosen(story)} == {"a", "b", "c"}


def test_while_a_world_trains_workers_that_have_not_come_to_it_are_no_victims():
    """They still run the program's beginning."""
    story = Story("a:2", min=1).run().add("b:1").answer(lambda event: not isinstance(event, ev.WorkerReady))
    assert story.cluster.workers[wid("b/0#1")].job == "job"
    assert {fault.worker for fault in chosen(story, kinds=("kill",))} == {wid("a/0#1"), wid("a/1#1")}


def test_another_kind_is_chosen_if_one_is_impossible():
    """With one host only, no fault hits the host; the others go on."""
    story = Story("a:3", min=1).run()
    assert {fault.kind for fault in chosen(story)} == {"kill", "stop"}
    (withheld,) = chosen(story, kinds=("host",), seeds=[1])
    assert withheld.why == "without the host a 0 workers would be left, and min is 1"


def test_before_the_first_world_workers_that_run_the_program_are_hit():
    """A program may run for long before the elastic function, and its workers may be lost there."""
    story = Story("a:3", min=1)
    story.answer()
    story.submit()
    assert {fault.worker for fault in chosen(story, kinds=("kill",))} == {wid(f"a/{n}#1") for n in range(3)}
    workers = story.cluster.workers
    story.cluster = replace(story.cluster, workers=workers | {wid("a/2#1"): replace(workers[wid("a/2#1")], job="")})
    assert {fault.worker for fault in chosen(story, kinds=("kill",))} == {wid(f"a/{n}#1") for n in range(2)}


def test_the_choice_is_fast_for_many_workers():
    """Ten thousand workers: the driver is not held up, also if each fault would leave too few."""
    story = Story("a:3", "b:3", min=1).run()
    cluster = story.cluster
    ids = [WorkerId(f"h{n}", slot, 1) for n in range(1250) for slot in range(8)]
    workers = {w: replace(cluster.workers[cluster.members[0]], id=w) for w in ids}
    hosts = {f"h{n}": cluster.hosts["a"] for n in range(1250)}
    many = replace(cluster, workers=workers, hosts=hosts, members=tuple(ids), member_set=frozenset(ids))
    few = replace(many, limits=replace(cluster.limits, min=10_000))
    begun = process_time()
    assert isinstance(choose(many, KINDS, 1, 1, (), below_min=False), Fault)
    assert isinstance(choose(few, KINDS, 1, 1, (), below_min=False), Withheld)
    assert process_time() - begun < 2.0
