"""Setup cells: which are kept, which workers have run them, and what follows a failure."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import WorkerState
from nbelastic.protocol import events as ev
from tests.core.away import Away
from tests.core.story import Story, wid

LIMITS = {"min": 1, "cooldown": (0.0, 0.0)}


def ran(story: Story, name: str) -> list[str]:
    """The sources of the cells that a worker has run, in order."""
    return story.ran.get(wid(name), [])


def kept(story: Story) -> list[tuple[str, str]]:
    return [(cell.key, cell.source) for cell in story.cluster.setup]


def state(story: Story, name: str) -> WorkerState:
    return story.cluster.workers[wid(name)].state


# ---- which cells are kept ----


def test_a_cell_that_fails_everywhere_is_not_kept():
    """A cell that fails on all workers is dropped: they stay ready, and a replacement does not run it."""
    story = Story("a:1", **LIMITS).answer()
    story.broken.add(("a", "nosuchmodule"))
    story.set_up("imports", "nosuchmodule").answer()
    assert kept(story) == []
    assert state(story, "a/0#1") is WorkerState.READY
    assert story.records("setup-failed") == [
        "setup cell imports failed everywhere and is not kept: NameError: nosuchmodule"
    ]
    story.set_up("value", "42").answer()
    story.kill("a/0#1").answer()
    assert ran(story, "a/0#2") == ["42"]
    assert state(story, "a/0#2") is WorkerState.READY


def test_a_cell_that_is_edited_replaces_itself():
    """An edited cell keeps its place, and later workers run only its new text."""
    story = Story("a:1", **LIMITS).answer()
    story.set_up("first", "one").answer().set_up("second", "two").answer()
    story.set_up("first", "ONE").answer()
    assert kept(story) == [("first", "ONE"), ("second", "two")]
    assert ran(story, "a/0#1") == ["one", "two", "ONE"]
    story.add("b:1").answer()
    assert ran(story, "b/0#1") == ["ONE", "two"]


def test_an_edit_that_fails_leaves_the_cell_that_worked():
    """After a failed edit, later workers run the earlier text."""
    story = Story("a:1", **LIMITS).answer()
    story.set_up("first", "one").answer()
    story.broken.add(("a", "oen"))
    story.set_up("first", "oen").answer()
    assert kept(story) == [("first", "one")]


def test_the_same_source_is_not_kept_twice():
    """A copy of a cell, or a repeated cell without a key, replaces the first."""
    story = Story("a:1", **LIMITS).answer()
    story.set_up("first", "one").answer().set_up("copy", "one").answer()
    assert kept(story) == [("copy", "one")]


def test_a_cell_that_no_worker_could_try_is_kept():
    """A cell that no worker could try is kept, and each later worker runs it before a program."""
    story = Story("a:1", **LIMITS)
    story.set_up("first", "one")
    assert kept(story) == [("first", "one")]
    story.answer()
    assert ran(story, "a/0#1") == ["one"]


def test_cells_are_cleared_by_their_keys_or_all():
    """Later workers do not run cleared cells; an unknown key changes nothing."""
    story = Story("a:1", **LIMITS).answer()
    for key in "xyz":
        story.set_up(key, f"cell {key}").answer()
    story.send(ev.SetupCleared("y"), ev.SetupCleared("nobody"))
    assert [key for key, _ in kept(story)] == ["x", "z"]
    assert story.records("setup-changed")[-1] == "setup cell y was cleared"
    story.send(ev.SetupCleared())
    assert kept(story) == []


# ---- no worker misses one ----


def test_a_cell_that_comes_while_a_worker_registers():
    """A cell that arrives around a worker's registration runs before its program."""
    for when in range(3):
        story = Story("a:1", **LIMITS).hear(ev.AgentReady)
        if when > 0:
            story.hear(ev.WorkerRegistered)
        story.set_up("value", "7")
        if when > 1:
            story.set_up("other", "8")  # it is refused while the first one runs
        story.answer().submit().quiet(2.0)  # the story's fake refuses a program that comes before the cell
        assert ran(story, "a/0#1") == ["7"]
        assert story.names == ["a/0#1"]


def test_a_newcomer_that_becomes_ready_during_a_trial_runs_the_cell_too():
    """A newcomer also tries a cell that other workers still run."""
    story = Story("a:1", **LIMITS).answer()
    story.add("b:1").hear(ev.AgentReady)
    story.set_up("value", "7")
    story.hear(ev.WorkerRegistered, "b/0#1").hear(ev.SetupEnded, "b/0#1")
    assert state(story, "a/0#1") is WorkerState.STARTING
    assert state(story, "b/0#1") is WorkerState.READY
    story.submit().quiet(2.0)
    assert ran(story, "a/0#1") == ran(story, "b/0#1") == ["7"]
    assert story.names == ["a/0#1", "b/0#1"]


def test_an_older_cell_that_works_on_a_newcomer_does_not_keep_one_that_fails():
    """A newcomer still runs the first cell while the others try the second one. That fails everywhere, and is not kept."""
    story = Story("a:1", **LIMITS).answer()
    story.set_up("first", "one").answer()
    story.broken |= {("a", "two"), ("b", "two")}
    story.add("b:1").hear(ev.AgentReady).hear(ev.WorkerRegistered)
    story.set_up("second", "two").answer()
    assert ran(story, "b/0#1") == ["one"]
    assert kept(story) == [("first", "one")]


def test_replacements_and_newcomers_run_all_cells_in_order():
    """Replacements and newcomers run all cells in order before they join a job."""
    story = Story("a:1", "b:1", **LIMITS).answer()
    story.set_up("x", "one").answer().set_up("y", "two").answer()
    story.run()
    story.kill("b/0#1").add("c:1").quiet(2.0)
    assert ran(story, "b/0#2") == ran(story, "c/0#1") == ["one", "two"]
    assert story.names == ["a/0#1", "b/0#2", "c/0#1"]


# ---- workers on which one has failed ----


def test_a_worker_whose_setup_failed_joins_no_job():
    """A worker with a failed cell joins no job, and the status names the cell."""
    story = Story("a:1", **LIMITS).answer()
    story.set_up("value", "1").answer()
    story.broken.add(("b", "1"))
    story.add("b:1").answer()
    assert state(story, "b/0#1") is WorkerState.FAILED
    assert story.cluster.workers[wid("b/0#1")].reason == "setup cell value failed: NameError: 1"
    for job in ("one", "two"):
        story.run(job)
        assert story.names == ["a/0#1"]
        assert state(story, "b/0#1") is WorkerState.FAILED
        story.finish().answer()
        assert story.job.outcome == "succeeded"


def test_a_cell_that_fails_on_some_names_them():
    """A cell that fails on some workers is kept; its record names them, and they join no job."""
    story = Story("a:1", "b:1", **LIMITS).answer()
    story.broken.add(("b", "1"))
    story.set_up("value", "1").answer()
    assert story.records("setup-changed") == ["setup cell value is kept; it failed on b/0#1"]
    assert story.run().names == ["a/0#1"]


def test_a_cell_that_is_mended_brings_its_workers_back():
    """Workers with a failed cell run its new text, then the cells that they have missed."""
    story = Story("a:1", "b:1", **LIMITS).answer()
    story.broken.add(("b", "1"))
    story.set_up("value", "1").answer().set_up("next", "2").answer()
    assert ran(story, "b/0#1") == []
    story.set_up("value", "one").answer()
    assert ran(story, "b/0#1") == ["one", "2"]
    assert story.run().names == ["a/0#1", "b/0#1"]


def test_a_cell_that_is_cleared_brings_its_workers_back():
    """Workers with a failed cell are ready again when that cell is cleared."""
    story = Story("a:1", "b:1", **LIMITS).answer()
    story.broken.add(("b", "1"))
    story.set_up("value", "1").answer().set_up("next", "2").answer()
    story.send(ev.SetupCleared("value"))
    story.answer()
    assert ran(story, "b/0#1") == ["2"]
    assert story.run().names == ["a/0#1", "b/0#1"]


def test_a_cell_that_fails_after_it_was_cleared_excludes_no_worker():
    """A cell fails on a newcomer after it was cleared: the newcomer is ready."""
    story = Story("a:1", **LIMITS).answer()
    story.set_up("value", "1").answer()
    story.broken.add(("b", "1"))
    story.add("b:1").hear(ev.AgentReady).hear(ev.WorkerRegistered)
    story.send(ev.SetupCleared("value"))
    story.answer()
    assert state(story, "b/0#1") is WorkerState.READY


def test_a_worker_that_is_restarted_is_set_up_again():
    """A restarted worker runs the failed cell again."""
    story = Story("a:1", "b:1", **LIMITS).answer()
    story.broken.add(("b", "1"))
    story.set_up("value", "1").answer()
    story.broken.clear()
    story.send(ev.RestartRequested(wid("b/0#1"), "a test"))
    story.answer()
    assert ran(story, "b/0#2") == ["1"]
    assert story.run().names == ["a/0#1", "b/0#2"]


# ---- cells that do not end, and drivers that die ----


def test_a_cell_that_hangs_on_one_worker_blocks_no_other():
    """Other workers train while a cell hangs on one, which is killed at its deadline and set up again."""
    story = Story("a:1", "b:1", **LIMITS).answer()
    story.silent.add(wid("b/0#1"))
    story.set_up("value", "1").answer()
    assert state(story, "a/0#1") is WorkerState.READY
    story.run()
    assert story.names == ["a/0#1"]
    story.wait(600.0)
    assert story.records("worker-lost") == ["b/0#1 had not ended a setup cell after 600 s and was killed"]
    assert kept(story) == [("value", "1")]
    story.quiet(2.0)
    assert ran(story, "b/0#2") == ["1"]
    assert story.names == ["a/0#1", "b/0#2"]


def test_a_cell_that_began_later_has_its_own_deadline():
    """Of two workers whose cells hang, the one that began five minutes later is killed five minutes later."""
    story = Story("a:1", **LIMITS).answer()
    story.set_up("value", "1").answer()
    for host in "bc":
        story.add(f"{host}:1").hear(ev.AgentReady).hear(ev.WorkerRegistered)
        story.silent.add(wid(f"{host}/0#1"))
        story.wait(300.0)
    assert story.records("worker-lost") == ["b/0#1 had not ended a setup cell after 600 s and was killed"]
    story.wait(300.0)
    assert "c/0#1 had not ended a setup cell after 600 s and was killed" in story.records("worker-lost")


def test_a_worker_that_dies_while_it_tries_a_cell():
    """A worker is lost during a trial: the other workers decide whether the cell is kept."""
    story = Story("a:1", "b:1", **LIMITS).answer()
    story.set_up("value", "1").kill("b/0#1").answer()
    assert kept(story) == [("value", "1")]
    assert ran(story, "b/0#2") == ["1"]


def test_a_new_driver_knows_the_cells_and_which_workers_have_run_them():
    """Under a new driver each worker runs exactly the cells that it has not run."""
    story = Story("a:1", "b:1", **LIMITS).answer()
    story.set_up("value", "1").answer()
    story.add("c:1").hear(ev.AgentReady).hear(ev.WorkerRegistered)
    Away(story).new_driver().answer()
    assert kept(story) == [("value", "1")]
    assert ran(story, "a/0#1") == ran(story, "b/0#1") == ["1"]
    assert ran(story, "c/0#1")[-1] == "1"
    story.add("d:1").answer()
    assert ran(story, "d/0#1") == ["1"]
    assert story.run().names == ["a/0#1", "b/0#1", "c/0#1", "d/0#1"]


def test_a_new_driver_forgets_a_trial():
    """A new driver drops a cell on trial, as its client is lost, and the workers are ready."""
    story = Story("a:1", **LIMITS).answer()
    story.set_up("value", "1")
    Away(story).new_driver().answer()
    assert kept(story) == []
    assert story.run().names == ["a/0#1"]


def test_a_cell_that_has_failed_is_not_run_again_because_another_worker_is_busy():
    """A worker still leaves its program: the other worker, on which the cell failed, does not run it again."""
    story = Story("a:1", "b:1", "c:1", **LIMITS).run()
    story.silent.add(wid("b/0#1"))
    story.stop_job().answer()
    story.broken.add(("c", "one"))
    story.set_up("first", "one").answer(limit=20)
    assert [command.worker for command in story.commands(cmd.RunSetup)] == [wid("a/0#1"), wid("c/0#1")]
    assert state(story, "c/0#1") is WorkerState.FAILED


@pytest.mark.parametrize("clears", [False, True])
def test_a_worker_that_was_asked_to_end_runs_no_cell(clears):
    """A worker that was asked to end runs neither a new text of a failed cell nor any other cell."""
    story = Story("a:1", "b:1", **LIMITS).answer()
    story.broken.add(("b", "one"))
    story.set_up("first", "one").answer().remove("b")
    mark = story.mark()
    if clears:
        story.send(ev.SetupCleared("first"))
    else:
        story.set_up("first", "two")
    assert wid("b/0#1") not in [command.worker for command in story.commands(cmd.RunSetup, mark)]
    assert state(story, "b/0#1") is WorkerState.STOPPED


def test_pushed_values_replace_older_ones_of_the_same_names():
    """A new worker gets each value once, the newest one last, and in the place in which setup cells need it."""
    story = Story("a:1").answer()
    for change in (
        lambda: story.push("x"),
        lambda: story.set_up("uses x", "print(x)"),
        lambda: story.push("x"),
        lambda: story.push("x", "y"),
        lambda: story.push("y"),
        lambda: story.push("z"),
    ):
        change()
        story.answer()
    assert [cell.source for cell in story.cluster.setup] == ["x,y 4", "print(x)", "y 5", "z 6"]
    story.push("x", "y").answer()
    assert [cell.source for cell in story.cluster.setup] == ["x,y 7", "print(x)", "z 6"]
    story.push("y").answer().push("x", "y", "z").answer()
    assert [cell.source for cell in story.cluster.setup] == ["x,y,z 9", "print(x)"]
    story.push("y").answer().push("x").answer().push("y", "w").answer().push("x", "y").answer()
    assert [cell.source for cell in story.cluster.setup] == ["x,y,z 9", "print(x)", "y,w 12", "x,y 13"]
    story.add("b:1").answer()
    assert story.ran[wid("b/0#1")] == [cell.source for cell in story.cluster.setup]


def test_values_that_no_worker_can_take_are_not_kept():
    """The values from before stay for later workers."""
    story = Story("a:1").answer()
    story.push("x").answer()
    story.broken.add(("a", "x 2"))
    story.push("x").answer()
    assert [cell.source for cell in story.cluster.setup] == ["x 1"]


def test_versions_that_were_replaced_are_forgotten():
    """A client pushes a value again and again, for days: the record of a worker, and the driver snapshot, do not grow."""
    story = Story("a:1", min=1).answer().set_up("model", "import torch")
    for _ in range(20):
        story.answer().push("x")
    story.answer()
    assert len(story.cluster.workers[wid("a/0#1")].ran) == 3  # with the values that the newest ones have just replaced
    assert len(story.cluster.setup) == 2


def test_a_worker_on_which_a_cell_failed_is_not_one_of_those_that_max_keeps():
    """max is lowered while a cell has failed on one of four workers: the three others stay, and train."""
    story = Story("a:4", **LIMITS, max=4)
    story.broken.add(("a/3#1", "import apex"))
    story.answer().set_up("apex", "import apex").answer().scale(1, 3).run()
    assert story.names == ["a/0#1", "a/1#1", "a/2#1"]
