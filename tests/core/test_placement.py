"""Hosts and slots give ranks; host texts are parsed."""

from __future__ import annotations

import pytest

from nbelastic.core.ranks import rank_order
from nbelastic.errors import UsageError
from nbelastic.protocol.host_parsing import parse_host, parse_hosts, parse_script_output
from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.protocol.rank_layout import rank_numbers
from tests.core.story import Story


def workers(*hosts: str) -> list[WorkerId]:
    """`workers("a:2")` are the two workers of host a."""
    specs = [parse_host(host, 1) for host in hosts]
    return [WorkerId(spec.name, slot, 1) for spec in specs for slot in range(spec.slots)]


def fresh(*hosts: str) -> tuple[WorkerId, ...]:
    seniority = {parse_host(host, 1).name: age for age, host in enumerate(hosts)}
    return rank_order((), workers(*hosts), seniority)


def order(members) -> list[str]:
    return list(dict.fromkeys(w.host for w in members))


def test_two_hosts_of_two_are_packed_by_host():
    """2 hosts × 2 slots give ranks 0-3 by host, with exact local and cross numbers."""
    members = fresh("a:2", "b:2")
    assert [str(w) for w in members] == ["a/0#1", "a/1#1", "b/0#1", "b/1#1"]
    found = [(p.rank, p.local_rank, p.local_size, p.cross_rank, p.cross_size) for p in rank_numbers(members)]
    assert found == [(0, 0, 2, 0, 2), (1, 1, 2, 0, 2), (2, 0, 2, 1, 2), (3, 1, 2, 1, 2)]


def test_unequal_hosts_have_unequal_cross_sizes():
    """1 + 2 slots give cross sizes 2, 2, 1."""
    found = rank_numbers(fresh("a:1", "b:2"))
    assert [p.cross_size for p in found] == [2, 2, 1]
    assert [p.local_size for p in found] == [1, 2, 2]
    assert [p.cross_rank for p in found] == [0, 1, 0]


def test_an_empty_world_has_no_places():
    """An empty world has no places, without an error."""
    assert rank_numbers(()) == ()
    assert rank_order((), (), {}) == ()


def test_old_hosts_keep_their_order_and_new_ones_follow():
    """Hosts {a, b, c}, then {d, c, b}, are ordered b, c, d."""
    old = fresh("a:1", "b:1", "c:1")
    survivors = [w for w in old if w.host != "a"]
    assert order(rank_order(survivors, workers("d:1"), {"d": 0, "c": 1, "b": 2})) == ["b", "c", "d"]


def test_newcomers_are_ordered_by_when_their_hosts_came():
    """And by slot, in whatever order they became ready."""
    new = [WorkerId.parse(name) for name in ("a/0#1", "b/1#1", "c/0#1", "b/0#1")]
    assert [*map(str, rank_order([], new, {"b": 1, "a": 2}))] == ["b/0#1", "b/1#1", "a/0#1", "c/0#1"]


def test_old_workers_keep_low_ranks_when_a_host_joins():
    """A new host's workers have the highest ranks, whatever the host's name."""
    old = fresh("m:2", "n:2")
    assert rank_order(old, workers("a:2"), {"m": 0, "n": 1, "a": 2})[:4] == old


def test_a_new_worker_of_an_old_host_is_ranked_with_its_host():
    """A replacement on host a is ranked before host b's workers, which keep their order."""
    old = [w for w in fresh("a:2", "b:2") if str(w) != "a/0#1"]
    new = rank_order(old, [WorkerId("a", 0, 2)], {"a": 0, "b": 1})
    assert [str(w) for w in new] == ["a/1#1", "a/0#2", "b/0#1", "b/1#1"]


def test_the_order_of_new_hosts_is_when_they_came():
    """New hosts are ordered by when they were added, not by name."""
    assert order(rank_order((), workers("z:1", "y:1", "x:1"), {"z": 0, "y": 1, "x": 2})) == ["z", "y", "x"]


def test_rank_order_of_an_unchanged_world_changes_nothing():
    """A world without newcomers keeps its order."""
    old = rank_order([WorkerId("a", 1, 1), WorkerId("b", 0, 1)], [WorkerId("a", 0, 2)], {"a": 0, "b": 1})
    assert rank_order(old, (), {}) == old


def test_only_the_first_host_is_used_if_that_is_enough():
    """With max=2 of 2 × 2 slots only the first host runs workers."""
    story = Story("a:2", "b:2", max=2).run()
    assert story.names == ["a/0#1", "a/1#1"]
    assert story.alive("b") == []


def test_rank_zero_passes_to_the_oldest_survivor():
    """After the loss of rank 0's host the oldest survivor becomes rank 0."""
    story = Story("a:1", "b:1", "c:1", min=2, max=3).run()
    story.lose_host("a").answer()
    assert story.names == ["b/0#1", "c/0#1"]
    assert story.last(type(story.cluster.formation)).members[0].host == "b"


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("h", HostSpec("h", 3)),
        ("h:2", HostSpec("h", 2)),
        ("  h:2  ", HostSpec("h", 2)),
        ("me@h:2", HostSpec("h", 2, "me")),
        ("h:09999", HostSpec("h", 9999)),
        ("127.0.0.2:1", HostSpec("127.0.0.2", 1)),
        ("[::1]:2", HostSpec("::1", 2)),
        ("[fe80::1%eth0]", HostSpec("fe80::1%eth0", 3)),
    ],
)
def test_a_host_is_name_slots_user(text, spec):
    """`name`, `name:slots`, `user@name:slots` and bracketed IPv6 are hosts; without slots the default counts."""
    assert parse_host(text, 3) == spec


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "h:", "h:x", "h:-1", "h:0", "h:1:2", "h:1.5", "h:²", "a b", "::1", "@h", "[x]:1", "[abc]"),
        *("-v", "-l@h", "gpu..1", "gpu1..:2", "x" * 64),
        *("h:50051", "h:" + "9" * 5000),  # more processes than any host runs: a port, or a slip
    ],
)
def test_text_that_is_not_a_host_is_quoted(text):
    """Text that is not a host raises an error that quotes the text."""
    with pytest.raises(UsageError, match=r"host|slots") as error:
        parse_host(text, 1)
    assert repr(text) in str(error.value)


def test_a_list_of_hosts():
    """`--hosts gpu1:4,gpu2:4` is a list of hosts; a stray comma is ignored."""
    assert parse_hosts("gpu1:4, gpu2:4,", 1) == (HostSpec("gpu1", 4), HostSpec("gpu2", 4))


def test_a_host_listed_twice_is_an_error():
    """A repeated name raises an error that names it."""
    with pytest.raises(UsageError, match="'gpu1' is listed more than once"):
        parse_hosts("gpu1:4,gpu1:2", 1)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("\n\n", []),
        ("h", ["h:3"]),
        ("h:2", ["h:2"]),
        ("h:2\n", ["h:2"]),
        ("\n  h:2\n\nk\n", ["h:2", "k:3"]),
        ("h:2\nh:2\n", ["h:2"]),
        ("[::1]:2\r\nk:1\r\n", ["::1:2", "k:1"]),
    ],
)
def test_lines_that_a_discovery_script_prints(text, names):
    """A discovery script may print nothing, `h`, `h:2`, blank lines, a repeated line, and bracketed IPv6."""
    assert [f"{spec.name}:{spec.slots}" for spec in parse_script_output(text, 3)] == names


@pytest.mark.parametrize(("text", "line"), [("h:x", 1), ("ok\nh:-1", 2), ("ok:1\n\nh:1:2\n", 3), ("h:1\nh:2", 2)])
def test_junk_from_a_script_names_the_line(text, line):
    """`h:x`, `h:-1`, `h:1:2` and a host with two numbers of slots raise errors that quote the line."""
    with pytest.raises(UsageError, match=f"line {line}: "):
        parse_script_output(text, 1)
