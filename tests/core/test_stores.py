"""Workers offer new stores after their hosts have moved to other addresses."""

from __future__ import annotations

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid

# ---- stores, when a host has moved ----

LO = "127.0.0.1"


def local(**limits) -> Story:
    """Two hosts of this machine, on loopback addresses until gpu1 is added."""
    return Story(**{"min": 2, **limits}).add("localhost:1", LO, "10.0.0.9").add("127.0.0.2:1", LO, "10.0.0.9")


def test_a_waiting_worker_offers_its_store_again():
    """A waiting worker's host moves: the world forms with the store at the new address."""
    story = local(min=3).submit().answer()
    story.add("gpu1:1", "10.0.0.1").answer(lambda e: not (isinstance(e, ev.WorkerReady) and e.worker.host != "gpu1"))
    assert story.commands(cmd.FormWorld) == []
    assert story.reason == "3 workers ready; localhost/0#1 has to offer a store at 10.0.0.9"
    story.answer()
    assert story.last(cmd.FormWorld).store.startswith("10.0.0.9:")


def test_another_leads_if_rank_0_offers_no_new_store():
    """Without a new store of rank 0, after 2 s a worker with a store at its host's address becomes rank 0."""
    story = local(min=3).submit().answer()
    story.silent.add(wid("localhost/0#1"))
    story.add("gpu1:1", "10.0.0.1").answer().quiet(2.0)
    order = story.last(cmd.FormWorld)
    assert order.members[0] == wid("127.0.0.2/0#1")
    assert order.store.startswith("10.0.0.9:")


def test_an_old_store_is_better_than_none():
    """Without any new store, after 2 s the world forms with an old one, which may work."""
    story = local(min=2).submit().answer(lambda e: not isinstance(e, ev.WorkerReady))
    ready = [e for e in story.answers if isinstance(e, ev.WorkerReady)]
    story.answers.clear()
    story.add("gpu1:1", "10.0.0.1").hear(ev.AgentReady)
    story.answers.clear()
    story.send(*ready)
    assert story.commands(cmd.FormWorld) == []
    story.wait(2.0)
    assert story.last(cmd.FormWorld).store.startswith(LO)


def test_a_change_is_not_prepared_with_a_store_that_was_left_behind():
    """With a store at an old address only, the change is not prepared: members leave and offer new stores."""
    story = local().run().commit(3).answer()
    story.silent |= set(story.cluster.members)
    story.add("gpu1:1", "10.0.0.1").hear(ev.AgentReady)
    story.silent.clear()
    mark = story.mark()
    story.quiet(2.0)
    assert story.commands(cmd.PrepareWorld, mark) == []
    assert story.last(cmd.FormWorld).store.startswith("10.0.0.9:")
    assert len(story.names) == 3
    assert story.cluster.stage is Stage.RUNNING


def test_a_store_counts_that_is_offered_before_a_slow_leaver_has_left():
    """Ranks make their second commit in the next world while a leaver is still in this one: the change after that is prepared."""
    story = Story("a:1", "b:1", min=1).run().commit(3).answer().remove("a")
    late = (wid("a/0#1"), ev.WorkerReady)
    story.answer(lambda e: (getattr(e, "worker", None), type(e)) != late)
    assert story.cluster.entered_next == {wid("b/0#1")}
    offered = story.fakes[wid("b/0#1")]
    offered.offered, offered.steps, offered.commit = True, 2, offered.commit + 2
    story.send(ev.StoreOffered(wid("b/0#1"), offered.generation, "b/0#1 again"))
    story.answer()
    assert story.names == ["b/0#1"]
    mark = story.mark()
    story.add("c:1").quiet(2.0)
    assert [order.formation.store for order in story.commands(cmd.PrepareWorld, mark)] == ["b/0#1 again"]
    assert story.names == ["b/0#1", "c/0#1"]
