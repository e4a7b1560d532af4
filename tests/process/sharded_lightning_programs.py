"""Trainings that Lightning shards with FSDP2: see `sharded_framework_programs`."""

from __future__ import annotations

from typing import Any

import nbelastic as nbe
from tests.process.programs import Log, generation
from tests.process.sharded_framework_programs import (
    ACCUMULATED,
    BATCH,
    EPOCHS,
    Places,
    data,
    die,
    mean_loss,
    network,
    optimizer_and_schedule,
    weights,
)


def shard(layers: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in (layers[0], layers[2]):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(layers, mesh=mesh["data_parallel"])


def trainer_module(folder: str, places: Places) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def configure_model(self) -> None:
            shard(self.layers, self.device_mesh)

        def training_step(self, batch: Any, _: int) -> Any:
            loss = mean_loss(self.layers, batch)
            die(folder, places, "before a backward pass", self.global_step)
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            return loss

        def on_before_optimizer_step(self, _: Any) -> None:
            die(folder, places, "before a step", self.global_step)

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("validation_loss", mean_loss(self.layers, batch), sync_dist=True)
            die(folder, places, "in a validation", self.global_step)

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizer_and_schedule(self.parameters())
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def recorder(folder: str, places: Places) -> Any:
    import lightning

    class Recorder(lightning.Callback):
        def __init__(self) -> None:
            self.write = Log(folder)
            self.validations = 0

        def state_dict(self) -> dict[str, Any]:
            return {"validations": self.validations}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.validations = state["validations"]

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.write(begin=trainer.global_step, generation=generation(), world=trainer.world_size)

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            die(folder, places, "after a commit", trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.write(step=trainer.global_step, generation=generation(), world=trainer.world_size)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.validations += not trainer.sanity_checking

    return Recorder()


def train_with_trainer(folder: str, places: Places) -> dict[str, Any]:
    """It accumulates gradients over two batches, validates, and writes Lightning's own checkpoints."""
    import lightning
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    from nbelastic.integrations.lightning import fit

    module, records = trainer_module(folder, places), recorder(folder, places)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=3,
        strategy=ModelParallelStrategy(data_parallel_size=3, tensor_parallel_size=1),
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[records],
        logger=CSVLogger(folder),
        default_root_dir=folder,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    fit(trainer, module, DataLoader(data(), BATCH, shuffle=True), DataLoader(data(), 20))
    return {
        "weights": weights(module.layers),
        "lr": [trainer.optimizers[0].param_groups[0]["lr"]],
        "steps": trainer.global_step,
        "validations": records.validations,
    }


def train_with_fabric(folder: str, places: Places) -> dict[str, Any]:
    """An ordinary loop, which accumulates gradients without communication."""
    import torch
    from lightning.fabric.strategies import ModelParallelStrategy

    from nbelastic.integrations.lightning import Fabric

    log, samples = Log(folder), data()
    sampler = nbe.ElasticSampler(samples, global_batch=BATCH)
    state = nbe.ShardedState(sampler=sampler, epoch=0, step=0, batch=0)

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        fabric = Fabric(accelerator="cpu", strategy=ModelParallelStrategy(shard, tensor_parallel_size=1))
        model = fabric.setup(network())
        raw, schedule = optimizer_and_schedule(model.parameters())
        optimizer = fabric.setup_optimizers(raw)
        state.bind(model=model.module, optimizer=optimizer, schedule=schedule)
        log(begin=state.step, generation=generation(), world=nbe.size())
        for state.epoch in range(state.epoch, EPOCHS):
            sampler.set_epoch(state.epoch)
            loader = torch.utils.data.DataLoader(samples, nbe.local_batch_size(BATCH), sampler=sampler)
            last = -(-len(samples) // BATCH)
            for batch in fabric.setup_dataloaders(loader):
                is_step = (state.batch + 1) % ACCUMULATED == 0 or state.batch + 1 == last
                with fabric.no_backward_sync(model, enabled=not is_step):
                    loss = mean_loss(model, batch) * sampler.weight(len(batch[0])) / ACCUMULATED
                    die(folder, places, "before a backward pass", state.step)
                    fabric.backward(loss)
                sampler.record_batch(len(batch[0]))
                state.batch = (state.batch + 1) % last
                if is_step:
                    die(folder, places, "before a step", state.step)
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    state.step += 1
                    log(step=state.step, generation=generation(), world=nbe.size())
                state.commit()
        return {"weights": weights(model.module), "lr": schedule.get_last_lr(), "steps": state.step}

    return dict(loop(state))
