"""Discovery, clients and limits add and remove hosts and slots."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import host_lifecycle
from nbelastic.core.state import HostPhase, Stage
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec, WorkerId
from tests.core.away import Away
from tests.core.story import Story


def kinds(commands) -> list[str]:
    return [f"{c.kind} {c.host}" for c in commands if isinstance(c, cmd.Record) and c.kind.startswith("host-")]


def test_added_removed_mixed_nothing():
    """Discovery reports {} → a:2 → a:2,b:2 → b:2 → b:1,c:1 → the same: each difference, and only it, is applied."""
    story = Story()
    assert kinds(story.discover()) == []
    assert kinds(story.discover("a:2")) == ["host-added a"]
    story.answer()
    assert kinds(story.discover("a:2", "b:2")) == ["host-added b"]
    story.answer()
    assert kinds(story.discover("b:2")) == ["host-removed a"]
    story.answer()
    assert list(story.cluster.hosts) == ["b"]
    assert kinds(story.discover("b:1", "c:1")) == ["host-changed b", "host-added c"]
    story.answer()
    before = story.cluster
    assert story.discover("b:1", "c:1") == ()
    assert story.cluster == replace(before, wake_at=story.cluster.wake_at)  # the deadline for agents that do not report


def test_a_host_that_is_listed_again_before_it_has_left_stays():
    """Discovery leaves out a host once: it would leave at the next commit, and is listed again before."""
    story = Story()
    story.discover("a:1", "b:1")
    story.answer().run()
    story.discover("b:1")
    assert story.cluster.hosts["a"].phase is HostPhase.DRAINING
    story.discover("a:1", "b:1")
    story.quiet(5.0)
    assert {name: host.phase for name, host in story.cluster.hosts.items()} == {"a": HostPhase.UP, "b": HostPhase.UP}
    assert {w.host for w in story.cluster.members} == {"a", "b"}


def test_a_record_of_a_host_belongs_to_no_generation():
    """Clients show the generation of a record that has one."""
    story = Story("a:1").run()
    story.add("b:1").quiet(1.0)
    about = {one.kind: one.generation for one in story.commands(cmd.Record)}
    assert (about["host-added"], about["host-up"]) == (0, 0)
    assert about["world-formed"] == story.cluster.generation > 1


def test_a_discovery_that_never_answered_stops_a_cluster_without_hosts():
    """A discovery that fails before its first answer ends a cluster that has no hosts."""
    story = Story()
    story.send(ev.DiscoveryFailed("hosts.sh failed with exit code 1"))
    assert story.cluster.phase == "finished"
    assert story.cluster.stopping == "host discovery failed: hosts.sh failed with exit code 1"


def test_a_discovery_that_fails_later_is_only_recorded():
    """After a first answer, or with hosts added by hand, a failure of the discovery changes no host."""
    listed, by_hand = Story(), Story("a:1")
    listed.discover()
    for story in (listed, by_hand):
        story.send(ev.DiscoveryFailed("hosts.sh failed with exit code 1"))
        assert not story.cluster.stopping
        assert story.records("discovery-failed") == ["hosts.sh failed with exit code 1"]


def test_a_discovery_that_fails_for_a_new_driver_is_only_recorded():
    """A cluster with a new driver goes on although the discovery fails, even with no host at the moment."""
    for story in (Story("a:1", min=1).run(), Story()):
        story.discover()
        Away(story).new_driver()
        story.send(ev.DiscoveryFailed("the controller is busy"))
        assert not story.cluster.stopping
        assert story.records("discovery-failed") == ["the controller is busy"]


def test_fewer_slots_take_the_highest_away():
    """When a slot count shrinks, the highest slots are removed; their workers leave at a commit."""
    story = Story(min=1)
    story.discover("a:3")
    story.run()
    story.discover("a:1")
    assert story.cluster.stage is Stage.ASKED
    story.quiet(1.0)
    assert story.names == ["a/0#1"]
    assert story.alive() == ["a/0#1"]
    assert story.cluster.resets == 0


def test_more_slots_add_workers():
    """When a slot count grows, workers start on the new slots and join."""
    story = Story("a:1", min=1).run()
    story.add("a:3").quiet(2.0)
    assert story.names == ["a/0#1", "a/1#1", "a/2#1"]


def test_slots_that_come_back_are_new_workers():
    """A slot that is removed and added again never starts a worker under an id that was used before."""
    story = Story("a:2", min=1).run()
    story.add("a:1").quiet(1.0)
    story.add("a:2").quiet(2.0)
    assert story.names == ["a/0#1", "a/1#2"]


def test_slots_taken_away_while_their_worker_still_ends():
    """A slot shrinks and grows while its worker ends: a new worker starts there after that end."""
    story = Story("a:2", min=1)
    story.answer()
    story.add("a:1").add("a:2")
    assert story.alive() == ["a/0#1"]
    story.answer()
    assert story.alive() == ["a/0#1", "a/1#2"]


def test_a_host_that_comes_back_starts_new_workers():
    """A host that is removed and added again never reuses an id; late messages of its old workers have no effect."""
    story = Story("a:2", min=1)
    story.answer()
    story.remove("a").answer()
    assert "a" not in story.cluster.hosts
    story.add("a:2").answer()
    assert story.alive() == ["a/0#2", "a/1#2"]
    before = story.cluster
    story.send(ev.WorkerExited(WorkerId("a", 0, 1), -9), ev.WorkerRegistered(WorkerId("a", 1, 1)))
    assert story.cluster == before


def test_a_lost_host_that_was_to_leave_is_forgotten_but_not_its_ids():
    """The agent of a draining host is lost before its workers have left: the host goes, its ids stay used."""
    story = Story("a:1", "b:1", min=1).run()
    story.remove("a").lose_host("a").answer()
    story.add("a:1").quiet(2.0)
    assert story.alive("a") == ["a/0#2"]


def test_a_host_added_and_removed_at_once_is_nothing():
    """A host that is added and removed within one settle time changes nothing."""
    story = Story("a:2", min=1).run()
    mark = story.mark()
    story.add("b:2").wait(0.5).remove("b").quiet(5.0)
    assert story.commands(cmd.AskLeave, mark) + story.commands(cmd.FormWorld, mark) == []
    assert list(story.cluster.hosts) == ["a"]


def test_ready_newcomers_that_are_removed_again_disturb_no_member():
    """Newcomers are removed after the members were asked to leave: the members stay in their generation."""
    story = Story("a:2", min=1).run()
    mark = story.mark()
    story.add("b:1").answer(lambda e: not isinstance(e, ev.LeaveAcknowledged))
    assert story.cluster.stage is Stage.ASKED
    story.remove("b").quiet(2.0)
    assert story.commands(cmd.CancelLeave, mark)
    assert story.commands(cmd.FormWorld, mark) == []
    assert story.cluster.stage is Stage.RUNNING


def test_a_drain_taken_back_in_time_changes_nothing():
    """A host is removed and added again before any member has left: all members stay."""
    story = Story("a:1", "b:1", min=1).run()
    story.remove("b")
    assert story.cluster.stage is Stage.ASKED
    story.add("b:1").quiet(1.0)
    assert story.names == ["a/0#1", "b/0#1"]
    assert story.cluster.generation == 1
    assert story.cluster.hosts["b"].phase is HostPhase.UP


def test_the_record_names_the_source_of_a_removal():
    """The record of a removal names the client, or the discovery."""
    story = Story(min=1)
    story.discover("b:1", "a:1", "c:1")
    story.answer()
    story.remove("b").answer().discover("a:1")
    assert story.records("host-removed") == [
        "b will leave at the next commit, by a test",
        "c will leave at the next commit, by discovery",
    ]


def test_a_host_removed_by_hand_stays_away():
    """A host that a client removed stays out while the discovery lists it, until it was unlisted once or is added by hand."""
    story = Story(min=1)
    story.discover("a:1", "b:1")
    story.answer()
    story.remove("b").answer()
    story.discover("a:1", "b:1")
    assert list(story.cluster.hosts) == ["a"]
    story.discover("a:1")
    story.discover("a:1", "b:1")
    assert list(story.cluster.hosts) == ["a", "b"]


def test_hosts_that_were_removed_long_ago_are_forgotten(monkeypatch):
    """Hosts come and go for weeks, without a discovery: the state keeps the newest names. A host that still leaves stays away."""
    monkeypatch.setattr(host_lifecycle, "NAMES", 3)
    story = Story("a:1", "z:1", min=1).run().commit(2)
    story.remove("z")
    for number in range(9):
        story.add(f"b{number}:1").remove(f"b{number}", now=True).answer(
            lambda event: not isinstance(event, ev.WorkerReady)
        )
    assert len(story.cluster.removed_hosts) <= 5
    assert {"z", "b8", "b7"} <= story.cluster.removed_hosts
    assert kinds(story.discover("a:1", "z:1")) == []


def test_a_host_added_by_hand_is_not_discoverys_to_remove():
    """A discovery that does not list a host added by hand leaves that host alone."""
    story = Story("mine:1", min=1)
    story.answer()
    story.discover("a:1")
    story.discover()
    story.answer()
    assert list(story.cluster.hosts) == ["mine"]


def test_slots_that_a_client_gave_to_a_listed_host_stay():
    """A client gives a listed host more slots: they stay when the discovery lists another host too, and under a new driver."""
    story = Story(min=1)
    story.discover("a:2")
    story.run()
    story.add("a:4").quiet(2.0)
    mark = story.mark()
    story.discover("a:2", "b:1")
    Away(story.quiet(2.0)).new_driver()
    story.discover("a:2", "b:1")
    story.quiet(2.0)
    assert story.names == ["a/0#1", "a/1#1", "a/2#1", "a/3#1", "b/0#1"]
    assert story.commands(cmd.StopWorker, mark) == []


def test_a_host_that_kubernetes_has_ended_is_added_again_but_not_by_hand():
    """Such a host gets another pod at once, although it was removed. It stays only while the discovery lists it."""
    story = Story(min=1)
    story.discover("a:1", "b:1")
    story.answer()
    story.send(ev.HostRemoved("b", by="the eviction of its pod", within=30.0))
    story.answer()
    assert list(story.cluster.hosts) == ["a"]
    story.send(ev.HostAdded(HostSpec("b", 1), "Kubernetes", by_hand=False))
    story.answer()
    assert list(story.cluster.hosts) == ["a", "b"]
    story.discover("a:1")
    story.answer()
    assert list(story.cluster.hosts) == ["a"]


def test_hosts_beyond_max_come_and_go_unnoticed():
    """A host beyond max appears or leaves: the members train on undisturbed."""
    story = Story("a:2", min=1, max=2).run()
    mark = story.mark()
    story.add("b:2").quiet(3.0)
    story.remove("b").quiet(3.0)
    assert story.commands(cmd.AskLeave, mark) + story.commands(cmd.AbortWorld, mark) == []
    assert (story.names, story.cluster.generation) == (["a/0#1", "a/1#1"], 1)
    assert story.commands(cmd.StartWorker, mark) == []


def test_a_spare_waits_and_disturbs_no_member():
    """Spares above max start and become ready; the members are asked for nothing."""
    story = Story("a:2", "b:2", min=1, max=2, spares=1).run()
    assert (len(story.names), len(story.cluster.newcomers)) == (2, 1)
    assert story.commands(cmd.AskLeave) == []
    story.kill("a/1#1").hear(ev.WorkerReady)
    assert story.names == ["a/0#1", "b/0#1"]


def test_a_spare_that_is_not_needed_waits_on():
    """With two spares and one failure, one spare takes the place; the other waits for the next failure."""
    story = Story("a:2", "b:2", min=1, max=2, spares=2).run()
    story.kill("a/1#1").hear(ev.WorkerReady, "a/0#1")
    story.hear(ev.WorkerFormed)
    story.kill("a/0#1").hear(ev.WorkerReady, "b/0#1")
    assert story.names == ["b/0#1", "b/1#1"]


def test_no_more_workers_are_started_than_there_are_open_files_for():
    """The limit of open files bounds the workers; one record says once how many fit."""
    story = Story("a:3", min=2, room=4)
    story.answer()
    assert not [record for record in story.commands(cmd.Record) if record.kind == "no-room"]
    story.send(ev.HostAdded(HostSpec("b", 3)))
    story.answer()
    (record,) = [record for record in story.commands(cmd.Record) if record.kind == "no-room"]
    assert record.text.startswith("6 workers are asked for, and only 4 fit")
    assert len(story.cluster.workers) == 4
    story.kill("a/0#1").answer()
    assert len(story.cluster.workers) == 4
    assert len([record for record in story.commands(cmd.Record) if record.kind == "no-room"]) == 1
