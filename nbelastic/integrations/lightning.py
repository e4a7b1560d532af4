"""Lightning's Trainer and Fabric in elastic jobs.

    from nbelastic.integrations.lightning import fit
    fit(trainer, module, loader)  # in place of trainer.fit(module, loader)

Lightning sets the trainer up before there is a world. Where it would run its loops, the elastic loop begins: it runs them
in each world, from the newest commit. The trainer is the user's own, so its counters, callbacks and metrics are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812  (its usual name)
import lightning.fabric.strategies as fabric_strategies
import torch
from lightning.fabric.wrappers import _FabricDataLoader
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.seed import isolate_rng

from nbelastic.errors import UsageError
from nbelastic.integrations.lightning_callbacks import Averages, check_callbacks
from nbelastic.integrations.lightning_data import SharedSource
from nbelastic.integrations.lightning_logged import is_at_end, use_senders_sums
from nbelastic.integrations.lightning_position import USER_WORDS, Position, Sums
from nbelastic.integrations.lightning_sharded import ElasticShardedFabricStrategy, ElasticShardedStrategy
from nbelastic.integrations.lightning_strategy import (
    ElasticEnvironment,
    ElasticFabricStrategy,
    ElasticStrategy,
    check_strategy,
    not_interactive,
)
from nbelastic.programs.elastic import elastic, frameworks
from nbelastic.sharded.state import ShardedState
from nbelastic.state.sampler import ElasticSampler
from nbelastic.state.state import TorchState

not_interactive()


def fit(trainer: Any, *args: Any, **kwargs: Any) -> None:
    """`trainer.fit(...)` as an elastic function: the training goes on when workers are lost or join.

    The loader's batch size is that of the whole world: each rank gets its share of each batch. Thus the steps, the
    schedule and the final weights do not depend on the number of ranks. There is a commit after each optimizer step.
    """
    if not isinstance(trainer, L.Trainer):
        kind = type(trainer)
        raise UsageError(
            f"fit() is for a lightning.Trainer, not {kind.__module__}.{kind.__name__}: `import lightning as L`, L.Trainer(…)."
        )
    if trainer.overfit_batches or trainer.reload_dataloaders_every_n_epochs:
        raise UsageError("an elastic fit() does not support overfit_batches and reload_dataloaders_every_n_epochs yet.")
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise UsageError(
            "val_check_interval is a time here, which the ranks would measure each by itself, and not validate together: "
            "give it a number of batches."
        )
    check_callbacks(trainer)
    _use_world(trainer)
    frameworks().forget(trainer)  # `trainer.fit` sets it up before there is a world
    _ElasticFit(trainer).run(lambda: trainer.fit(*args, **kwargs))


def _use_world(trainer: Any) -> None:
    """Replace the trainer's strategy by one that sees the worlds of the job."""
    connector = trainer._accelerator_connector
    old = connector.strategy
    check_strategy(old)
    if isinstance(old, ModelParallelStrategy):
        new = ElasticShardedStrategy(save_distributed_checkpoint=old._save_distributed_checkpoint)
    else:
        new = ElasticStrategy()
        if isinstance(old, DDPStrategy):
            for name in ("_ddp_kwargs", "_ddp_comm_state", "_ddp_comm_hook", "_ddp_comm_wrapper"):
                setattr(new, name, getattr(old, name))
        new._ddp_kwargs = {"init_sync": False, **new._ddp_kwargs}  # the state is the same on all ranks
    new.accelerator, new.precision_plugin = connector.accelerator, connector.precision_plugin
    new._checkpoint_io, new._layer_sync = old._checkpoint_io, connector._layer_sync
    new.cluster_environment = connector.cluster_environment = ElasticEnvironment()
    new.parallel_devices = connector._parallel_devices = [new.root_device]
    connector.strategy = new


class _ElasticFit:
    """Replaces methods of a trainer and its loops while it fits."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._fit_loop, self._epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        source = self._fit_loop._data_source
        self._source = SharedSource(source.instance, source.name)
        self._source.progress = self._epoch_loop.batch_progress
        self._position = Position(trainer)
        self._sums = Sums(trainer)
        self._state: Any = None
        self._from_checkpoint = False
        self._accumulated = trainer.accumulate_grad_batches

    def run(self, fit: Callable[[], object]) -> None:
        """Call `fit` with the methods replaced."""
        self._trainer.strategy.weigh = self._weigh
        replaced = [
            (self._fit_loop, "_data_source", self._source),
            (self._trainer, "_run_stage", self._run_stage),
            (self._fit_loop, "on_run_start", self._on_fit_start),
            (self._fit_loop, "on_advance_end", self._on_epoch_end),
            (self._epoch_loop, "on_run_start", self._on_run_start),
            (self._epoch_loop, "on_advance_end", self._on_advance_end),
            (self._epoch_loop, "_broadcast_sigterm_tensor", lambda: None),  # the agent ends workers, not signals
        ]
        before = [(where, name, where.__dict__.get(name)) for where, name, _ in replaced]
        for where, name, value in replaced:
            setattr(where, name, value)
        try:
            fit()
        finally:
            for where, name, old in before:
                if old is None:
                    delattr(where, name)
                else:
                    setattr(where, name, old)

    def _run_stage(self) -> None:
        """Lightning has set all up: make the state, and train in each world."""
        trainer = self._trainer
        self._source.dataloader()  # makes the sampler
        self._from_checkpoint = self._fit_loop._loaded_from_state_dict
        self._averages = Averages(trainer)
        self._state = trainer.strategy.make_state(
            sampler=self._source.sampler, position=self._position, **self._averages.values()
        )
        self._state._contents.user_words = USER_WORDS
        with self._averages.watched():
            elastic(self._train)(self._state)

    def _train(self, state: TorchState | ShardedState) -> None:
        """The elastic function: run Lightning's loops in this world."""
        trainer, is_over = self._trainer, False
        state._modes.are_kept = False  # its hooks set modes when an epoch begins, and it goes on within one
        self._drop_data()  # Lightning may have asked for it before there was a world
        try:
            trainer.strategy.enter(state)
            self._restore_sums()
            trainer.training = True
            if trainer.is_global_zero:
                self._position.continue_files()
            if not state.commits:
                self._position.set_places(trainer.strategy.broadcast(self._position.places()))
                _log_hyperparams(trainer)  # Lightning's own call of it came before any process was rank 0
                if not self._from_checkpoint:  # with max_steps, ranks that have received the state would skip the check
                    self._epoch_loop.val_loop._restarting = False
                with isolate_rng():
                    trainer._run_sanity_check()
            trainer.lightning_module.zero_grad()
            with torch.autograd.set_detect_anomaly(trainer._detect_anomaly):
                self._run_loops()
            is_over = True
        finally:
            self._averages.leave()
            if trainer.validating or trainer.sanity_checking:
                self._epoch_loop.val_loop._module_mode.restore(trainer.lightning_module)
            trainer.strategy.leave(is_over=is_over)
            self._drop_data()

    def _restore_sums(self) -> None:
        """Collective at the end of an epoch."""
        trainer, sums = self._trainer, self._sums
        sums.restore(self._state.commits)
        if is_at_end(trainer):
            some_are_left = trainer.strategy.reduce_boolean_decision(sums.are_own, all=False)
            if trainer.is_global_zero and not some_are_left:
                use_senders_sums(trainer)

    def _drop_data(self) -> None:
        """Lightning makes its loaders anew in the next world."""
        for loop in (self._fit_loop, self._epoch_loop.val_loop):
            if loop._data_fetcher is not None:
                loop._data_fetcher.teardown()
            loop._data_fetcher = loop._combined_loader = None

    def _run_loops(self) -> None:
        loops, is_finished = self._fit_loop, False
        if self._state.commits or not self._from_checkpoint:  # Lightning knows how to go on after its own checkpoint
            progress = loops.epoch_progress.current
            for loop in (loops, self._epoch_loop, self._epoch_loop.val_loop):
                loop._restarting = progress.ready != progress.processed
            self._source.sampler.set_epoch(progress.processed)
            is_finished = self._state.commits > 0 and loops.done
            if is_finished and progress.ready != progress.processed:
                self._end_epoch()
        loops.run()
        if is_finished:
            loops.on_run_end()

    def _end_epoch(self) -> None:
        """All steps of the training are done; the last validation or the end of its epoch was cut off."""
        loops = self._fit_loop
        loops.setup_data()
        loops.reset()
        loops.on_run_start()
        loops.on_advance_start()
        loops.advance()
        loops.on_advance_end()
        loops.on_iteration_done()

    def _on_fit_start(self) -> None:
        """A callback may change how many batches are accumulated, and in `on_train_start` it checks the user's own number."""
        trainer = self._trainer
        committed, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, self._accumulated
        try:
            type(self._fit_loop).on_run_start(self._fit_loop)
        finally:
            trainer.accumulate_grad_batches = committed

    def _on_run_start(self, fetcher: Any) -> None:
        """An epoch begins, or goes on after a commit: at its next batch, or at the validation after the last one."""
        type(self._epoch_loop).on_run_start(self._epoch_loop, fetcher)
        self._trainer.strategy.begin_epoch()
        if not self._state.commits and self._from_checkpoint:
            return
        for loop in (self._fit_loop, self._epoch_loop, self._epoch_loop.val_loop):
            loop._restarting = False
            loop.reset_restart_stage()
        if self._position.validates:
            self._end_batch(fetcher)

    def _on_epoch_end(self) -> None:
        type(self._fit_loop).on_advance_end(self._fit_loop)
        self._commit()

    def _on_advance_end(self, fetcher: Any) -> None:
        """A batch is done: commit if there was a step, before and after the validation that may follow."""
        sampler = self._source.sampler
        sampler.record_batch(sampler.next_share())
        if self._epoch_loop._should_check_val_fx(fetcher):
            self._position.validates = True
            self._commit()
        self._end_batch(fetcher)

    def _end_batch(self, fetcher: Any) -> None:
        type(self._epoch_loop).on_advance_end(self._epoch_loop, fetcher)
        self._position.validates = False
        self._commit()

    def _commit(self) -> None:
        """Not in the middle of an accumulation: recovery returns to the step before."""
        if self._epoch_loop._should_accumulate():
            return
        trainer = self._trainer
        self._sums.keep(self._state.commits + 1)
        position = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        metrics = trainer._logger_connector._progress_bar_metrics
        self._state.report(**{**metrics, **position})  # the first values have curves
        trainer.strategy.commit(self._state)

    def _weigh(self) -> float:
        sampler = self._source.sampler
        weight: float = sampler.weight(sampler.next_share())
        return weight


class _ElasticLoader(_FabricDataLoader):  # type: ignore[misc]  # mypy does not follow lightning
    """Fabric counts the passes over a loader as epochs, and sets them. The sampler's own epoch goes on after a loss."""

    @property
    def _num_iter_calls(self) -> int:
        return int(self.sampler.epoch)

    @_num_iter_calls.setter
    def _num_iter_calls(self, count: int) -> None:
        """The program sets the epoch."""


class Fabric(L.Fabric):  # type: ignore[misc]  # mypy does not follow lightning
    """`L.Fabric` for inside an elastic function: make one there in each world, in place of `L.Fabric` and `launch()`.

    A DataLoader with an `ElasticSampler` stays as it is, and Lightning shares any other's samples among the ranks.
    """

    def __init__(self, *, strategy: Any = "auto", **options: Any) -> None:
        for name in ("devices", "num_nodes"):
            options.pop(name, None)  # the world is the cluster's
        if strategy == "auto":
            strategy = "ddp"
        if isinstance(strategy, str) and strategy.startswith("ddp") and strategy in fabric_strategies.STRATEGY_REGISTRY:
            strategy = fabric_strategies.STRATEGY_REGISTRY.get(strategy)
        check_strategy(strategy)
        if not isinstance(strategy, fabric_strategies.Strategy):
            raise UsageError(
                f"Fabric() takes a {type(strategy).__name__} of lightning.fabric.strategies, and this one is a Trainer's."
            )
        is_sharded = isinstance(strategy, fabric_strategies.ModelParallelStrategy)
        kind: Any = ElasticShardedFabricStrategy if is_sharded else ElasticFabricStrategy
        super().__init__(strategy=kind.like(strategy, ElasticEnvironment()), devices=1, **options)
        self.launch()

    def _requires_distributed_sampler(self, dataloader: Any) -> bool:
        required: bool = super()._requires_distributed_sampler(dataloader)
        return required and not isinstance(dataloader.sampler, ElasticSampler)

    def _setup_dataloader(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        made = super()._setup_dataloader(dataloader, *args, **kwargs)
        return _ElasticLoader(made._dataloader, made._device) if isinstance(made.sampler, ElasticSampler) else made
