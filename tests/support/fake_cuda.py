"""A GPU that records what is asked of it: `Tensor`s that say that they are on it, and streams with a name."""

from __future__ import annotations

import contextlib

import torch

GPU = torch.device("cuda", 0)


class OnGpu(torch.Tensor):
    """A CPU tensor that says that it is on the GPU, and so do tensors that are made of it."""

    @property
    def is_cuda(self):
        return True

    @property
    def device(self):
        return GPU


class FakeCuda:
    """`calls`: in order, the copies (stream, from, to, number of tensors) and what streams wait for."""

    def __init__(self, monkeypatch):
        self.calls = []
        self.pinned = []  # bytes of each block
        self._stream = "main"
        self._empty, self._copy = torch.empty, torch._foreach_copy_
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch, "_foreach_copy_", self.copy)
        monkeypatch.setattr(
            torch._C, "_host_emptyCache", lambda: self.calls.append("host cache emptied"), raising=False
        )
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream(self, "side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: FakeStream(self, self._stream))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.calls.append("synchronize"))

    def empty(self, *shape, device=None, pin_memory=False, **options):
        made = self._empty(*shape, **options)
        if pin_memory:
            self.pinned.append(made.nbytes)
        return made.as_subclass(OnGpu) if device is not None and torch.device(device).type == "cuda" else made

    def copy(self, targets, sources, non_blocking=False):
        if non_blocking:
            self.calls.append((self._stream, sources[0].device.type, targets[0].device.type, len(targets)))
        plain = [[one.as_subclass(torch.Tensor) for one in many] for many in (targets, sources)]
        self._copy(*plain)

    @contextlib.contextmanager
    def on(self, stream):
        self._stream, before = stream.name, self._stream
        yield
        self._stream = before

    def take(self):
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


class FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name, self.device = cuda, name, GPU

    def wait_stream(self, other):
        self.cuda.calls.append(f"{self.name} waits for {other.name}")
