"""What the Trainer integration refuses and changes. `tests/process/test_frameworks.py` trains with it."""

from datetime import date
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nbelastic import UsageError
from nbelastic.worker import session
from tests.programs.integrations import import_integration
from tests.state.conftest import formation


@pytest.fixture(scope="module")
def integration():
    return import_integration("transformers", "transformers")


@pytest.fixture
def begin(integration, monkeypatch):
    """Make a Trainer elastic for as long as the context lasts."""
    monkeypatch.setattr(integration, "frameworks", lambda: SimpleNamespace(forget=lambda _: None))
    return integration._elastic


@pytest.fixture
def make(integration, tmp_path):
    """Make a Trainer, of a class that has these methods."""

    def trainer(methods=(), *, compute_loss_func=None, **options):
        transformers = import_module("transformers")
        arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **options)
        kind = type("Mine", (transformers.Trainer,), dict(methods))
        given = {"train_dataset": [1, 2], "eval_dataset": [1], "compute_loss_func": compute_loss_func}
        return kind(torch.nn.Linear(1, 1), arguments, **given)

    return trainer


@pytest.mark.parametrize("name", ["get_train_dataloader", "_get_train_sampler", "_get_dataloader"])
def test_a_trainer_that_chooses_its_batches_is_refused(integration, make, name):
    """They would not be used: not those of a WeightedRandomSampler, nor those of a loader of one's own."""
    integration._check(make())
    trainer = make({name: lambda *_, **__: None})
    with pytest.raises(
        UsageError, match=rf"Mine has its own {name}\(\).*: give train_dataset and data_collator"
    ) as error:
        integration._check(trainer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_a_repeated_sample_keeps_its_labels_and_does_not_count(integration, begin, make, dtype, name):
    """-100 stands for "no label" in the losses of some models only: a squared error would be 10,000 times as large."""

    def own_loss(outputs, labels, num_items_in_batch):
        return (outputs - labels).abs().sum() / num_items_in_batch

    trainer, run = make(compute_loss_func=own_loss), integration.Run(None, None)
    with begin(trainer, run):
        torch.nn.init.zeros_(trainer.model.weight), torch.nn.init.zeros_(trainer.model.bias)
        parts = [{"input": torch.ones(2, 1), "labels": torch.full((2, 1), 3, dtype=dtype)} for _ in range(2)]
        for part in parts:
            part[name] = part["labels"]
        run.uncounted = [2, 0]
        count = trainer._get_num_items_in_batch(parts, torch.device("cpu"))
        assert count == 2
        assert trainer._get_num_items_in_batch(parts[1:], torch.device("cpu")) == 2  # in an evaluation by a callback
        losses = []
        for run.weight, part in zip((1.0, 0.0), parts, strict=True):
            assert part["labels"].tolist() == [[3], [3]]
            part.pop("shift_labels", None)
            losses.append(trainer.compute_loss(trainer.model, part, num_items_in_batch=count).item())
        assert losses == [3.0, 0.0]


@pytest.mark.parametrize("is_rank_0", [True, False])
def test_a_logger_of_another_rank_is_set_up_again(integration, begin, make, is_rank_0):
    """As W&B's, it begins a run on rank 0 only. Another rank may be rank 0 of the next world."""

    class Logger(import_module("transformers").TrainerCallback):
        _initialized = True

        def setup(self, *_):
            self._initialized = True

    trainer, logger = make({"is_world_process_zero": lambda _: is_rank_0}), Logger()
    trainer.add_callback(logger)
    with begin(trainer, integration.Run(None, None)):
        integration._leave_world(trainer, False)
    assert logger._initialized is is_rank_0


def test_a_training_that_goes_on_skips_batches_and_does_not_evaluate_at_its_start(
    integration, begin, make, monkeypatch
):
    """Batches that were used already are empty: they must be skipped. The evaluation is over, and patience counts it."""
    monkeypatch.setattr(session, "world", lambda: formation(0, 1))
    for name in ("_enter_world", "_leave_world"):
        monkeypatch.setattr(integration, name, lambda *_: None)
    seen = []

    def note(trainer):
        seen.append((trainer.args.ignore_data_skip, trainer.args.eval_on_start))

    trainer = make({"train": note}, ignore_data_skip=True, eval_on_start=True, eval_strategy="epoch")
    progress = integration.TrainerProgress()
    progress.global_batch = 2
    with begin(trainer, integration.Run(None, progress)):
        for progress.values in ({}, {"of": "a commit"}):
            integration._train_in_this_world(None, trainer, 1)
    assert seen == [(False, True), (False, False)]
    assert trainer.args.ignore_data_skip
    assert trainer.args.eval_on_start


def test_a_scheduler_of_ones_own_begins_again_with_the_training(integration, begin, make):
    """A world that is lost before its first commit has stepped it: a newcomer's would have another learning rate."""
    trainer = make()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    progress = integration.TrainerProgress()
    progress.begin(trainer)
    with begin(trainer, integration.Run(SimpleNamespace(), progress)):
        trainer.create_scheduler(10)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.optimizer.param_groups[0]["lr"] = 0.1  # the state restores the optimizer
        trainer.create_scheduler(10)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert trainer.lr_scheduler.last_epoch == 1
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def quantized():
    """Its weights are tensors of a class of their own."""
    model = torch.nn.Linear(1, 1)
    model.weight = torch.nn.Parameter(model.weight.data.as_subclass(type("Int8", (torch.Tensor,), {})))
    return model


def test_other_models_of_a_trainer_are_in_the_state(integration, make, monkeypatch):
    """A callback may move a reference model: a newcomer trained with that of the program's beginning."""
    monkeypatch.setattr(integration, "frameworks", lambda: SimpleNamespace(forget=lambda _: None))
    monkeypatch.setattr(integration, "elastic", lambda _: lambda state, *_: state)
    trainer = make()
    trainer.ref_model, trainer.scale, trainer.small = torch.nn.Linear(1, 1), torch.nn.ReLU(), quantized()
    trainer.model_wrapped = torch.nn.ModuleList([trainer.model])  # it has no tensors of its own
    state = integration.train(trainer)
    assert state.ref_model is trainer.ref_model
    assert list(state._contents.named(torch.nn.Module)) == ["model", "ref_model"]


def in_inference_mode():
    with torch.inference_mode():
        return torch.nn.Linear(1, 1)


def graph():
    model = torch.nn.Linear(1, 1)
    model.register_buffer("edges", torch.eye(2).to_sparse())
    return model


def metric():
    kind = type("Distance", (torch.nn.Linear,), {"__module__": "torchmetrics.image"})
    return kind(1, 1)  # as one that compares what a network says of images


def repeated():
    model = torch.nn.Linear(1, 1)
    model.weight = torch.nn.Parameter(torch.ones(1).expand(2, 1), requires_grad=False)
    return model


@pytest.mark.parametrize(
    "others",
    [
        {"distance": metric()},
        {"graph": graph()},
        {"teacher": in_inference_mode()},
        {"teacher": repeated()},
        {"teacher": torch.nn.Linear(1, 1, device="meta")},
        {"report": torch.nn.Linear(1, 1), "progress": torch.nn.Linear(1, 1)},
    ],
    ids=["metric", "sparse", "inference mode", "repeated", "meta", "names"],
)
def test_what_a_state_cannot_keep_does_not_hinder_a_trainer(integration, make, monkeypatch, others):
    """It is left out: such a Trainer was refused, or failed at the first break or newcomer. Some names are taken."""
    monkeypatch.setattr(integration, "frameworks", lambda: SimpleNamespace(forget=lambda _: None))
    monkeypatch.setattr(integration, "elastic", lambda _: lambda state, *_: state)
    trainer = make()
    vars(trainer).update(others)
    assert list(integration.train(trainer)._contents.named(torch.nn.Module)) == ["model"]


def test_an_evaluation_may_log_more_than_numbers(integration, make):
    """Such as a confusion matrix of `compute_metrics`: the step after it ended the job."""
    trainer, found = make(), integration.TrainerProgress()
    trainer.create_optimizer_and_scheduler(10)
    trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = torch.zeros(()), 0.0, 0
    metrics = {"loss": torch.tensor(0.5), "matrix": torch.eye(2), "day": date(2026, 1, 2), "step": 1}
    trainer.state.log_history.append(metrics | {"counts": np.array([1, 2]), "f1": np.float32(0.5)})
    found.capture(trainer, 0, 0)
    plain = {"loss": 0.5, "matrix": [[1.0, 0.0], [0.0, 1.0]], "day": "2026-01-02", "step": 1}
    assert found._history() == [plain | {"counts": [1, 2], "f1": 0.5}]


@pytest.mark.parametrize("calls", ["for the loss", "for the outputs too", ""])
def test_a_training_step_of_ones_own_calculates_its_loss_where_it_is_weighed(integration, begin, make, calls):
    """Else samples of a smaller share would count more, and nothing would say so."""

    def training_step(self, model, inputs):
        if calls == "for the outputs too":
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            assert torch.equal(outputs, model(inputs["x"]))
        else:
            loss = self.compute_loss(model, inputs) if calls else model(inputs["x"]).mean()
        return loss.detach()

    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(inputs["x"])
        return (outputs.mean(), outputs) if return_outputs else outputs.mean()

    trainer = make({"training_step": training_step, "compute_loss": compute_loss})
    run = integration.Run(SimpleNamespace(), integration.TrainerProgress())
    run.sizes, run.samples, run.batches = [1], 2, SimpleNamespace(parts=1)
    with begin(trainer, run):
        inputs = {"x": torch.ones(1, 1)}
        if calls:
            assert trainer.training_step(trainer.model, inputs) == trainer.model(inputs["x"]).item() / 2
        else:
            with pytest.raises(UsageError, match=r"^Mine has its own training_step\(\).*Calculate it in compute_loss"):
                trainer.training_step(trainer.model, inputs)


def test_a_stream_with_a_length_is_refused(integration, make):
    """Its samples have no indices, and the DataLoader would speak of an option that the user has not set."""
    trainer = make()
    trainer.train_dataset = type(
        "Stream", (torch.utils.data.IterableDataset,), {"__len__": lambda _: 4, "__iter__": iter}
    )()
    with pytest.raises(UsageError, match=r"^a Stream has no length or no indices.*whose samples have indices"):
        integration._check(trainer)
