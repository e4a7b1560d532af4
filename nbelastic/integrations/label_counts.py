"""Finds out whether a loss is divided by the number of labels that a Trainer gives to it."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import send_to_device

from nbelastic.state import rng


class _Count(torch.Tensor):  # type: ignore[misc]  # mypy does not follow torch
    """A number that notices when something is computed with it."""

    used = False

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.used = True
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def ignores_label_count(trainer: Any, dataset: Any, collate: Any) -> bool:
    """Whether the Trainer believes that its loss is divided by the number of labels, and it is not.

    The Trainer believes that of each model that takes any keyword, and of each loss of the user's own. Then it multiplies a
    mean by the number of ranks. One sample is tried; nothing of the model or of the random generators changes.
    """
    if trainer.loss_is_scaled_for_ga is not None:  # the user has said it
        return False
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        return False

    class Count(_Count):
        """Of this Trainer."""

    model, random = trainer.model, rng.get_states()
    was_training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device  # the CPU, if the model is to be sharded
        inputs = send_to_device(trainer._prepare_inputs(collate([dataset[0]])), device)
        if "labels" not in inputs:
            return False
        with torch.no_grad():
            number = torch.ones((), device=device).as_subclass(Count)
            trainer.compute_loss(model, inputs, num_items_in_batch=number)
    except Exception:  # noqa: BLE001  (the training itself will say what is wrong)
        return False
    finally:
        model.train(was_training)
        rng.set_states(random)
    return not Count.used
