"""The schedules of `tests.benchmarks.replay`, and the figures that it computes."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from tests.benchmarks.replay import FILES, Plan, options_of, schedule_of
from tests.benchmarks.traces import schedules
from tests.benchmarks.traces.chart import chart, table
from tests.benchmarks.traces.outcome import outcome
from tests.benchmarks.traces.schedules import Change, Schedule, bamboo_counts, from_counts, from_rate, parcae_counts

OPTIONS = {"workers": 4, "speed": 10.0, "seed": 1}


def line(t, step, rank=0, world=1):
    return {"t": t, "step": step, "rank": rank, "world": world}


def test_the_last_count_of_a_second_is_the_new_one():
    """Bamboo's files have the old and the new count at each change."""
    assert bamboo_counts("0,0\r\n5,0\r\n5,4\r\n9,4\r\n9,2\r\n") == [(0, 0), (5, 4), (9, 2)]


def test_named_nodes_are_counted():
    """Parcae's files name the nodes; a decision of Parcae itself changes nothing."""
    text = '[0, "add", {"nodes": ["a", "b"]}]\n[60000, "migration", {"nodes": []}]\n[90000, "remove", {"nodes": ["a"]}]'
    assert parcae_counts(text) == [(0, 2), (60, 2), (90, 1)]


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (bamboo_counts, "0,1\nx,2", "line 2: 'x,2' is not"),
        (bamboo_counts, "", "empty"),
        (bamboo_counts, "5,1\n4,2", "do not increase"),
        (parcae_counts, "[0]", "line 1: not"),
        (parcae_counts, '[0, "remove", {"nodes": ["a"]}]', "a cannot leave"),
    ],
)
def test_a_bad_trace_is_refused(parse, text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_a_worker_stands_for_its_share_of_the_nodes():
    """The schedule begins at the highest count; 5 of 8 nodes are 3 of 4 workers, rounded up."""
    found = from_counts([(0, 2), (100, 8), (200, 5), (300, 8), (400, 2)], seconds=60, **OPTIONS)
    assert [(change.at, change.kind) for change in found.changes] == [(10, "leave"), (20, "join")]
    assert found.changes[0].node == found.changes[1].node
    assert (found.workers, found.seconds) == (4, 30)


def test_a_schedule_is_cut_after_its_time():
    found = from_counts([(0, 4), (100, 1), (500, 4), (900, 1)], seconds=40, **OPTIONS)
    assert {change.at for change in found.changes} == {10}
    assert found.seconds == 40


def test_a_rate_kills_at_even_times():
    """The seed draws the nodes."""
    found = from_rate(60, seconds=20, **OPTIONS)
    assert [change.at for change in found.changes] == [3, 9, 15]
    assert found == from_rate(60, seconds=20, **OPTIONS)
    assert len({from_rate(60, seconds=20, **{**OPTIONS, "seed": seed}).changes for seed in range(9)}) > 1


def test_the_time_with_too_few_nodes_is_known():
    schedule = Schedule(2, 10, (Change(2, "leave", 0), Change(5, "kill", 1), Change(6, "join", 0)))
    assert schedule.seconds_below(2) == 4


@pytest.mark.parametrize("trace", [*FILES, *schedules.PERIODS])
@pytest.mark.parametrize("workers", [2, 4, 12])
def test_a_node_leaves_only_if_it_is_there(trace, workers):
    """Each schedule can be replayed to its end: in order of time, and with at least one node."""
    schedule = schedule_of(trace, Plan(workers, 1, 3600.0, None, 7))
    present, before = set(range(workers)), 0.0
    assert schedule.changes or (trace, workers) == ("parcae-hh", 2)
    for change in schedule.changes:
        assert before <= change.at < schedule.seconds
        before = change.at
        assert (change.node in present) == (change.kind != "join")
        if change.kind != "kill":
            present ^= {change.node}
        assert present


def test_an_undisturbed_training_has_all_its_time():
    steps = [line(second / 10, second, rank, 2) for second in range(200) for rank in (0, 1)]
    found = outcome(steps, 5, 15, 2)
    assert found["goodput, %"] == pytest.approx(100)
    assert (found["new steps"], found["samples"], found["steps lost"], found["below min, s"]) == (100, 200, 0, 0)


def test_steps_made_again_are_lost_and_a_standstill():
    """Step 40 is the last one at 4 s; the training goes on at 5 s with step 31, and makes step 41 at 6 s."""
    first = [line(step / 10, step) for step in range(1, 41)]
    again = [line(5 + (step - 31) / 10, step) for step in range(31, 81)]
    found = outcome([*first, *again], 0, 10, 1)
    assert found["steps lost"] == 10
    assert found["standstill, s"] == pytest.approx(2)
    assert found["goodput, %"] == pytest.approx(100 * (10 - 1.9) / 10)


def test_a_small_world_trains_below_min():
    """From 4 to 6 s one rank of two trains: no standstill, but below the minimum of two."""
    steps = [line(step / 10, step, 0, 1 if 40 < step <= 60 else 2) for step in range(1, 100)]
    found = outcome(steps, 0, 10, 2)
    assert found["goodput, %"] == pytest.approx(100)
    assert found["below min, s"] == pytest.approx(2)


def test_no_step_is_no_goodput():
    found = outcome([line(1, 1)], 2, 12, 1)
    assert (found["goodput, %"], found["standstill, s"], found["new steps"]) == (0, 10, 0)


def test_table_and_chart_have_every_system():
    """A system without a result is named too."""
    results = {"torchft-15s": {"nbelastic": {"goodput, %": [90.0, 98.5, 99.0]}, "torchrun": {}}}
    assert "| torchft-15s | nbelastic | 98.5 (90.0–99.0) |" in table(results)
    assert "| torchft-15s | torchrun | – |" in table(results)
    texts = [element.text for element in ET.fromstring(chart(results)).iter() if element.text]
    assert {"torchft-15s", "nbelastic", "98.5", "torchrun: no result"} <= set(texts)


@pytest.mark.parametrize("wrong", [["--min", "5"], ["--minutes", "0"], ["--speed", "-1"], ["--chart", "a.svg"]])
def test_a_wrong_option_is_named(wrong, capsys):
    with pytest.raises(SystemExit):
        options_of(wrong)
    assert wrong[0] in capsys.readouterr().err
