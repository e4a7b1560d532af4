"""Copies of tensors on a GPU: where they are, which stream makes them, and when pinned memory is given back."""

from types import SimpleNamespace

import pytest
import torch

from nbelastic import TorchState
from nbelastic.state import tensor_snapshot
from nbelastic.state.checkpoints import CopyMemory
from nbelastic.state.tensor_snapshot import TensorSnapshot
from tests.state.training import network, step
from tests.support.fake_cuda import GPU, FakeCuda, OnGpu

LARGE = 1 << 18  # elements


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def on_gpu(*shape):
    return torch.zeros(*shape).as_subclass(OnGpu)


def change(tensor):
    tensor.as_subclass(torch.Tensor).add_(1)


def test_small_tensors_are_copied_on_the_gpu_with_one_launch_per_type(cuda):
    """BatchNorm's statistics of 161 layers are two copies, not 161; a tensor of 1 MiB that has not changed is none."""
    small = [on_gpu(64) for _ in range(161)] + [on_gpu(1).to(torch.int64).as_subclass(OnGpu) for _ in range(53)]
    mask = on_gpu(LARGE)
    snapshot = TensorSnapshot(keep=True)
    snapshot.commit([*small, mask])
    assert cuda.take() == [("main", "cuda", "cuda", 161), ("main", "cuda", "cuda", 53), ("main", "cuda", "cpu", 1)]
    snapshot.commit([*small, mask], counted=True)
    assert cuda.take() == [("main", "cuda", "cuda", 161), ("main", "cuda", "cuda", 53)]
    assert cuda.pinned == []


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu])
def test_types_without_a_kernel_for_many_tensors_are_copied_as_integers(cuda, dtype):
    """CUDA copies many tensors at once only of the types that `_foreach_copy_` knows there; others raise."""
    before = torch.tensor([[1, 2, 3], [7, 9, 1]], dtype=torch.uint8).to(dtype).t()
    tensor, raised = before.clone(), []
    copy = torch._foreach_copy_

    def strict(targets, sources, **options):
        raised.extend(one.dtype for one in (*targets, *sources) if one.dtype is dtype)
        copy(targets, sources, **options)

    torch._foreach_copy_ = strict  # the fixture restores torch's own
    snapshot = TensorSnapshot(keep=True)
    snapshot.commit([tensor.as_subclass(OnGpu)])
    version = tensor._version
    tensor.zero_()
    snapshot.restore()
    assert not raised
    assert torch.equal(tensor, before)
    assert tensor._version > version + 1


def test_the_second_copy_of_a_large_tensor_is_pinned_and_given_back(cuda, monkeypatch):
    """One copy takes less time than pinning its memory. When nothing is copied any more, the system gets the memory back."""
    monkeypatch.setattr(tensor_snapshot, "BLOCK", 3 * LARGE * 4)
    large = [on_gpu(LARGE) for _ in range(4)]
    snapshot = TensorSnapshot(keep=True)
    snapshot.commit(large)
    assert cuda.pinned == []
    for tensor in large:
        change(tensor)
    snapshot.commit(large)
    assert cuda.pinned == [3 * LARGE * 4, LARGE * 4]
    for tensor in large:
        change(tensor)
    snapshot.restore()
    assert all(tensor.as_subclass(torch.Tensor).eq(1).all() for tensor in large)
    cuda.take()
    snapshot.commit(large)
    assert len(cuda.pinned) == 2
    snapshot.keep = False
    snapshot.commit([])
    assert cuda.take()[-1] == "host cache emptied"


def test_after_a_job_a_state_whose_copies_were_freed_does_not_count_as_restored(cuda, begun):
    """The program has failed in a fused step, which nothing has counted: the weights are not those of the last commit."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    pinned = on_gpu(LARGE)
    for _ in range(2):
        change(pinned)
        state._tensors.commit([pinned])
    state._steps._before_step(optimizer)
    state.end()
    state.undo()
    assert not state.clean


def test_in_the_background_the_next_change_waits(cuda):
    """The copy follows what the main stream has begun, and the main stream waits for it before the tensors change."""
    tensor = on_gpu(LARGE)
    snapshot = TensorSnapshot(keep=True)
    snapshot.in_background = True
    snapshot.commit([tensor])
    snapshot.wait_for_copies()
    assert cuda.take() == ["side waits for main", ("side", "cuda", "cpu", 1), "main waits for side"]
    snapshot.restore()
    assert cuda.take() == ["synchronize", ("main", "cpu", "cuda", 1)]


def test_a_state_is_not_copied_when_it_is_made(monkeypatch):
    """A model on a GPU is first copied when a world is formed."""
    seen = []
    monkeypatch.setattr(TorchState, "_record_commit", lambda state: seen.append(state._tensors.keep))
    monkeypatch.setattr("nbelastic.state.contents.Contents.device", lambda _: GPU)
    TorchState(model=torch.nn.Linear(2, 2))
    assert seen == [False]


def test_copies_go_on_in_the_background_only_while_a_hook_precedes_each_change(group, begun):
    """Not before one interval has shown it, not for an optimizer without hooks, and never again after a change by hand."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))

    def commit():
        for _ in range(2):
            step(model, optimizer)
        state.commit()
        return state._tensors.in_background

    assert [commit() for _ in range(3)] == [False, True, True]
    with torch.no_grad():
        model.bias.add_(1)
    assert [commit() for _ in range(3)] == [False, False, False]


def test_a_change_without_a_hook_is_never_copied_in_the_background(begun):
    """No hook announces when it changes again."""
    model = torch.nn.Linear(2, 2)
    state = begun(TorchState(model=model))
    for _ in range(3):
        with torch.no_grad():
            model.weight.add_(1)
        state.commit()
        assert state._tensors.keep
        assert not state._tensors.in_background


def test_a_checkpoint_is_written_when_the_gpu_has_copied_it(cuda, monkeypatch):
    """The copy is made in the order of the training's stream, and an event after it says when it may be read."""

    class Event:
        def record(self, stream):
            cuda.calls.append(f"event on {stream.name}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    state = SimpleNamespace(commits=3, _live=lambda: {"weights": on_gpu(4), "more": on_gpu(2)})
    _, events = CopyMemory().copy(state)
    assert cuda.take()[-1] == "event on main"
    assert [type(event) for event in events] == [Event]
