"""What the Trainer integration refuses and changes. `tests/process/test_frameworks.py` trains with it."""

import warnings
from importlib import import_module

import pytest
import torch

from nbelastic import UsageError


@pytest.fixture(scope="module")
def integration():
    """Imported late, because Transformers takes seconds; its warnings are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers")
        return import_module("nbelastic.integrations.transformers")


@pytest.fixture
def make(integration, tmp_path):
    """Make a Trainer, of a class that has these methods."""

    def trainer(methods=(), **options):
        transformers = import_module("transformers")
        arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **options)
        kind = type("Mine", (transformers.Trainer,), dict(methods))
        return kind(torch.nn.Linear(1, 1), arguments, train_dataset=[1, 2])

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
