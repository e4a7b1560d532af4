"""Trainings with the Lightning integration in a world of one rank, which is lost or joined in the middle."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from nbelastic.worker import session
from tests.programs.integrations import import_integration
from tests.state.conftest import formation


@pytest.fixture(scope="module")
def integration():
    return import_integration("lightning", "lightning")


class LostError(Exception):
    """A rank is lost."""


def train_until_lost(train, state):
    """The world is lost in the training."""
    with pytest.raises(LostError):
        train(state)
    state.generation_ended(aborted=True)


def trained_twice(train):
    """In place of `elastic`: the world is lost once."""

    def loop(state):
        train_until_lost(train, state)
        train(state)

    return loop


def lost(sent):
    """In place of `elastic`: the world is lost in the training, and its last commit is kept in `sent`."""

    def elastic(train):
        def loop(state):
            train_until_lost(train, state)
            sent.update(state._contents.small(), commits=state.commits)

        return loop

    return elastic


def joins(sent):
    """In place of `elastic`: a process that receives the commit in `sent`."""

    def elastic(train):
        def loop(state):
            state.commits = sent.pop("commits")
            state._contents.set_small(sent)
            train(state)

        return loop

    return elastic


@pytest.fixture
def alone(integration, monkeypatch, tmp_path):
    """Fit a module in a world of one. `loop` stands for the elastic loop."""
    monkeypatch.setattr(session, "world", lambda: formation(0, 1))
    monkeypatch.setattr(integration, "frameworks", lambda: SimpleNamespace(forget=lambda _: None))
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)

    def fit(module, loop, *loaders, trainer=None, **options):
        monkeypatch.setattr(integration, "elastic", loop)
        trainer = trainer or integration.L.Trainer(
            num_sanity_val_steps=0, accelerator="cpu", default_root_dir=tmp_path, **{**quiet, **options}
        )
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            integration.fit(trainer, module, *loaders)
        finally:
            dist.destroy_process_group()
        return trainer

    return fit


@pytest.fixture
def module(integration):
    """Make a module with one weight, which has these methods."""

    class Module(integration.L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return lambda **methods: type("Mine", (Module,), methods)()


@pytest.mark.parametrize(("steps", "lost_in", "expected"), [(4, 0, "vvet"), (4, 1, "veet"), (3, 0, "eet")])
@pytest.mark.filterwarnings("ignore")
def test_a_loss_behind_the_last_step_leaves_out_no_validation_and_no_end(alone, module, steps, lost_in, expected):
    """With `max_steps` all steps are done then. The epoch's last hooks save its checkpoint and log its metrics."""
    seen = []

    def note(hook):
        seen.append(hook)
        if len(seen) == lost_in + 1:
            raise LostError

    mine = module(
        validation_step=lambda *_: note("v"),
        on_train_epoch_end=lambda _: note("e"),
        on_train_end=lambda _: seen.append("t"),
    )
    data = DataLoader(torch.randn(8, 1), batch_size=2), DataLoader(torch.ones(1, 1))
    trainer = alone(mine, trained_twice, *data, max_steps=steps)
    assert "".join(seen) == expected
    assert trainer.global_step == steps


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_lightning_resumes_with_the_next_batch(alone, module, tmp_path):
    """Also one that a callback saves right after a batch, and one of the last batch, which is smaller."""

    def save(mine, *_):
        path = tmp_path / f"{mine.trainer.global_step}.ckpt"
        if not path.exists():  # only in the first training
            mine.trainer.save_checkpoint(path)

    def train(*checkpoint):
        seen, loader = [], DataLoader(torch.arange(5.0)[:, None], batch_size=2, shuffle=True)
        mine = module(
            on_train_batch_start=lambda _, batch, __: seen.append(batch.flatten().tolist()), on_train_batch_end=save
        )
        alone(mine, lambda train: train, loader, None, None, *checkpoint, max_epochs=2)
        return seen

    whole = train()
    assert [len(batch) for batch in whole] == [2, 2, 1] * 2
    for steps in (1, 3, 5):
        assert train(tmp_path / f"{steps}.ckpt") == whole[steps:]


@pytest.mark.filterwarnings("ignore")
def test_a_newcomer_that_is_left_alone_ends_the_epoch_with_what_the_others_had_summed_up(alone, module):
    """Its own mean would be 0 / 0, which ends the training if early stopping looks at it."""
    sent, means = {}, []

    def training_step(self, batch, _):
        self.log("mean", batch.mean(), on_step=False, on_epoch=True, sync_dist=True)
        return self.layer(batch).square().mean()

    def on_train_epoch_end(self):
        means.append(self.trainer.callback_metrics["mean"].item())
        if len(means) == 2:
            raise LostError

    methods = {"training_step": training_step, "on_train_epoch_end": on_train_epoch_end}
    loader = DataLoader(torch.tensor([[1.0], [2.0], [6.0], [7.0]]), batch_size=2)
    for loop in (lost(sent), joins(sent)):
        alone(module(**methods), loop, loader, max_epochs=3)
    assert means == [4.0] * 4


@pytest.mark.filterwarnings("ignore")
def test_a_program_is_tried_with_one_batch(alone, module):
    """`fast_dev_run` replaces the logger by one that has any attribute: the ranks agree on the version of loggers that have one."""
    trainer = alone(
        module(), lambda train: train, DataLoader(torch.ones(8, 1), batch_size=2), fast_dev_run=True, logger=True
    )
    assert trainer.global_step == 1


@pytest.fixture
def checkpoint(integration, tmp_path):
    """Make a callback that saves into a folder, and notes at which step. The world is lost after the save number `lost_in`."""

    class Checkpoint(integration.L.pytorch.callbacks.ModelCheckpoint):
        def __init__(self, saved, lost_in=-1, **options):
            super().__init__(tmp_path / "saved", **options)
            self.saved, self.lost_in = saved, lost_in

        def _save_checkpoint(self, trainer, path):
            super()._save_checkpoint(trainer, path)
            self.saved.append(trainer.global_step)
            if len(self.saved) == self.lost_in:
                raise LostError

    return Checkpoint


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_is_made_again_is_saved_again(alone, module, checkpoint):
    """A newcomer saves there, so a survivor that does not would keep it waiting."""
    callback = checkpoint([], 1, every_n_train_steps=2, save_top_k=-1)
    loader = DataLoader(torch.ones(8, 1), batch_size=2)
    alone(module(), trained_twice, loader, max_epochs=1, callbacks=[callback], enable_checkpointing=True)
    assert callback.saved == [2, 2, 4]


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end"])
@pytest.mark.filterwarnings("ignore")
def test_a_newcomer_saves_when_the_others_do(alone, module, checkpoint, hook):
    """It waits for them, and they for it, also at the end: the last save was made before it came."""
    sent, callbacks = {}, []

    def loses(*_):
        if len(callbacks) == 1:
            raise LostError

    for loop in (lost(sent), joins(sent)):
        callbacks.append(checkpoint([], every_n_train_steps=3, save_last=True))
        data = DataLoader(torch.ones(8, 1), batch_size=2)
        alone(module(**{hook: loses}), loop, data, max_epochs=1, callbacks=callbacks[-1:], enable_checkpointing=True)
    assert [one.saved for one in callbacks] == [[3, 3], []]


@pytest.mark.filterwarnings("ignore")
def test_a_newcomer_knows_the_metrics_of_an_earlier_validation(alone, module, checkpoint):
    """A callback that monitors one of them saves on all ranks or on none; a ReduceLROnPlateau needs it."""

    def validation_step(self, batch, _):
        self.log("loss", batch.mean())

    def on_train_batch_start(self, *_):
        if self.trainer.global_step == 5 and callback.lost_in == 1:
            raise LostError

    sent, methods = {}, {"validation_step": validation_step, "on_train_batch_start": on_train_batch_start}
    data = DataLoader(torch.ones(8, 1), batch_size=2), DataLoader(torch.ones(1, 1))
    for lost_in, loop in ((1, lost(sent)), (-1, joins(sent))):
        callback = checkpoint([], lost_in, monitor="loss", every_n_train_steps=2, save_top_k=-1)
        alone(module(**methods), loop, *data, max_epochs=2, callbacks=[callback], enable_checkpointing=True)
    assert set(callback.saved) == {6, 8}


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_trains_on_in_a_later_job(alone, module):
    """Workers keep the names of a job, so a cell may fit the same trainer for more epochs."""
    mine, loader = module(), DataLoader(torch.ones(8, 1), batch_size=2)
    trainer = alone(mine, lambda train: train, loader, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    assert alone(mine, lambda train: train, loader, trainer=trainer).global_step == 8


@pytest.mark.filterwarnings("ignore")
def test_all_ranks_know_the_folder_of_a_logger(integration, alone, module, tmp_path):
    """Also if no callback has asked for it: the next rank 0 writes there. TensorBoard and CSV loggers choose it late."""
    versions = []

    def elastic(train):
        return lambda state: versions.append(state._contents.small()["position"]["places"][0]) or train(state)

    logger = import_module("lightning.pytorch.loggers").CSVLogger(tmp_path)
    alone(module(), elastic, DataLoader(torch.ones(8, 1), batch_size=2), max_epochs=1, logger=logger)
    assert versions == [[0]]
