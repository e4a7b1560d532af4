"""Cells in the middle of a training, and pauses. `Training.finish` checks that no step was lost or made twice."""

from __future__ import annotations

import json
import os
import signal

import pytest

from nbelastic.errors import UsageError, WaitTimeoutError
from tests.process import sharded_training
from tests.process.training import Training
from tests.support.waiting import until


def run(training, source, **options):
    return training.cluster.execute(source, at_commit=True, **options)


def values(outputs):
    """The last values of a cell by rank, as text."""
    assert not [one.error for one in outputs if one.error], outputs
    return [json.loads(one.displays[-1])[0]["text/plain"] for one in outputs]


@pytest.fixture
def breaks():
    """How often the world breaks in a test."""
    return 0


@pytest.fixture
def training(shared_training, breaks):
    """Three ranks that train. At the end all steps are checked, and how often the world has broken."""
    yield shared_training
    shared_training.finish()
    assert len(shared_training.events("world-broken")) == breaks


def test_a_cell_sees_the_program_between_two_steps(training):
    """It has the local variables, the state and the ranks of all at one commit; its output, values and displays come back."""
    outputs = run(training, "import sys\nprint(nbe.rank()); print(loss.item() > 0, file=sys.stderr)\nstate.step")
    assert [(one.rank, one.stdout, one.stderr) for one in outputs] == [(r, f"{r}\n", "True\n") for r in range(3)]
    assert len({*values(outputs)}) == 1
    shown = run(training, "from IPython.display import HTML, display\ndisplay(HTML('<b>1</b>'))\nmodel[0]", ranks=[1])
    assert [json.loads(one)[0].get("text/html") for one in shown[0].displays] == ["<b>1</b>", None]
    assert "Linear" in shown[0].displays[-1]


def test_output_arrives_while_the_cell_runs_at_a_commit(training, tmp_path):
    """With its rank, lines without an end too. The cell waits for a file that its own output has the client write."""
    go, seen = tmp_path / "go", []

    def on_output(pieces):
        seen.extend(pieces)
        texts = {rank: "".join(one.text for one in seen if one.rank == rank and one.kind == "err") for rank in (0, 2)}
        if [*texts.values()] == ["begun, "] * 2:
            go.touch()

    wait = f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    source = f"import os, sys, time\nprint('begun, ', end='', file=sys.stderr)\n{wait}\nloss = 7\nloss"
    outputs = run(training, source, ranks=[0, 2], on_output=on_output)
    assert values(outputs) == ["7", "7"]
    for one in outputs:
        mine = [piece for piece in seen if piece.rank == one.rank]
        assert {piece.worker for piece in mine} == {one.worker}
        assert tuple(piece.text for piece in mine if piece.kind == "display") == one.displays
        assert "".join(piece.text for piece in mine if piece.kind == "err") == one.stderr
        assert "loss is a local variable of" in one.stderr


def test_ctrl_c_interrupts_a_cell_at_a_commit(training):
    """The training goes on at once. What the cell has printed before was shown."""
    seen = []

    def on_output(pieces):
        seen.extend(piece.text for piece in pieces)
        if seen.count("begun\n") == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(training, "import time\nprint('begun')\ntime.sleep(600)", limit=1000.0, on_output=on_output)
    assert len(values(run(training, "state.step", timeout=10.0))) == 3


@pytest.mark.parametrize("breaks", [1])
def test_a_cell_that_changes_the_state_on_all_ranks_is_trained_on_with(training):
    """A later loss does not bring the old values back: they belong to the commit."""
    run(training, "with __import__('torch').no_grad(): model[0].weight.zero_().add_(1000.0)")
    training.signal_worker(training.wait_for_world(3)[2])
    training.wait_for_world(3)
    assert all(float(value) > 900 for value in values(run(training, "model[0].weight.mean().item()")))


@pytest.mark.parametrize("breaks", [1])
@pytest.mark.parametrize("change", ["model[0].weight.data.zero_()", "model[0].reset_parameters()"])
def test_a_state_that_a_cell_has_changed_on_one_rank_is_received_again(training, change):
    """Weights never differ between ranks, and small values that are set on some ranks only keep their value."""
    before = training.cluster.status().generation
    (output,) = run(training, f"{change}\nstate.step = -5", ranks=[1])
    assert "tensors of the state on some ranks only" in output.stderr
    assert "state.step was set on some ranks only" in output.stderr
    until(lambda: training.cluster.status().generation > before, what="the world to break")
    assert len({*values(run(training, "model[0].weight.sum().item(), state.step"))}) == 1


ON_ONE = "if nbe.rank() == 1: "
EACH_ITS_OWN = (
    "model[0].reset_parameters()",
    "model[0].weight.data.normal_()",
    f"{ON_ONE}model[0].weight.data.zero_()",
    f"{ON_ONE}optimizer.param_groups[0]['lr'] = 0.5",
)


@pytest.mark.parametrize("breaks", [1])
@pytest.mark.parametrize("change", EACH_ITS_OWN)
def test_a_cell_on_all_ranks_that_changes_the_state_differently_leaves_no_difference(training, change):
    """Each rank draws its own random numbers, and a cell may ask for its rank."""
    before = training.cluster.status().generation
    run(training, change)
    until(lambda: training.cluster.status().generation > before, what="the world to break")
    sums = "[(p.sum().item(), optimizer.param_groups[0]['lr']) for p in model.parameters()]"
    assert len({*values(run(training, sums))}) == 1


def test_all_ranks_keep_the_values_of_the_state_that_a_cell_sets_on_some(training):
    """Also a learning rate. A rank that trained with its own would have other weights from then on."""
    (output,) = run(training, "optimizer.param_groups[0]['lr'] = 0.5", ranks=[1])
    assert output.stderr == "nbelastic: state.optimizer was set on some ranks only, so it keeps its value.\n"
    assert values(run(training, "optimizer.param_groups[0]['lr']")) == ["0.01"] * 3
    run(training, "optimizer.param_groups[0]['lr'] = 0.5")
    assert values(run(training, "optimizer.param_groups[0]['lr']")) == ["0.5"] * 3


def test_a_value_that_the_state_cannot_keep_ends_nothing(training):
    """The state keeps the value that it had, and stderr says why."""
    outputs = run(training, "state.step = loss * 1")
    assert all("keeps its values: step holds a tensor that autograd still needs" in one.stderr for one in outputs)


def test_an_error_of_a_cell_ends_nothing(training):
    """It is shown with its line. A local name that the cell replaces keeps its value, which is said."""
    outputs = run(training, "loss = None\nraise ValueError('mine')")
    assert all("----> 2 raise ValueError('mine')" in one.error for one in outputs)
    assert all("loss is a local variable of loop()" in one.stderr for one in outputs)
    assert all("cannot commit" in one.error for one in run(training, "state.commit()"))


def test_a_cell_is_interrupted_at_its_limit_or_when_nobody_waits_for_it(training):
    """The training goes on at once."""
    outputs = run(training, "import time\nwhile True: time.sleep(60)", limit=0.2)
    assert all("may run for 0.2 s at a commit" in one.error for one in outputs)
    with pytest.raises(WaitTimeoutError):
        run(training, "while True: pass", limit=1000.0, timeout=0.5)
    assert len(values(run(training, "state.step", timeout=10.0))) == 3


def test_a_time_limit_ends_a_cell_and_never_the_program(training):
    """It does not count for what nbelastic does after the cell, and a signal that comes late has no effect."""
    outputs = run(training, "import sys, time\nsys.stdout.flush = lambda: time.sleep(0.4)", limit=0.2)
    assert [one.error for one in outputs] == [None] * 3
    for worker in training.cluster.workers:
        os.kill(worker.pid, signal.SIGALRM)
    assert len(values(run(training, "state.step"))) == 3


def test_a_cell_keeps_no_variable_of_the_program_alive(training, tmp_path):
    """Else a batch and the tensors of its step would fill the GPU's memory for the rest of the training."""
    watch = f"while seen() is not None: nap(0.01)\n    open('{tmp_path}/gone-%d' % nbe_rank, 'w')"
    run(
        training,
        f"import threading, weakref\nfrom time import sleep as nap\nseen, nbe_rank = weakref.ref(loss), nbe.rank()\ndef watch():\n    {watch}\n"
        "threading.Thread(target=watch, daemon=True).start()",
    )
    until(lambda: len([*tmp_path.glob("gone-*")]) == 3, what="the loss of that step to be freed")


def test_a_global_of_the_program_that_a_cell_sets_is_set_in_the_program(training):
    """A value of the state is set by `state.name`, which is said."""
    outputs = run(training, "PAUSE = 0.002\nstep = 7")
    assert all(
        one.stderr == "nbelastic: step is a value of the state, which keeps it: set state.step.\n" for one in outputs
    )
    assert values(run(training, "any_rank_finds.__globals__['PAUSE']")) == ["0.002"] * 3


def test_an_object_that_cannot_be_shown_is_an_error_of_the_cell(training):
    """Its `__repr__` has raised."""
    outputs = run(training, "class Odd:\n    def __repr__(self): raise ValueError('odd')\nOdd()")
    assert all("ValueError: odd" in one.error for one in outputs)


def test_steps_after_a_cell_that_has_changed_the_state_are_as_any_others(training):
    """The change belongs to the commit, and not to the steps: else each later commit would copy all tensors."""
    training.cluster.pause()
    run(training, "with __import__('torch').no_grad(): model[0].weight.mul_(0.5)")
    training.cluster.step(2)
    assert values(run(training, "state._steps.copying")) == ["''"] * 3
    training.cluster.resume()


@pytest.mark.parametrize("breaks", [1])
def test_collectives_of_a_cell_need_all_ranks(training):
    """With all ranks they work. One that the others cannot answer costs the cell's limit, and no step."""
    source = "import torch\nfound = torch.ones(2)\ntorch.distributed.all_reduce(found)\nfound.tolist()"
    assert values(run(training, source)) == ["[3.0, 3.0]"] * 3
    (output,) = run(training, source, ranks=[2], limit=0.2)
    assert "did not end" in output.error
    training.wait_for_world(3)


@pytest.mark.parametrize("breaks", [1])
def test_a_rank_that_dies_in_a_cell_ends_the_cell(training):
    """The others' results are there, and the training recovers as from any loss."""
    source = "import os, signal\nif nbe.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\nstate.step"
    outputs = run(training, source)
    assert ["did not end" in (one.error or "") for one in outputs][1]
    training.wait_for_world(3)


@pytest.mark.parametrize("breaks", [1])
def test_a_pause_lasts_until_it_is_ended(training):
    """While it lasts no step is made, cells run, and a lost rank is replaced; then N steps are made, or all."""
    cluster = training.cluster
    cluster.pause()
    assert (cluster.status().phase, cluster.status().world_size) == ("paused", 3)
    first = values(run(training, "state.step"))
    assert values(run(training, "state.step")) == first
    cluster.step(3)
    assert [int(step) for step in values(run(training, "state.step"))] == [int(step) + 3 for step in first]
    before = cluster.status().generation
    os.kill(next(w.pid for w in cluster.workers if w.rank == 2), signal.SIGKILL)
    until(lambda: cluster.status().generation > before and cluster.status().phase == "paused")
    cluster.resume()
    cluster.scale(max=2)
    cluster.wait(2)
    cluster.scale(max=3)
    training.wait_for_world(3)


def test_without_a_job_there_is_no_commit(make):
    """Each request says so in one line, before anything is sent to a worker."""
    cluster = make("localhost:1")
    for request in (cluster.pause, cluster.resume, cluster.step, lambda: cluster.execute("1", at_commit=True)):
        with pytest.raises(UsageError, match="no job is running, so there is no commit to stop at"):
            request()


def test_a_rank_that_is_not_there_is_named(training):
    """So are ranks and limits that are none."""
    with pytest.raises(UsageError, match="there is no such rank: the world has 3"):
        run(training, "1", ranks=[7])
    with pytest.raises(UsageError, match="ranks=-1: ranks count from 0"):
        run(training, "1", ranks=[-1])
    with pytest.raises(UsageError, match="limit=0: more than 0 s"):
        run(training, "1", limit=0)


@pytest.mark.soak(share=0.2)
def test_a_sharded_state_can_be_changed_by_a_cell(make, tmp_path):
    """The change belongs to the next commit: after a loss all ranks return to the same values."""
    training = Training(make("localhost:3", min=1), tmp_path / "steps", sharded_training.train)
    workers = training.wait_for_world(3)
    run(training, "import torch\nwith torch.no_grad():\n    for p in model.parameters(): p.zero_()")
    training.signal_worker(workers[1])
    training.wait_for_world(3)
    sums = "[p.full_tensor().abs().max().item() for p in model.parameters()]"
    assert len({*values(run(training, sums))}) == 1
    (training.folder / "finish").touch()
    assert len({result["step"] for result in training.job.result(timeout=30)}) == 1
