"""Values of the notebook and training states, on a shared cluster whose workers no test ends."""

from __future__ import annotations

import threading

import pytest
import torch

import nbelastic as nbe
from tests.process.programs import notebook_function
from tests.support.processes import run_folder
from tests.support.waiting import until


class Unloadable:
    """Can be pickled, and not unpickled."""

    def __reduce__(self):
        return int, ("no number",)


def test_values_that_cannot_be_pushed(cluster):
    """Each refusal names the value or the reason. The cluster stays as it was."""
    for values, text in (
        ({"lock": threading.Lock(), "fine": 1}, "lock cannot be sent to the workers: TypeError: cannot pickle"),
        ({"two words": 1}, "'two words' is not a valid variable name"),
        ({}, "name the values to push"),
        (
            {"x": Unloadable()},
            r"no worker could take the values: 127.0.0.2/0#1: ValueError: invalid literal .* \(while x arrived\)",
        ),
    ):
        with pytest.raises(nbe.UsageError, match=text):
            cluster.push(values)
    assert cluster.setup_cells == {}
    assert not list(run_folder(cluster).rglob("*.pushed"))


@pytest.mark.parametrize("how", ["stopped", "failed"])
def test_the_state_of_a_training_that_did_not_succeed(cluster, how):
    """The last commit is still there, without what came after it."""

    def program(how):
        import time

        state = nbe.TorchState(model=torch.nn.Linear(2, 2), step=0)

        @nbe.elastic
        def train(state):
            while True:
                state.step += 1
                state.commit()
                if how == "failed" and state.step == 5:
                    torch.distributed.barrier()  # all ranks have this commit
                    state.step = 100
                    raise ValueError("the end")
                time.sleep(0.001)

        train(state)

    job = cluster.run(program, how)
    if how == "stopped":
        until(lambda: (cluster.status().step or 0) > 5)
        job.stop()
    assert isinstance(job.exception(timeout=20), nbe.JobError)
    step = job.state_dict("step")
    assert step == 5 or (how == "stopped" and 5 < step < 1_000_000)


def test_undefined_names_end_a_function_before_it_starts(cluster, tmp_path):
    """All of them are named; nothing of the function has run."""
    program = notebook_function("def program(folder): open(f'{folder}/began', 'w').write(str(config))")
    error = cluster.run(program, str(tmp_path)).exception(timeout=20)
    assert "neither the notebook nor the workers define what the function uses: 'config' in program()" in str(error)
    assert not (tmp_path / "began").exists()
