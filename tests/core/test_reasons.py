"""Reasons are data; their sentences are made at the time of reading."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbelastic
from nbelastic.core.reasons import MISSING, SENTENCES, Missing, Reason, and_also, in_words, queued_hosts, with_queued
from tests.core.story import Story

CORE = Path(nbelastic.__file__).parent / "core"


def test_a_sentence_is_of_the_moment_in_which_it_is_read():
    """Without any event, the duration in a sentence grows."""
    story = Story("a", min=1)
    story.send(*[answer for answer in story.answers if type(answer).__name__ == "AgentReady"])
    reason = story.cluster.reason
    assert in_words(reason, story.now) == "0 of min 1 workers ready; waiting for a/0#1 (0 s)"
    assert in_words(reason, story.now + 42.4) == "0 of min 1 workers ready; waiting for a/0#1 (42 s)"


def test_a_reason_names_what_is_missing_and_until_when():
    """A reason names lost hosts and back-offs with their ends, or says what a user can do."""
    lost = Missing("lost", "b", "its machine is gone", until=130.0)
    cooling = Missing("backoff", "a/1", "a/1#2 died", until=105.0)
    reason = Reason("ready", 2, missing=(lost, cooling))
    words = in_words(reason, 100.0)
    assert words.startswith("2 workers ready; waiting for b (lost: its machine is gone; tried again in 30 s), ")
    assert words.endswith(", a/1 (in back-off, 5 s more: a/1#2 died)")
    assert in_words(Reason("too-few", 1, 2, missing=()), 0.0) == "1 of min 2 workers ready; add a host or lower min"


def test_of_many_names_three_are_listed():
    """A sentence lists three names and counts the others."""
    reason = Reason("broken", 1, 5, generation=7, names=("a", "b", "c", "d"))
    assert in_words(reason, 0.0) == "1 of 5 survivors have left generation 7; not yet a, b, c, …"


def test_one_reason_comes_after_another():
    """A second reason follows the first one's sentence."""
    reason = Reason("training", of=2, generation=1, then=Reason("put-off", text="a/0 is busy"))
    whole = and_also(reason, Reason("stall", text="no commit for 3 s"))
    assert (
        in_words(whole, 0.0)
        == "2 workers train in generation 1; the next change waits, as a/0 is busy; no commit for 3 s"
    )


def test_a_host_waits_in_the_queue_of_its_batch_system_until_it_starts():
    """Of the hosts that start, those whose batch jobs are queued are named so. All others keep their state."""
    starting, ready, lost = Missing("host starting", "a"), Missing("host starting", "b"), Missing("lost", "c", "killed")
    reason = Reason("too-few", 0, 1, missing=(starting, ready), then=Reason("put-off", text="d", missing=(lost,)))
    shown = with_queued(reason, {"a": "job 7: pending", "c": "job 8: pending"})
    assert shown.missing == (Missing("host queued", "a", "job 7: pending"), ready)
    assert shown.then is not None
    assert shown.then.missing == (lost,)
    assert queued_hosts(shown) == ("a",)


def test_every_sentence_is_used_and_none_is_missing():
    """Each kind of reason in the core has a sentence, and each sentence belongs to a kind in use."""
    used: dict[str, set[str]] = {"Reason": set(), "Missing": set()}
    for file in CORE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in used:
                kind = node.args[0]
                assert isinstance(kind, ast.Constant), f"{file.name}: {ast.unparse(node)}"
                used[node.func.id].add(kind.value)
    assert used == {"Reason": set(SENTENCES), "Missing": set(MISSING)}


def test_sentences_name_only_what_a_reason_has():
    """Each sentence can be made from a reason with empty fields."""
    for kind in SENTENCES:
        assert not re.search(r"[{}]", in_words(Reason(kind, missing=tuple(map(Missing, MISSING))), 0.0))
