"""What a Trainer has logged: callbacks of a process that joins see the same metrics, and it ends the epoch with the others."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch"),
    *("enable_graph", "add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
VALUES = ("value", "cumulated_batch_size")


def is_at_end(trainer: Any) -> bool:
    """Whether all batches of the epoch are done, and its end is not."""
    loop, progress = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    return bool(progress.ready != progress.processed and loop.batch_progress.is_last_batch)


def logged(trainer: Any) -> dict[str, Any]:
    """As plain data and tensors. No results within an epoch, where the next batch logs them again."""
    results = trainer.fit_loop.epoch_loop._results if is_at_end(trainer) else {}
    return {
        "seen": {name: value.clone() for name, value in trainer._logger_connector._callback_metrics.items()},
        "results": {key: _plain(one) for key, one in results.items()},
    }


def _plain(one: Any) -> dict[str, Any]:
    return {
        "meta": {name: getattr(one.meta, name) for name in META} | {"reduce_fx": one.meta.reduce_fx.__name__},
        "sync": {"_should": one.meta.sync.should, "rank_zero_only": one.meta.sync.rank_zero_only},
        "values": {name: getattr(one, name).item() for name in VALUES if one.is_tensor and hasattr(one, name)},
        "is_tensor": one.is_tensor,
        "has_reset": one.has_reset,
    }


def restore_logged(trainer: Any, found: dict[str, Any]) -> None:
    """Set what a process has not logged itself. To a sum over the ranks it adds nothing; else it takes the sender's value."""
    device = trainer.strategy.root_device
    seen = {name: value.to(device, copy=True) for name, value in found["seen"].items()}
    trainer._logger_connector._callback_metrics = seen
    results = trainer.fit_loop.epoch_loop._results
    for key, one in found["results"].items():
        if key not in results:
            results[key] = _result(trainer, one, device)


def use_senders_sums(trainer: Any) -> None:
    """On one rank, if no rank has sums of its own any more: else the means would be 0 / 0, and early stopping would stop."""
    for one in trainer.fit_loop.epoch_loop._results.values():
        _set_values(one, getattr(one, "of_sender", {}))


def _result(trainer: Any, one: dict[str, Any], device: torch.device) -> Any:
    meta = _Metadata(**one["meta"])
    meta.sync = _Sync(fn=trainer.strategy.reduce, **one["sync"])
    made = _ResultMetric(meta, one["is_tensor"])
    if not one["is_tensor"]:
        made.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    elif one["sync"]["_should"]:
        made.of_sender = one["values"]
    else:
        _set_values(made, one["values"])
    made._update_count, made.has_reset = 1, one["has_reset"]
    return made.to(device)


def _set_values(result: Any, values: dict[str, float]) -> None:
    for name, value in values.items():
        setattr(result, name, torch.full_like(getattr(result, name), value))
