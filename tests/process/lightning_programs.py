"""Programs with Lightning's Trainer and Fabric, and the same training in one process with plain PyTorch."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import nbelastic as nbe
from tests.process.programs import PAUSE, Log, any_rank_finds, generation

SAMPLES, BATCH, VALIDATED = 102, 10, 20  # each epoch ends with a batch of 2: fewer than there are ranks
SEED = 3


def network() -> Any:
    """In double precision, equal in every process, so that the order of sums hardly matters."""
    import torch

    layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return layers


def optimizer_and_schedule(parameters: Any) -> tuple[Any, Any]:
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 200)


def data() -> Any:
    """Each sample has its number."""
    import torch

    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(1, keepdim=True))


def mean_loss(layers: Any, batch: Any) -> Any:
    _, inputs, targets = batch
    return (layers(inputs) - targets).square().mean()


def weights(layers: Any) -> list[float]:
    return [x for p in layers.parameters() for x in p.detach().flatten().tolist()]


def trainer_module() -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = mean_loss(self.layers, batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("validation_loss", mean_loss(self.layers, batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizer_and_schedule(self.parameters())
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def recorder(folder: str) -> Any:
    """A callback that logs each batch, counts epochs, and ends the training at an epoch's end if `folder/finish` exists."""
    import lightning

    class Recorder(lightning.Callback):
        def __init__(self) -> None:
            self.write = Log(folder)
            self.epochs_ended = 0

        def state_dict(self) -> dict[str, Any]:
            return {"epochs_ended": self.epochs_ended}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.epochs_ended = state["epochs_ended"]

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            place = {"generation": generation(), "epoch": trainer.current_epoch, "batch": index}
            self.write(meant=batch[0].tolist(), **place)

        def on_train_batch_end(self, trainer: Any, module: Any, _: Any, batch: Any, index: int) -> None:
            place = {"generation": generation(), "epoch": trainer.current_epoch, "batch": index}
            self.write(step=trainer.global_step, rank=trainer.global_rank, world=trainer.world_size, **place)
            time.sleep(PAUSE)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.epochs_ended += 1
            trainer.should_stop = any_rank_finds(folder, "finish")

    return Recorder()


def train(folder: str, *, accumulate: int) -> dict[str, Any]:
    """Train with a Trainer until `folder/finish` exists."""
    import lightning
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader

    from nbelastic.integrations.lightning import fit

    module, records = trainer_module(), recorder(folder)
    trainer = lightning.Trainer(
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        callbacks=[records],
        logger=CSVLogger(folder),  # the default is TensorBoard, where that is installed
        default_root_dir=folder,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    lightning.seed_everything(SEED, verbose=False)
    fit(trainer, module, DataLoader(data(), BATCH, shuffle=True), DataLoader(data(), VALIDATED))
    return {
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "epochs_ended": records.epochs_ended,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "validation_loss": float(trainer.callback_metrics["validation_loss"]),
        "weights": weights(module),
    }


def train_with_callbacks(folder: str, *, is_elastic: bool) -> dict[str, Any]:
    """Train for 17 steps with callbacks that change the training. The last rank kills itself in two places."""
    import lightning
    from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, GradientAccumulationScheduler
    from torch.utils.data import DataLoader

    from nbelastic.integrations.lightning import fit
    from tests.process.framework_programs import die_once

    class Disturbance(lightning.Callback):
        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            if is_elastic and trainer.global_step == 11:
                die_once(folder, "in a validation")

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if is_elastic and trainer.global_step == 14:
                die_once(folder, "in an epoch")

    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            module.layers[0].requires_grad_(False)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            module.layers[0].requires_grad_(epoch > 0)

    module = trainer_module()
    averages, unfreezing = EMAWeightAveraging(decay=0.5), Unfreezing()
    trainer = lightning.Trainer(
        max_steps=17,
        callbacks=[Disturbance(), GradientAccumulationScheduler({1: 2}), averages, unfreezing],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = functools.partial(fit, trainer) if is_elastic else trainer.fit
    start(module, DataLoader(data(), BATCH), DataLoader(data(), VALIDATED))
    return {"steps": trainer.global_step, "epochs": trainer.current_epoch, "weights": weights(module)}


def train_with_fabric(folder: str) -> dict[str, Any]:
    """Train with Fabric until `folder/finish` exists."""
    from torch.utils.data import DataLoader

    from nbelastic.integrations.lightning import Fabric

    log = Log(folder)
    layers, samples = network(), data()
    optimizer, schedule = optimizer_and_schedule(layers.parameters())
    sampler = nbe.ElasticSampler(samples, seed=SEED, global_batch=BATCH)
    state = nbe.TorchState(model=layers, optimizer=optimizer, schedule=schedule, sampler=sampler, epoch=0, step=0)

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        fabric = Fabric(accelerator="cpu")
        model, wrapped = fabric.setup(state.model, state.optimizer)
        for state.epoch in itertools.count(state.epoch):
            sampler.set_epoch(state.epoch)
            if sampler.used == 0 and any_rank_finds(folder, "finish"):
                break
            loader = DataLoader(samples, nbe.local_batch_size(BATCH), sampler=sampler)
            for batch in fabric.setup_dataloaders(loader):
                place = {"generation": generation(), "epoch": state.epoch, "batch": state.step % 11}
                log(meant=batch[0].tolist(), **place)
                wrapped.zero_grad()
                fabric.backward(mean_loss(model, batch) * sampler.weight(len(batch[0])))
                wrapped.step()
                schedule.step()
                sampler.record_batch(len(batch[0]))
                state.step += 1
                log(step=state.step, rank=fabric.global_rank, world=fabric.world_size, **place)
                state.commit()
                time.sleep(PAUSE)
        lr = state.optimizer.param_groups[0]["lr"]
        return {"steps": state.step, "epochs": state.epoch, "lr": lr, "weights": weights(state.model)}

    result: dict[str, Any] = loop(state)
    return result


def train_in_one_process(epochs: int, accumulate: int = 1) -> dict[str, Any]:
    """The same epochs with plain PyTorch, which splits no batch."""
    layers, samples = network(), data()
    optimizer, schedule = optimizer_and_schedule(layers.parameters())
    order = nbe.ElasticSampler(range(SAMPLES), seed=SEED)
    steps = 0
    for epoch in range(epochs):
        order.set_epoch(epoch)
        numbers = list(order)
        batches = [numbers[i : i + BATCH] for i in range(0, SAMPLES, BATCH)]
        for index, batch in enumerate(batches):
            (mean_loss(layers, samples[batch]) / accumulate).backward()
            if (index + 1) % accumulate == 0 or index + 1 == len(batches):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                steps += 1
    return {"steps": steps, "lr": optimizer.param_groups[0]["lr"], "weights": weights(layers)}
