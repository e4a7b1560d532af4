"""`breakpoint()` in a program, and the debugger in a client. `Training.finish` checks that no step was lost."""

from __future__ import annotations

import builtins
import contextlib
import os
import signal

import pytest

from nbelastic.errors import UsageError, WaitTimeoutError
from tests.process import programs
from tests.support.waiting import until


def train_and_stop(folder: str) -> dict[str, object]:
    """Train; rank 1 comes to a breakpoint in the first step, and whenever it finds a file `again`."""
    import pathlib

    import torch

    import nbelastic as nbe

    log, again = programs.Log(folder), pathlib.Path(folder) / "again"
    with contextlib.suppress(FileExistsError):  # another rank, or an earlier worker
        again.with_name("began").touch(exist_ok=False)
        again.touch()
    model, optimizer = programs.network()
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)

    @nbe.elastic
    def loop(state):
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        while not programs.any_rank_finds(folder, "finish"):
            ddp(torch.randn(8, 16)).sum().backward()
            optimizer.step()
            state.step += 1
            if nbe.rank() == 1 and again.exists():
                again.unlink()
                breakpoint()  # noqa: T100  (it is what this is about)
            log(step=state.step, generation=programs.generation(), sum=programs.checksum(model))
            state.commit()
        return {"step": state.step, "sum": programs.checksum(model)}

    return loop(state)


@pytest.fixture
def training(trains):
    found = trains("localhost:3", train_and_stop, min=3, stall=1.0)
    yield found
    assert len(found.finish()) == 3


@pytest.fixture
def enter(monkeypatch):
    """The user enters these lines. Returns what was shown in front of each."""

    def give(*lines):
        prompts, left = [], iter(lines)

        def ask(prompt=""):
            prompts.append(prompt)
            line = next(left)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", ask)
        return prompts

    return give


@pytest.mark.soak(share=0.2)
def test_the_debugger_opens_in_the_programs_frame_while_the_others_wait(training, enter, capsys):
    """It shows lines and values; after `c` all train on. In the meantime no rank is replaced, though `stall` is short."""
    cluster = training.cluster
    with pytest.raises(WaitTimeoutError, match="rank 2 to come to a breakpoint"):
        cluster.debug(rank=2, timeout=1.5)
    (rank_1,) = [w for w in cluster.workers if w.rank == 1]
    assert "waits at a breakpoint in test_breakpoints.py" in rank_1.reason
    prompts = enter("p nbe.rank(), state.step", "n", "w", "c")
    cluster.debug()
    shown = capsys.readouterr().out
    assert prompts == ["(Pdb) "] * 4
    assert "(1, 1)" in shown
    assert "-> log(step=state.step" in shown
    assert "nbelastic/programs" not in shown
    assert {w.pid for w in training.wait_for_world(3)} == {w.pid for w in cluster.workers}


def test_a_user_who_leaves_may_come_back_and_two_do_not_mix(training, enter):
    """Ctrl-C leaves the rank waiting; `q` lets it go on. A line for a prompt that was answered is refused."""
    enter(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        training.cluster.debug()
    enter("q")
    training.cluster.debug(rank=1)
    from nbelastic.protocol.requests import Debug

    with pytest.raises(UsageError, match="does not wait for this line any more"):
        training.cluster._link.ask(Debug(None, 1, "c"))
    training.wait_for_world(3)


def test_a_loss_takes_the_rank_out_of_the_debugger(training, enter):
    """It returns to the last commit with the other survivors, and may come to a breakpoint again."""
    cluster = training.cluster
    until(lambda: any(event.kind == "breakpoint" for event in cluster.events), what="the breakpoint")
    os.kill(next(w.pid for w in cluster.workers if w.rank == 2), signal.SIGKILL)
    training.wait_for_world(3)
    assert not any("breakpoint" in w.reason for w in cluster.workers)
    (training.folder / "again").touch()
    enter("c")
    cluster.debug()
    training.wait_for_world(3)


def test_without_a_job_nothing_waits(make):
    """One line says so."""
    with pytest.raises(UsageError, match="no job is running, so no program waits"):
        make("localhost:1", min=1).debug()
