"""Decides whether a commit has to copy the tensors: watches optimizer steps, collectives and backward passes.

An abort ends only collectives, and tensors change only in `optimizer.step()`. Suppose that no collective runs between the first
step after a commit and the next commit. Then a rank is always at one of the two commits, never in between: the live
tensors are those of its last commit, and copies are not needed. The optimizers' hooks, the group's count of collectives and
autograd's count of changes show whether that holds. If it does not hold, each commit from then on copies the tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from nbelastic.state import optimizers
from nbelastic.state.backward_hooks import BackwardHook
from nbelastic.state.commit_record import CommitRecord
from nbelastic.state.contents import Contents
from nbelastic.state.cuda_graphs import ReplayWatch, refuse_capture
from nbelastic.state.grad_scaler import forget_step
from nbelastic.state.tensor_snapshot import TensorSnapshot
from nbelastic.system.log_line import print_line
from nbelastic.worker.process_group import collectives
from nbelastic.worker.session import Session

SEVERAL = "several steps per commit"
SWAPS = "an optimizer changes tensors in eval() and train()"  # a schedule-free one: else its first evaluation were not undone
EXPOSED = (
    "a collective runs between optimizer.step() and state.commit(): from now on tensors are copied at each commit. "
    "Commit right after the step to save that."
)
OUTSIDE = (
    "{name} changes outside an optimizer's step: from now on tensors are copied at each commit. "
    "Change it between optimizer.step() and state.commit(), or give its optimizer to the state, to save that."
)
KEPT = (
    "the training goes on from commit {commits}, but {what} since, and that could not be undone. "
    "See “When nothing is copied” in the documentation."
)


class StepWatch:
    """`copying` is the reason for copying tensors at each commit; empty while that is not needed."""

    def __init__(self, contents: Contents, tensors: TensorSnapshot) -> None:
        self.copying = ""
        self._contents = contents
        self._tensors = tensors
        self._session: Session | None = None
        self._record: Callable[[], CommitRecord] | None = None
        self._hooks: list[Any] = []
        self._watched: list[torch.optim.Optimizer] = []
        self._replays = ReplayWatch(lambda: contents.names)
        self._steps: Counter[int] = Counter()  # steps begun since the last commit, by the optimizer's id
        self._collectives = 0  # the count of collectives at the first of these steps
        self._accumulating = False  # there was a backward pass since the last step
        self._changed_outside = False  # a tensor has changed outside a step
        self._calm = False  # between two commits that copied, none has

    @property
    def announces_changes(self) -> bool:
        """Whether the hook of a step comes before each change, as far as is known: then copies may go on until the hook.

        It is not known before the tensors of a commit that copied were found unchanged at the next step.
        """
        return self._calm and not self._changed_outside

    @property
    def has_stepped(self) -> bool:
        """Whether a step has begun since the last commit."""
        return bool(self._steps)

    def start(self, session: Session, record: Callable[[], CommitRecord]) -> None:
        """Watch the optimizers until `stop()`. Only one may be started in a process.

        `record()` is that of the last commit: it keeps what an optimizer has before a program loads other values into it.
        """
        self._session, self._record = session, record
        self.copying = ""
        self._changed_outside = self._calm = False
        for optimizer in self._contents.optimizers():
            self.watch(optimizer)
        self._hooks.append(BackwardHook(self._after_backward))
        self._replays.start()
        self.clear_steps()

    def watch(self, value: Any) -> None:
        """If this value is an optimizer, watch it too, until `stop()`. A program may assign one late."""
        is_new = isinstance(value, torch.optim.Optimizer) and all(value is not known for known in self._watched)
        if self._session is None or not is_new:
            return

        def before_load(optimizer: torch.optim.Optimizer, _: object) -> None:
            if not self._steps and self._record is not None:
                self._record().keep_entries(optimizer)

        self._watched.append(value)
        is_accelerated = type(value).__module__.startswith("accelerate.")  # these wrappers all have an eval()
        if hasattr(value.optimizer if is_accelerated else value, "eval"):
            self.copying, self._changed_outside = self.copying or SWAPS, True
        if not optimizers.has_hooks(value):  # the steps of the one in it are seen; other changes are outside a step
            return
        before_step = torch.compiler.disable(self._before_step)  # of a compiled step it runs before each call, too
        self._hooks.append(value.register_step_pre_hook(before_step))
        self._hooks.append(value.register_load_state_dict_pre_hook(before_load))

    def stop(self) -> None:
        """Remove the hooks: they and the model would keep each other in memory."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._watched, self._session, self._record = [], [], None, None
        self._replays.stop()

    def clear_steps(self) -> None:
        self._steps = Counter()

    def clear(self) -> None:
        """A commit was made, or received."""
        self._steps, self._accumulating = Counter(), False
        self._replays.clear()

    def drop_gradients(self) -> None:
        """The next step must use none of these: a step was cut off, or has used them."""
        self._accumulating = False
        for parameter in self._contents.names:
            parameter.grad = None
        for optimizer in self._contents.optimizers():
            forget_step(optimizer)

    def commit_counts(self) -> bool:
        """Called at each commit. False, on all ranks alike: this commit does nothing, as a rank accumulates gradients."""
        if not self._steps:
            return self._counts_without_step()
        if collectives() != self._collectives:
            if self._session is not None:
                self._session.check(self._contents.device())
            self._copy_from_now_on(SEVERAL if max(self._steps.values()) > 1 else EXPOSED)
        elif max(self._steps.values()) > 1:
            self._copy_from_now_on(SEVERAL)
        return True

    def _counts_without_step(self) -> bool:
        self._replays.refuse_changes()
        changed = self._tensors.changed()
        if changed:
            self._copy_because_changed()
        accumulates = self._accumulating and not changed and any(p.grad is not None for p in self._contents.names)
        if self._session is None:
            return not (accumulates and self._contents.grouped > 0)
        if self._contents.grouped and self._session.on_any_rank(accumulates):
            return False
        self._session.finish_gpu_work()
        return True

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The optimizer is about to change its parameters."""
        refuse_capture()
        now = collectives()
        if self._session is not None and (not self._steps or now != self._collectives):
            self._session.check(self._contents.device())
        if not self._steps:
            self._collectives = now
            if self._tensors.changed():
                self._copy_because_changed()
            self._calm = bool(self.copying)
        if self._tensors.keep and id(optimizer) not in self._steps:
            trained = [p for p in optimizers.parameters(optimizer) if p.requires_grad]
            self._tensors.expect_changes([*trained, *optimizers.tensors(optimizer)])  # a fused one's are not counted
        self._steps[id(optimizer)] += 1
        self._accumulating = False
        self._tensors.wait_for_copies()

    def _after_backward(self) -> None:
        self._accumulating = True

    def tell_what_is_kept(self, commits: int) -> None:
        """Print a line if the tensors are not those of the newest commit, which this rank sends to the others."""
        changed = self._tensors.first_changed()
        if self._contents.layout.changed():
            what = "layers were added, replaced or removed"
        elif self.has_stepped:
            what = "an optimizer has stepped"
        elif changed is not None:
            what = f"{self._contents.names[changed]} has changed outside an optimizer's step"
        else:
            return
        print_line(KEPT.format(commits=commits, what=what))

    def _copy_because_changed(self) -> None:
        self._changed_outside = True
        changed = self._tensors.first_changed()
        name = "a tensor" if changed is None else self._contents.names[changed]
        self._copy_from_now_on(OUTSIDE.format(name=name))

    def _copy_from_now_on(self, reason: str) -> None:
        if not self.copying and reason != SEVERAL and self._session is not None and self._session.is_rank_0:
            print_line(reason)
        self.copying = self.copying or reason
