"""Hosts whose connection to the driver has ended while their agents run on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nbelastic.core.generations import form_when_enough
from nbelastic.core.liveness import is_cut_off, is_host_lost
from nbelastic.core.persistent import PersistentSet
from nbelastic.core.state import HostPhase, Stage
from nbelastic.protocol import events as ev
from nbelastic.protocol.connection_events import HostDisconnected, HostReconnected
from tests.core.story import Story, wid, with_stage

WHY = "the ssh connection to c has ended"


def disconnect(story: Story, host: str = "c") -> Story:
    story.send(HostDisconnected(host, f"the ssh connection to {host} has ended"))
    return story


def lost(story: Story) -> list[str]:
    return story.records("host-lost")


def test_training_goes_on_without_the_connection():
    """A host that receives no order trains on; its reason says so until it is reached again. Nothing is lost or repeated."""
    story = with_stage(Stage.RUNNING)
    disconnect(disconnect(story))
    assert story.cluster.hosts["c"].reason == f"{WHY}; nbelastic opens another one"
    story.quiet(300.0)
    assert (story.cluster.stage, story.cluster.resets, lost(story)) == (Stage.RUNNING, 0, [])
    story.send(HostReconnected("c"))
    assert story.cluster.hosts["c"].reason == ""
    assert not story.cluster.disconnected
    assert len(story.records("host-disconnected")) == 1
    assert story.records("host-reconnected") == ["c can be reached again, after 300 s"]


@pytest.mark.parametrize("how", ["death", "suspect"])
def test_it_is_lost_as_soon_as_the_training_breaks(how):
    """Its workers get no order for the next generation: when the world breaks, the host is lost with that reason."""
    story = disconnect(with_stage(Stage.RUNNING))
    match how:
        case "death":
            story.kill("b/0#1")
        case "suspect":
            story.raised("a/0#1", "connection closed by peer", intact=False)
    assert lost(story) == [f"c: {WHY}; tried again in 1 s"]
    story.quiet(5.0)
    assert story.cluster.stage is Stage.RUNNING
    assert "c/0#1" not in story.names


def test_it_is_lost_if_the_training_has_just_broken():
    """The break is reported first: the host is lost as soon as its connection ends."""
    story = disconnect(with_stage(Stage.GATHERING))
    assert len(lost(story)) == 1


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("stage", [Stage.FORMING, Stage.PREPARING, Stage.ASKED, Stage.LEAVING])
def test_a_host_that_is_needed_just_now_has_three_seconds(stage, returns):
    """While a world forms or changes each member needs orders. A host that is soon reached again stays, another one is lost."""
    story = disconnect(with_stage(stage)).hang("c/0#1")
    story.wait(2.9)
    assert lost(story) == []
    if returns:
        story.send(HostReconnected("c"))
    story.wait(0.2)
    assert len(lost(story)) == (not returns)


def test_a_change_waits_for_a_minute():
    """A newcomer waits until the host can be reached; after a minute the host is given up, and the newcomer joins."""
    story = disconnect(with_stage(Stage.RUNNING, cooldown=(100.0, 100.0)))
    story.add("d:1").quiet(30.0)
    assert "d/0#1" not in story.names
    assert story.reason.endswith("the next change waits for the connection to c")
    story.quiet(31.0)
    assert len(lost(story)) == 1
    assert "d/0#1" in story.names


def test_a_pause_waits_for_a_minute():
    """The host does not receive the order to stop at a commit: it is given up after a minute, and the others stand still."""
    story = disconnect(with_stage(Stage.RUNNING))
    story.send(ev.PauseRequested("you"))
    story.quiet(30.0)
    assert story.reason.endswith("the next change waits for the connection to c")
    story.quiet(31.0)
    assert (len(lost(story)), story.cluster.stands_still) == (1, True)


def test_a_change_is_made_once_the_host_is_reached_again():
    """The change that has waited is made as soon as the host is reached again, and nothing is lost."""
    story = disconnect(with_stage(Stage.RUNNING))
    story.add("d:1").quiet(30.0)
    story.send(HostReconnected("c"))
    story.quiet(5.0)
    assert story.names == ["a/0#1", "b/0#1", "c/0#1", "d/0#1"]
    assert (lost(story), story.cluster.resets) == ([], 0)


def test_idle_hosts_wait_for_their_connection():
    """Without a job nothing needs the host: its workers stay, with what cells have made in them."""
    story = disconnect(Story("a:1", "c:1", min=1).answer())
    story.wait(30.0)
    assert story.alive("c") == ["c/0#1"]
    story.send(HostReconnected("c"))
    assert lost(story) == []


def test_programs_that_have_not_trained_yet_go_on_without_the_connection():
    """Before the elastic function, or without one, a program needs no order: the host has the time that a change would wait."""
    story = Story("a:1", "c:1", min=2).answer()
    story.submit().hear(ev.WorkerReady, "a/0#1")
    disconnect(story).wait(30.0)
    assert lost(story) == []
    story.send(HostReconnected("c"))
    story.quiet(1.0)
    assert story.names == ["a/0#1", "c/0#1"]
    assert story.cluster.stage is Stage.RUNNING


def test_programs_that_have_not_trained_wait_no_longer_than_a_change_does():
    story = Story("a:1", "c:1", min=2).answer()
    story.submit().hear(ev.WorkerReady, "a/0#1")
    disconnect(story).wait(61.0)
    assert len(lost(story)) == 1


def test_a_first_world_forms_without_newcomers_that_receive_no_orders():
    """Their host stays, and they join as soon as it is reached again. No world is formed only to be broken."""
    story = Story("a:2", "c:1", min=1).answer()
    story.submit().hear(ev.WorkerReady, "c/0#1")
    disconnect(story).quiet(3.0)
    assert (story.names, story.cluster.resets, lost(story)) == (["a/0#1", "a/1#1"], 0, [])
    story.send(HostReconnected("c"))
    story.quiet(1.0)
    assert (story.names, story.cluster.resets) == (["a/0#1", "a/1#1", "c/0#1"], 0)


def test_no_worker_is_started_where_no_order_arrives():
    """A worker dies on a host that receives no orders: another host's free slot is used at once, and its own once it is reached."""
    story = disconnect(Story("a:1", "c:1", min=1, max=2).answer())
    story.add("d:1").kill("c/0#1")
    story.quiet(2.0)
    assert story.alive() == ["a/0#1", "d/0#1"]
    story.scale(1, 3)
    assert story.alive("c") == []
    story.send(HostReconnected("c"))
    story.quiet(2.0)
    assert story.alive("c") == ["c/0#2"]


def test_a_host_without_members_delays_no_change():
    """Its newcomer cannot join now. A worker of another host joins at once, and the first host is lost after a minute."""
    story = disconnect(Story("a:1", "c:1", min=1).answer())
    story.submit().quiet(5.0)
    assert story.names == ["a/0#1"]
    story.add("d:1").quiet(5.0)
    assert (story.names, lost(story)) == (["a/0#1", "d/0#1"], [])
    assert story.reason == "2 workers train in generation 2"
    story.quiet(60.0)
    assert len(lost(story)) == 1


@pytest.mark.parametrize("returns", [True, False])
def test_a_leaver_stays_while_its_successor_receives_no_orders(returns):
    """Without the leaver the world would be below `min`: all train on until the newcomer can join, or is lost."""
    story = Story("a:1", "b:1", min=2, elastic_timeout=20.0).answer()
    story.submit().quiet(5.0)
    story.add("c:1").hear(ev.AgentReady).hear(ev.WorkerRegistered)
    disconnect(story).answer()
    story.remove("b")
    story.quiet(30.0)
    assert (story.names, story.cluster.stage) == (["a/0#1", "b/0#1"], Stage.RUNNING)
    story.send(HostReconnected("c"))
    story.quiet(5.0)
    assert story.names == ["a/0#1", "c/0#1"]


def test_a_prepared_newcomer_that_receives_no_orders_is_left_out():
    """The others do not wait for it: its host has a minute to be reached again, then it joins."""
    story = with_stage(Stage.PREPARING)
    disconnect(story, "d").quiet(30.0)
    assert (story.cluster.stage, lost(story)) == (Stage.RUNNING, [])
    story.send(HostReconnected("d"))
    story.quiet(5.0)
    assert "d/0#1" in story.names


def test_a_newcomer_is_needed_as_soon_as_the_others_leave_for_it():
    """Its host has three seconds then, and not a minute."""
    story = disconnect(with_stage(Stage.LEAVING), "d").hang("c/0#1")
    story.wait(2.9)
    assert lost(story) == []
    story.wait(0.2)
    assert len(lost(story)) == 1


def test_a_first_world_that_needs_a_newcomer_without_orders_says_so():
    """Too few others are ready: the job waits for the host, names it, and trains once it is reached."""
    story = Story("a:1", "c:1", min=2).answer()
    story.submit().hear(ev.WorkerReady, "c/0#1")
    disconnect(story).quiet(30.0)
    assert story.reason == f"1 of min 2 workers ready; waiting for c: {WHY}"
    story.send(HostReconnected("c"))
    story.quiet(1.0)
    assert (story.names, lost(story)) == (["a/0#1", "c/0#1"], [])


def test_no_world_forms_without_the_training_state_while_its_host_receives_no_orders():
    """All members are newcomers now, and only the one on c has the state: the others wait for c, and do not begin anew."""
    story = disconnect(with_stage(Stage.RUNNING))
    workers = {w: replace(worker, has_state=w.host == "c") for w, worker in story.cluster.workers.items()}
    newcomers = PersistentSet(story.cluster.members)
    no_world = replace(story.cluster, stage=Stage.GATHERING, workers=workers, members=(), newcomers=newcomers)
    orders = []
    waiting = form_when_enough(no_world, story.now, orders)
    assert (waiting.stage, waiting.reason.kind, waiting.reason.names) == (Stage.GATHERING, "disconnected", ("c",))
    assert orders == []


@pytest.mark.parametrize("stage", [Stage.GATHERING, Stage.FORMING])
def test_a_host_without_members_is_not_lost_by_a_break_of_the_others(stage):
    """The world breaks, or forms, while a host that has only a newcomer receives no orders: that host has its minute."""
    story = with_stage(Stage.RUNNING, cooldown=(100.0, 100.0))
    story.add("d:1").hear(ev.AgentReady).hear(ev.WorkerRegistered).hear(ev.WorkerReady, "d/0#1")
    disconnect(story, "d").kill("b/0#1")
    if stage is Stage.GATHERING:
        story.hang("c/0#1")
    story.quiet(4.0)
    assert lost(story) == []


def test_a_host_that_has_not_come_up_is_lost():
    """A connection that ends before the agent has sent anything is a failed start."""
    story = Story("a:1", min=1).answer()
    story.add("c:1")
    disconnect(story)
    assert story.cluster.hosts["c"].phase is HostPhase.LOST


def test_the_end_of_its_agent_is_a_loss_as_any():
    """The host is reached again and its agent has ended: it is lost, and forgotten as a host without a connection."""
    story = disconnect(with_stage(Stage.RUNNING))
    story.lose_host("c")
    assert not story.cluster.disconnected
    story.quiet(5.0)
    assert wid("c/0#2") in story.cluster.member_set


@pytest.mark.parametrize(
    ("silence", "since_commit", "since_cut_off", "is_lost"),
    [
        (9.0, None, None, False),
        (11.0, None, None, True),
        (11.0, 0.1, None, False),  # its world makes commits, which need it
        (30.0, 11.0, None, True),
        (30.0, 30.0, 0.0, False),  # the driver is cut off
        (30.0, 30.0, 9.0, False),  # it was, and another host was reached sooner
        (30.0, 30.0, 11.0, True),
        (901.0, 0.1, 0.1, True),
    ],
)
def test_when_silence_is_a_loss(silence, since_commit, since_cut_off, is_lost):
    """A silent host is lost after 10 s, unless a commit or the driver's own network explains it; after the lease always."""
    assert is_host_lost(silence, since_commit, since_cut_off, most=10.0, lease=900.0) is is_lost


@pytest.mark.parametrize(
    ("silences", "is_cut"),
    [
        ((), False),
        ((10.3, 9.6), True),  # else the first one would be lost before the second one is silent for as long
        ((10.3, 7.9), False),
        ((10.3,), True),
    ],
)
def test_when_the_driver_is_cut_off(silences, is_cut):
    """All hosts are silent, though not for equally long: their messages come at different moments."""
    assert is_cut_off(silences, quiet=8.0) is is_cut


def test_a_host_that_opens_its_connection_itself_is_not_lost_before_it_is_up():
    """A batch job may have waited for hours in its queue."""
    story = Story("a:1", "b:1")
    story.send(HostDisconnected("b", "the connection of b has ended", redials=True))
    assert story.cluster.hosts["b"].phase is HostPhase.STARTING
    story.send(HostDisconnected("b", "the ssh connection to b has ended"))
    assert story.cluster.hosts["b"].phase is HostPhase.LOST


def test_a_host_whose_partner_is_lost_late_in_a_step_is_probed_with_others_at_once():
    """A newcomer that was held back may join again. That change needs a host that has received no orders for over a minute."""
    story = Story(min=1, cooldown=(0.0, 0.0))
    for number in (1, 2):
        story.add(f"gpu{number}:1", f"10.0.0.{number}").answer()
    story.run().commit(3).answer().add("gpu3:1", "10.0.0.3")
    for _ in range(2):
        story.answer(lambda e: not isinstance(e, ev.WorkerPrepared)).wait(1.5)
    story.wait(story.cluster.prepare_by - story.now)
    assert story.cluster.held_back.keys() == {wid("gpu3/0#1")}
    release = story.now + 70.0
    story.cluster = replace(story.cluster, held_back={wid("gpu3/0#1"): release})
    story.send(HostDisconnected("gpu2", "ssh has ended"))
    story.wait(68.0).add("gpu4:1", "10.0.0.4").hear(ev.AgentReady)
    assert story.cluster.probing["gpu4"].partners == ("gpu3", "gpu1", "gpu2")
    story.wait(release - story.now)
    assert story.cluster.hosts["gpu2"].phase is HostPhase.LOST
    assert story.cluster.probing["gpu4"].partners == ("gpu3", "gpu1")
