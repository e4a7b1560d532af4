"""What the Lightning integration refuses, and when it calls closures. `tests/process/test_lightning.py` trains with it."""

import warnings
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from nbelastic import UsageError
from tests.programs.integrations import import_integration

DATA = list(range(10))


@pytest.fixture(scope="module")
def integration():
    return import_integration("lightning", "lightning")


@pytest.fixture(scope="module")
def run_closure_first(integration):
    return import_module("nbelastic.integrations.lightning_strategy").run_closure_first


@pytest.fixture
def share(integration):
    """Share the batches of a loader."""
    return lambda loader: integration.SharedSource(loader, "train_dataloader").dataloader()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize(
    "loader",
    [
        [DATA],
        DataLoader(Stream(), batch_size=2),
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2, drop_last=False)),
        DataLoader(DATA, batch_size=2, sampler=WeightedRandomSampler([1.0] * 10, 10)),
        DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, replacement=True)),
        DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, num_samples=3)),
        DataLoader(DATA, batch_size=2, sampler=SequentialSampler(range(3))),
    ],
    ids=["a list", "a stream", "a batch sampler", "weights", "replacement", "some at random", "the first ones"],
)
def test_data_that_cannot_be_shared_is_refused(share, loader):
    """Samples would be used twice or never; the line says what to give."""
    with pytest.raises(UsageError, match="give the elastic fit one plain DataLoader with a batch_size"):
        share(loader)


def test_an_epoch_has_the_same_batches_in_any_world(share):
    """The loader's batch size is that of the world, which outside of one is this process."""
    whole = share(DataLoader(DATA, batch_size=4))
    assert (len(whole), whole.batch_size, whole.dataset) == (3, 4, DATA)
    assert [batch.tolist() for batch in whole] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    full = share(DataLoader(DATA, batch_size=4, drop_last=True))
    assert len(full) == len(list(full)) == 2


def test_a_loader_draws_nothing_from_the_generator_of_the_training(share):
    """A new world would change what dropout does. The loader's processes get other seeds in each epoch."""
    batches, before, seeds = share(DataLoader(DATA, batch_size=4, shuffle=True)), torch.get_rng_state(), set()
    for epoch in range(3):
        batches.sampler.set_epoch(epoch)
        assert sorted(torch.cat(list(batches)).tolist()) == DATA
        seeds.add(batches._shares.generator.initial_seed())
    assert torch.equal(torch.get_rng_state(), before)
    assert len(seeds) == 3


def test_processes_of_a_loader_begin_with_the_epoch_that_is_set_after_them(share):
    """Lightning makes the iterator first where it resumes from its own checkpoint. They fetch batches at once."""
    batches = share(DataLoader(DATA, batch_size=4, shuffle=True, num_workers=1))
    begun = iter(batches)
    batches.sampler.set_epoch(1)
    assert torch.cat(list(begun)).tolist() == list(batches.sampler)


def test_fsdp1_and_split_layers_are_refused(integration):
    """With the line to write for a sharded model."""
    strategies = integration.L.pytorch.strategies
    with pytest.raises(
        UsageError, match=r"FSDPStrategy is not supported .* ModelParallelStrategy\(tensor_parallel_size=1\)"
    ):
        integration.check_strategy(strategies.FSDPStrategy())
    with pytest.raises(UsageError, match=r"fsdp is not supported .* ModelParallelStrategy\(tensor_parallel_size=1\)"):
        integration.Fabric(strategy="fsdp")
    with pytest.raises(UsageError, match=r"\(tensor_parallel_size='auto'\) .* write tensor_parallel_size=1"):
        integration.check_strategy(strategies.ModelParallelStrategy())
    integration.check_strategy(strategies.ModelParallelStrategy(tensor_parallel_size=1))


def test_a_fabric_takes_the_options_of_a_ddp_strategy(integration):
    """As `DDPStrategy(find_unused_parameters=True)`. A strategy of a Trainer is refused in words."""
    fabric, trainer = (import_module(f"lightning.{name}.strategies") for name in ("fabric", "pytorch"))
    made = integration.Fabric(strategy=fabric.DDPStrategy(find_unused_parameters=True), accelerator="cpu")
    assert made.strategy._ddp_kwargs == {"init_sync": False, "find_unused_parameters": True}
    assert integration.Fabric(accelerator="cpu").strategy._ddp_kwargs == {"init_sync": False}
    named = integration.Fabric(strategy="ddp_find_unused_parameters_true", accelerator="cpu")
    assert named.strategy._ddp_kwargs == {"init_sync": False, "find_unused_parameters": True}
    for one in (trainer.DDPStrategy(), trainer.ModelParallelStrategy(tensor_parallel_size=1)):
        with pytest.raises(UsageError, match=r"of lightning.fabric.strategies, and this one is a Trainer's"):
            integration.Fabric(strategy=one)


def test_lightnings_checkpoint_of_a_sharded_module_is_refused(integration):
    """A job resumes from its own."""
    strategy = integration.ElasticShardedStrategy()
    with pytest.raises(UsageError, match=r"leave out ckpt_path, and give the job a checkpoint folder"):
        strategy.load_checkpoint("last.ckpt")


def test_a_module_that_does_not_shard_itself_is_refused(integration):
    """Each rank would train a model of its own."""
    strategy = integration.ElasticShardedStrategy()
    strategy.connect(integration.L.LightningModule())
    with pytest.raises(UsageError, match=r"shards itself in configure_model\(\), with fully_shard"):
        strategy.check_module()


@pytest.mark.parametrize(("commit", "expected"), [(3, 6.0), (2, 3.0), (5, 6.0), (1, 0.0)])
def test_metrics_return_to_the_commit_that_the_world_returns_to(integration, commit, expected):
    """A step that is made again counts once. The last commit may be that of another rank."""
    module = torch.nn.Module()
    module.sum = import_module("torchmetrics").SumMetric()
    loops = SimpleNamespace(epoch_loop=SimpleNamespace(_results={}))
    connector = SimpleNamespace(_first_loop_iter=None, _current_fx=None)
    sums = integration.Sums(SimpleNamespace(fit_loop=loops, lightning_module=module, _logger_connector=connector))
    for number in (1.0, 2.0, 3.0):
        module.sum.update(number)
        sums.keep(int(number))
    module.sum.update(100.0)
    sums.restore(commit)
    assert module.sum.sum_value == expected


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "LearningRateFinder", "BatchSizeFinder"])
def test_a_callback_that_cannot_be_elastic_is_refused(integration, name):
    """At once, and not in the epoch in which it begins."""
    options = {"swa_lrs": 0.1} if name == "StochasticWeightAveraging" else {}
    trainer = SimpleNamespace(callbacks=[getattr(integration.L.pytorch.callbacks, name)(**options)], strategy=None)
    with pytest.raises(UsageError, match=f"^{name} "):
        integration.check_callbacks(trainer)


def test_a_validation_by_the_clock_is_refused(integration):
    """Each rank has its own: one would validate while the others train."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are Lightning's own
        trainer = integration.L.Trainer(val_check_interval="00:00:15:00", accelerator="cpu", logger=False)
    with pytest.raises(UsageError, match=r"^val_check_interval is a time.*give it a number of batches"):
        integration.fit(trainer)


def test_a_loss_in_a_validation_leaves_the_weights_and_their_average_apart(integration):
    """Lightning exchanges them while it validates; no commit notices it."""
    callback = integration.L.pytorch.callbacks.WeightAveraging()
    module = integration.L.LightningModule()
    module.layer = torch.nn.Linear(1, 1)
    callback.setup(None, module, "fit")
    torch.nn.init.constant_(module.layer.weight, 2.0)
    torch.nn.init.constant_(callback._average_model.module.layer.weight, 3.0)
    averages = integration.Averages(SimpleNamespace(callbacks=[callback], lightning_module=module))
    with averages.watched():
        for _ in range(2):
            callback.on_validation_epoch_start(None, module)
            assert module.layer.weight == 3
            averages.leave()
            assert module.layer.weight == 2
        callback.on_validation_epoch_start(None, module)
        callback.on_validation_epoch_end(None, module)
        averages.leave()
        assert module.layer.weight == 2
    assert averages.values() == {"average_0": callback._average_model}


def test_a_scheduler_may_be_made_when_the_training_has_begun(run_closure_first):
    """As in `on_train_start`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.tensor(3.0))], lr=0.1)
    run_closure_first(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_closure_runs_before_the_step(run_closure_first, kind):
    """So its backward pass comes before the step, and the values are the same."""

    def train(*, before):
        weight = torch.nn.Parameter(torch.tensor(3.0))
        optimizer = kind([weight], lr=0.1)
        order = []
        optimizer.register_step_pre_hook(lambda *_: order.append("step"))

        def closure():
            optimizer.zero_grad()
            loss = weight.square()
            loss.backward()
            order.append("closure")
            return loss.detach()

        if before:
            run_closure_first(optimizer)
        return [float(optimizer.step(closure)) for _ in range(3)], weight.item(), order

    first, inside = train(before=True), train(before=False)
    assert first[:2] == inside[:2]
    assert (first[2], inside[2]) == (["closure", "step"] * 3, ["step", "closure"] * 3)


def test_an_optimizer_that_may_call_its_closure_again_is_left_alone(run_closure_first):
    """LBFGS calls it many times in a step; an optimizer of another package may."""
    weight = torch.nn.Parameter(torch.tensor(3.0))
    foreign = type("SAM", (torch.optim.SGD,), {})([weight], lr=0.1)
    for optimizer in (torch.optim.LBFGS([weight]), foreign):
        run_closure_first(optimizer)
        assert "step" not in vars(optimizer)
