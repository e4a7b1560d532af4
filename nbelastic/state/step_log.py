"""Numbers per step for TensorBoard and the like, none missing or double when the rank that writes them is lost."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbelastic.errors import StateError, UsageError
from nbelastic.state.checks import only_numbers
from nbelastic.state.sampler import positive_number, whole_number
from nbelastic.state.step_writers import MLflow, StepWriter, TensorBoard, WandB
from nbelastic.system.argument_types import user_path


class StepLog:
    """Writes numbers per step from rank 0: `log(loss=loss.item())` before `commit()`, on all ranks.

    Give it to a state: `nbe.TorchState(model=model, log=nbe.StepLog.tensorboard("runs/one"))`, then call `state.log(…)`.
    Rank 0 writes at commits. Each rank keeps the entries that may not be safe on the disk yet. If rank 0 is lost, the next
    one writes them again, with its own values: `all_reduce` those that all ranks should agree on.

    `open_writer(first_step)` returns a writer, on the rank that writes; the steps before are safe. Rank 0 flushes after
    each `flush_every` calls. Ranks keep twice as many entries, as only a later commit shows them that rank 0 has flushed.
    """

    def __init__(self, open_writer: Callable[[int], StepWriter], *, flush_every: int = 20) -> None:
        if not callable(open_writer):
            raise UsageError(f"give a function that opens a writer, not {open_writer!r}: StepLog.tensorboard(folder).")
        self._open_writer = open_writer
        self._flush_every = positive_number("flush_every", flush_every)
        self.key = secrets.token_hex(8)  # the same on all ranks, as it is part of the state
        self._count = 0  # of all entries so far
        self._committed = 0  # of them at the last commit
        self._flushed = 0  # of them at the last commit at which rank 0 flushed
        self._kept: list[str] = []  # the last entries, as JSON: [step, values]
        self._skipped: set[str] = set()  # names of values that were not numbers
        self._writer: StepWriter | None = None
        self._written = 0  # of all entries: those that the writer has got

    @classmethod
    def tensorboard(cls, folder: str | Path, **options: Any) -> StepLog:
        """Write to TensorBoard's event files in `folder`, which all hosts see. `options` of a SummaryWriter.

        A new job in the same folder hides the steps of the job before.
        """
        return cls(lambda first_step: TensorBoard(user_path(folder), first_step, options))

    @classmethod
    def mlflow(cls, experiment: str, *, run_name: str | None = None, tracking_uri: str | None = None) -> StepLog:
        """Write to one run of an MLflow experiment, also after a resume from a checkpoint."""
        log = cls(lambda _: MLflow(log.key, experiment, run_name, tracking_uri))
        return log

    @classmethod
    def wandb(cls, **options: Any) -> StepLog:
        """Write to one run of Weights & Biases. `options` of `wandb.init`. Its mode `offline` cannot resume a run."""
        log = cls(lambda _: WandB(log.key, options))
        return log

    def __call__(self, step: int | None = None, /, **values: float) -> None:
        """Log these numbers for `step`; by default one more than the last. They are written at the next commit.

        UsageError if `step` is less than the last one.
        """
        last = _step(self._kept[-1]) if self._kept else 0
        number = last + 1 if step is None else whole_number("step", step)
        if number < last:
            raise UsageError(f"step {number} comes after step {last}: steps must not decrease, for all names together.")
        self._count += 1
        self._kept.append(json.dumps([number, only_numbers(values, self._skipped)]))

    def state_dict(self) -> dict[str, Any]:
        """Counts of entries, and those that are kept as text."""
        counts = {"count": self._count, "committed": self._committed, "flushed": self._flushed}
        return {**counts, "kept": "\n".join(self._kept), "key": self.key}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there. StateError if `state` is another object's."""
        try:
            counts = [int(state[name]) for name in ("count", "committed", "flushed")]
            kept, key = state["kept"].splitlines(), str(state["key"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise StateError("this is not a state of a StepLog: give what its state_dict() returned.") from None
        self._count, self._committed, self._flushed = counts
        self._kept, self.key = kept, key
        if self._count < self._written:
            self.close()  # steps that were written are made again

    def committed(self, *, writes: bool) -> None:
        """The entries so far belong to a commit. `writes`: this rank is rank 0. All ranks call it at the same commits."""
        is_due = self._count // self._flush_every > self._committed // self._flush_every
        if writes:
            self._write(flush=is_due)
        else:
            self.close()
        if is_due:
            self._drop(self._flushed)
            self._flushed = self._count
        self._committed = self._count

    def close(self) -> None:
        """Finish the files. The next commit on rank 0 opens them again."""
        writer, self._writer = self._writer, None
        self._written = 0
        if writer is not None:
            writer.close()

    def _write(self, *, flush: bool) -> None:
        """Write the entries that the writer has not got."""
        if not self._kept:
            return
        opened = self._writer is None
        if self._writer is None:
            self._written = self._count - len(self._kept)
            self._writer = self._open_writer(_step(self._kept[0]))
        missing = self._count - self._written
        for text in self._kept[len(self._kept) - missing :]:
            self._writer.write(*json.loads(text))
        self._written = self._count
        if flush or opened:
            self._writer.flush()

    def _drop(self, flushed: int) -> None:
        """Rank 0 has flushed so many entries at an earlier commit, and there was a collective since: forget them."""
        safe = max(0, flushed - (self._count - len(self._kept)))
        while 0 < safe < len(self._kept) and _step(self._kept[safe - 1]) == _step(self._kept[safe]):
            safe -= 1  # a writer replaces whole steps
        del self._kept[:safe]


def _step(text: str) -> int:
    return int(json.loads(text)[0])
