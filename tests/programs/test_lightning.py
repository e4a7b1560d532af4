"""What the Lightning integration refuses, and when it calls closures. `tests/process/test_lightning.py` trains with it."""

import warnings
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from nbelastic import UsageError
from nbelastic.worker import session
from tests.state.conftest import formation

DATA = list(range(10))


@pytest.fixture(scope="module")
def integration():
    """Imported late, because Lightning takes seconds; its warnings are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lightning")
        return import_module("nbelastic.integrations.lightning")


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
    assert len(whole) == 3
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


class LostError(Exception):
    """A rank is lost."""


def trained_twice(train):
    """In place of `elastic`: the world is lost once."""

    def loop(state):
        with pytest.raises(LostError):
            train(state)
        state.generation_ended(aborted=True)
        train(state)

    return loop


@pytest.fixture
def alone(integration, monkeypatch, tmp_path):
    """Fit a module in a world of one. `loop` stands for the elastic loop."""
    monkeypatch.setattr(session, "world", lambda: formation(0, 1))
    monkeypatch.setattr(integration, "frameworks", lambda: SimpleNamespace(forget=lambda _: None))
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)

    def fit(module, loop, *loaders, **options):
        monkeypatch.setattr(integration, "elastic", loop)
        trainer = integration.L.Trainer(
            num_sanity_val_steps=0, accelerator="cpu", default_root_dir=tmp_path, **quiet, **options
        )
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            integration.fit(trainer, module, *loaders)
        finally:
            dist.destroy_process_group()
        return trainer

    return fit


@pytest.mark.parametrize(("steps", "lost_in", "expected"), [(4, 0, "vvet"), (4, 1, "veet"), (3, 0, "eet")])
@pytest.mark.filterwarnings("ignore")
def test_a_loss_behind_the_last_step_leaves_out_no_validation_and_no_end(integration, alone, steps, lost_in, expected):
    """With `max_steps` all steps are done then. The epoch's last hooks save its checkpoint and log its metrics."""
    seen = []

    def note(hook):
        seen.append(hook)
        if len(seen) == lost_in + 1:
            raise LostError

    class Module(integration.L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            return self.layer(batch).square().mean()

        def validation_step(self, *_):
            note("v")

        def on_train_epoch_end(self):
            note("e")

        def on_train_end(self):
            seen.append("t")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = DataLoader(torch.randn(8, 1), batch_size=2), DataLoader(torch.ones(1, 1))
    trainer = alone(Module(), trained_twice, *data, max_steps=steps)
    assert "".join(seen) == expected
    assert trainer.global_step == steps


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_lightning_resumes_with_the_next_batch(integration, alone, tmp_path):
    """Also one that a callback saves right after a batch, and one of the last batch, which is smaller."""

    class Module(integration.L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), []

        def training_step(self, batch, _):
            self.seen.append(batch.flatten().tolist())
            return self.layer(batch).square().mean()

        def on_train_batch_end(self, *_):
            path = tmp_path / f"{self.trainer.global_step}.ckpt"
            if not path.exists():  # only in the first training
                self.trainer.save_checkpoint(path)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(*checkpoint):
        module, loader = Module(), DataLoader(torch.arange(5.0)[:, None], batch_size=2, shuffle=True)
        alone(module, lambda train: train, loader, None, None, *checkpoint, max_epochs=2)
        return module.seen

    whole = train()
    assert [len(batch) for batch in whole] == [2, 2, 1] * 2
    for steps in (1, 3, 5):
        assert train(tmp_path / f"{steps}.ckpt") == whole[steps:]


@pytest.mark.filterwarnings("ignore")
def test_a_newcomer_that_is_left_alone_ends_the_epoch_with_what_the_others_had_summed_up(integration, alone):
    """Its own mean would be 0 / 0, which ends the training if early stopping looks at it."""
    sent, means = {}, []

    class Module(integration.L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            self.log("mean", batch.mean(), on_step=False, on_epoch=True, sync_dist=True)
            return self.layer(batch).square().mean()

        def on_train_epoch_end(self):
            means.append(self.trainer.callback_metrics["mean"].item())
            if len(means) == 2:
                raise LostError

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def lost(train):
        def loop(state):
            with pytest.raises(LostError):
                train(state)
            state.generation_ended(aborted=True)
            sent.update(state._contents.small(), commits=state.commits)

        return loop

    def joins(train):
        def loop(state):
            state.commits = sent.pop("commits")
            state._contents.set_small(sent)
            train(state)

        return loop

    loader = DataLoader(torch.tensor([[1.0], [2.0], [6.0], [7.0]]), batch_size=2)
    for loop in (lost, joins):
        alone(Module(), loop, loader, max_epochs=3)
    assert means == [4.0] * 4
