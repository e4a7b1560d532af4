"""How long a rank works for itself in a step, as another thread samples it."""

import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from nbelastic.worker import step_times
from nbelastic.worker.step_times import FEWEST, WINDOW, StepTimes


@pytest.fixture
def times(monkeypatch):
    """Samples of a main thread that is inside `frames`, the innermost first, and sleeps or computes (S or R)."""
    made = StepTimes()
    made.now = 100.0
    made.take(made.now, 1, 0)

    def sample(*files, count=FEWEST, state="R"):
        frame = None
        for file in reversed(files):
            code = SimpleNamespace(co_filename=file, co_name="load")
            frame = SimpleNamespace(f_code=code, f_lineno=88, f_back=frame)
        monkeypatch.setattr(step_times.sys, "_current_frames", lambda: {threading.main_thread().ident: frame})
        monkeypatch.setattr(step_times, "read_stat", lambda _: (state, 0))
        for _ in range(count):
            made.sample()
        return made

    made.at = sample
    return made


TORCH = "/venv/lib/python3.11/site-packages/torch"
COLLECTIVE = f"{TORCH}/distributed/distributed_c10d.py"


def test_time_in_collectives_is_not_the_rank_s_own(times):
    """A quarter of the samples is the rank's own time: a quarter of each step."""
    times.at("/home/me/train.py", count=20)
    times.at(COLLECTIVE, "/home/me/train.py", count=60)
    found = times.take(100.0 + WINDOW, 1, 50)
    assert (found.step, found.own, found.place) == (100.0, 25.0, "train.py:88 in load")


@pytest.mark.parametrize(("file", "own"), [("/home/me/nbelastic/train.py", 100.0), (step_times.__file__, 0.0)])
def test_a_program_in_a_folder_of_our_name_works_for_itself(times, file, own):
    """As in a checkout of this project. In our own files, the rank waits for others."""
    times.at(file)
    assert times.take(100.0 + WINDOW, 1, 50).own == own


@pytest.mark.parametrize(("state", "own"), [("S", 0.0), ("R", 100.0)])
def test_a_backward_pass_waits_while_it_sleeps(times, state, own):
    """It computes gradients and waits for their sums in one call: only the state of the thread differs."""
    times.at(f"{TORCH}/autograd/graph.py", "/home/me/train.py", state=state)
    assert times.take(100.0 + WINDOW, 1, 50).own == own


def test_a_data_loader_is_named(times):
    """Both while it waits for its processes, and while it runs the user's dataset."""
    loader = f"{TORCH}/utils/data/dataloader.py"
    for files in ((queue.__file__, loader, "/home/me/train.py"), ("/home/me/train.py", loader)):
        times.at(*files, count=100)
    assert times.take(100.0 + WINDOW, 1, 50).place == "its data loader, train.py:88 in load"


def test_a_report_is_of_one_generation_and_of_enough_samples(times):
    """A change of the world is in no report, nor is a time without a commit."""
    times.at("/home/me/train.py")
    assert times.take(100.0 + WINDOW / 2, 1, 50) is None
    assert times.take(100.0 + WINDOW, 1, 0) is None
    assert times.take(100.0 + WINDOW, 2, 3) is None
    assert times.take(100.0 + 2 * WINDOW, 2, 53) is None
    times.at("/home/me/train.py")
    assert times.take(100.0 + 2 * WINDOW, 2, 53).generation == 2


def test_a_sample_costs_little():
    """20 per second take less than 0.3 % of a core: the fastest of many is far below 150 microseconds."""
    made, took = StepTimes(), []
    torch.ones(1)
    for _ in range(300):
        begun = time.perf_counter()
        made.sample()
        took.append(time.perf_counter() - begun)
    assert min(took) < 150e-6
