"""Lightning's Trainer and Fabric train on through deaths and newcomers, to the weights of an undisturbed training."""

import csv
import functools
from itertools import groupby

import pytest

from tests.process import lightning_programs as programs
from tests.support.waiting import until


def check_each_sample_was_used_once(training, epochs):
    """In each epoch, by the last world in which each batch was made. Without samples, a rank repeats one of its batch."""
    made = {}  # (epoch, batch): generation
    for line in training.lines():
        place = line["epoch"], line["batch"]
        made[place] = max(made.get(place, 0), line["generation"])
    used = {place: set() for place in made}
    for line in training.lines("meant"):
        place = line["epoch"], line["batch"]
        if made.get(place) == line["generation"]:
            used[place] |= set(line["meant"])
    for epoch, places in groupby(sorted(used), key=lambda place: place[0]):
        samples = sorted(sample for place in places for sample in used[place])
        assert samples == list(range(programs.SAMPLES)), f"epoch {epoch} of {epochs}"


def disturb(training):
    """Kill rank 1 and, when the world is whole again, rank 0; wait for a whole world after each."""
    for rank in (1, 0):
        victim = training.wait_for_world(3)[rank]
        begun = max(line["step"] for line in training.lines())
        until(lambda: max(line["step"] for line in training.lines()) > begun + 2, what="a few steps")
        training.signal_worker(victim)
    training.wait_for_world(3)
    (training.folder / "finish").touch()
    return training.job.result(timeout=60)


def check_is_as_undisturbed(training, results, accumulate=1):
    (steps,) = {result["steps"] for result in results}
    (epochs,) = {result["epochs"] for result in results}
    expected = programs.train_in_one_process(epochs, accumulate)
    assert steps == expected["steps"]
    check_each_sample_was_used_once(training, epochs)
    for result in results:
        assert result["weights"] == results[0]["weights"]
        assert result["weights"] == pytest.approx(expected["weights"], rel=0, abs=1e-12)
        assert result["lr"] == pytest.approx(expected["lr"], rel=1e-12)


def test_a_trainer_trains_on(trains):
    """Its counters, schedule, callbacks, metrics and log file are right, and commits copy nothing.

    It accumulates gradients, and an epoch's last batch is a step of its own.
    """
    kwargs = {"accumulate": 2}
    training = trains("localhost:3", min=1, preload=["lightning"], program=programs.train, kwargs=kwargs)
    results = disturb(training)
    check_is_as_undisturbed(training, results, accumulate=2)
    assert len(results) == 3
    for result in results:
        assert result["epochs_ended"] == result["epochs"]
        assert result["validation_loss"] == results[0]["validation_loss"]
    assert "tensors are copied" not in training.job.logs()
    assert "trains alone" not in training.job.logs()
    (file,) = training.folder.rglob("metrics.csv")
    logged = [int(line["step"]) for line in csv.DictReader(file.read_text().splitlines()) if line["loss_step"]]
    assert logged[0] == 0
    assert len(logged) == len(set(logged)), "a step was logged twice"
    assert list(training.folder.rglob("*.ckpt"))


@pytest.mark.soak(share=0.2)
def test_fabric_trains_on(trains):
    """A plain loop with `Fabric` in place of Lightning's."""
    training = trains("localhost:3", min=1, preload=["lightning"], program=programs.train_with_fabric)
    results = disturb(training)
    check_is_as_undisturbed(training, results)
    assert "tensors are copied" not in training.job.logs()


@pytest.mark.soak(share=0.2)
def test_what_callbacks_change_is_recovered(make, tmp_path):
    """An average of the weights, layers that are unfrozen, and another accumulation per epoch end as in one process.

    So do `max_steps`.
    """
    cluster = make("localhost:3", preload=["lightning"])
    train = functools.partial(programs.train_with_callbacks, str(tmp_path))
    cluster.wait(3, timeout=30)
    found = cluster.run(train, is_elastic=True).result(timeout=60)
    assert {"in a validation", "in an epoch"} <= {path.name for path in tmp_path.iterdir()}
    alone = cluster.run(train, is_elastic=False).result(timeout=60)[0]
    assert (alone["steps"], alone["epochs"]) == (17, 2)
    for one in found:
        assert one == {**alone, "weights": pytest.approx(alone["weights"], rel=0, abs=1e-12)}


ONE_BATCH_PER_EPOCH = """
import time, torch, lightning
from lightning.pytorch.callbacks import EarlyStopping
from nbelastic.integrations.lightning import fit

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        time.sleep(0.05)  # in it the ranks are asked to leave: they do so at its commit, before the end of the epoch
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        self.log("mean_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        assert 0 < self.trainer.callback_metrics["mean_loss"] < 1e6

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

data = torch.utils.data.DataLoader(torch.randn(3, 2), batch_size=3)
stops = [EarlyStopping(name, patience=100_000) for name in ("loss", "mean_loss")]
trainer = lightning.Trainer(max_epochs=100_000, default_root_dir=FOLDER, callbacks=stops, enable_progress_bar=False)
fit(trainer, Module(), data)
"""


def test_a_newcomer_ends_the_epoch_with_the_others(make, tmp_path):
    """It has made no batch of the epoch, and knows what the others have logged: early stopping needs it."""
    cluster = make("localhost:2", min=1, preload=["lightning"])
    job = cluster.run_cell(ONE_BATCH_PER_EPOCH.replace("FOLDER", repr(str(tmp_path))))
    cluster.wait(2, timeout=30)  # one alone may begin
    for _ in range(4):
        cluster.restart(cluster.workers[1].id)
        cluster.wait(2, timeout=30)
        step = cluster.status().step
        until(lambda n=step: job.done() or cluster.status().step > n + 10, what="steps with the newcomer")
        assert not job.done(), job.exception()
    job.stop()
