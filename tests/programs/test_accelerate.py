"""What the Accelerate integration refuses, and its loader. `tests/process` trains with it, also with FSDP."""

import os
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
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nbelastic import ElasticSampler, UsageError
from nbelastic.worker import session
from tests.programs.integrations import import_integration
from tests.sharded.fake_world import fake_world
from tests.state.conftest import formation

DATA = list(range(10))


@pytest.fixture(scope="module")
def integration():
    return import_integration("accelerate", "accelerate_sharding")


def test_fsdp1_is_refused(integration, monkeypatch):
    """Also where the environment asks for it, as `accelerate launch` does."""
    with pytest.raises(UsageError, match=r"FullyShardedDataParallelPlugin\(fsdp_version=2"):
        integration.sharding_plugin(integration.FullyShardedDataParallelPlugin(fsdp_version=1))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(UsageError, match=r"FullyShardedDataParallelPlugin\(fsdp_version=2"):
        integration.sharding_plugin(None)


def test_parameters_on_the_cpu_of_a_gpu_are_refused(integration):
    with pytest.raises(UsageError, match="cpu_offload is not elastic: leave it out"):
        integration.sharding_plugin(integration.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True))


def test_fsdp2_is_taken_from_options_and_environment(integration, monkeypatch):
    plugin = integration.FullyShardedDataParallelPlugin(fsdp_version=2)
    assert integration.sharding_plugin(plugin) is plugin
    assert integration.sharding_plugin(None) is None
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert integration.sharding_plugin(None).fsdp_version == 2


@pytest.mark.parametrize("before", [None, "false"])
def test_a_later_program_of_this_worker_does_not_shard(integration, monkeypatch, before):
    """Accelerate sets a variable when it gets a plugin."""
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    if before is not None:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", before)
    with integration.unchanged_environment():
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert os.environ.get("ACCELERATE_USE_FSDP") == before


@pytest.fixture
def accelerator(integration, monkeypatch):
    """Of rank 1 of 3, of which the others do not exist."""
    monkeypatch.setattr(session, "world", lambda: formation(1, 3))
    elastic = import_module("nbelastic.integrations.accelerate")
    with fake_world(1, 3), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield elastic.Accelerator()
        elastic.AcceleratorState._reset_state(reset_partial_state=True)
        elastic.GradientState._reset_state()


def test_the_second_gpu_of_a_host_has_number_0_in_its_process(accelerator, monkeypatch):
    """A worker sees its own GPU only. Accelerate takes the local index for the GPU's number, for DDP and for barriers."""
    elastic = import_module("nbelastic.integrations.accelerate")
    found = []
    monkeypatch.setattr(elastic.ranks, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(elastic.ranks, "local_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "barrier", lambda **options: found.append(options["device_ids"]))
    monkeypatch.setattr(
        torch.nn.parallel,
        "DistributedDataParallel",
        lambda model, **options: found.append(options["device_ids"]) or model,
    )
    for make in (elastic.Accelerator, elastic.OneGpuAccelerator):
        elastic.renew_states()
        present = make(device_placement=False)
        present.prepare_model(torch.nn.Linear(1, 1))
        present.wait_for_everyone()
        assert present.local_process_index == 1
    assert found == [[0]] * 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": WeightedRandomSampler([1.0] * 10, 10)},
        {"sampler": SubsetRandomSampler(DATA)},
        {"batch_sampler": BatchSampler(RandomSampler(DATA), 2, drop_last=False)},
        {"batch_sampler": [[0, 1], [2, 3]]},
        {"sampler": BatchSampler(RandomSampler(DATA), 2, drop_last=False), "batch_size": None},
    ],
    ids=["shuffled", "weights", "a part", "a batch sampler", "batches of one's own", "batches as samples"],
)
def test_a_loader_that_chooses_samples_itself_is_refused(accelerator, options):
    """It would begin its epoch again in each world; the line says what to give."""
    with pytest.raises(
        UsageError, match=r"make DataLoader\(data, …, sampler=state.sampler\)\. torch.utils.data.Subset chooses"
    ):
        accelerator.prepare(DataLoader(DATA, **options))


@pytest.mark.parametrize("options", [{"batch_sampler": 2}, {"batch_size": None}, {"batch_size": 2, "drop_last": True}])
def test_an_elastic_loader_has_a_batch_size_and_no_more(accelerator, options):
    """With a batch sampler, Accelerate would share its batches once more; samples that are dropped would be recorded."""
    sampler = ElasticSampler(DATA)
    options = {**options, "sampler": sampler}
    if "batch_sampler" in options:
        options = {"batch_sampler": BatchSampler(options.pop("sampler"), 2, drop_last=False)}
    with pytest.raises(UsageError, match=r"make DataLoader\(data, batch_size=…, sampler=state.sampler\)"):
        accelerator.prepare(DataLoader(DATA, **options))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_size=2, drop_last=True),
        DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, drop_last=False)),
        DataLoader(Stream(), batch_size=2),
    ],
    ids=["a batch size", "a batch sampler", "a stream"],
)
def test_a_loader_for_an_evaluation_is_prepared_as_always(accelerator, loader):
    """Also a second time, as Accelerate allows."""
    prepared = accelerator.prepare(loader)
    assert accelerator.prepare(prepared) is prepared


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_gradient_has_its_weight_after_an_evaluation_that_was_left(accelerator, is_elastic):
    """Accelerate takes the loader of such an evaluation for the active one until the program ends."""
    sampler = ElasticSampler(DATA, global_batch=5)  # 2, 2 and 1 samples
    evaluated = ElasticSampler(DATA, global_batch=4) if is_elastic else None  # 2, 1 and 1 samples
    batches, others = accelerator.prepare(
        DataLoader(DATA, batch_size=5, sampler=sampler), DataLoader(DATA, sampler=evaluated)
    )
    weight = torch.nn.Parameter(torch.ones(()))
    gradients = []
    for _ in batches:
        for _ in others:
            break
        accelerator.backward(weight.clone())
        gradients.append(weight.grad.item())
        weight.grad = None
    assert gradients == pytest.approx([2 * 3 / 5] * 2)
    accelerator.backward(weight.clone())
    assert weight.grad == 1


def test_a_gradient_has_the_weight_of_the_first_batch_that_is_taken_alone(accelerator):
    """Python ends the pass over the loader before the gradient is made."""
    batches = accelerator.prepare(DataLoader(DATA, sampler=ElasticSampler(DATA, global_batch=5)))
    weight = torch.nn.Parameter(torch.ones(()))
    next(iter(batches))
    accelerator.backward(weight.clone())
    assert weight.grad.item() == pytest.approx(2 * 3 / 5)


@pytest.mark.parametrize("is_first", [True, False], ids=["before the loader", "after the loader"])
@pytest.mark.parametrize(("options", "expected"), [({"global_batch": 5}, True), ({}, False)])
def test_a_scheduler_steps_once_per_global_batch(accelerator, is_first, options, expected):
    """Whatever the program prepares first: else its learning rate changes as often per step as there are ranks."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
    values = [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
    values.insert(is_first, DataLoader(DATA, sampler=ElasticSampler(DATA, **options)))
    prepared = [accelerator.prepare(value) for value in values]
    assert prepared[not is_first].split_batches is expected


def test_batches_of_an_elastic_loader_are_not_skipped(accelerator):
    """It begins where the epoch is; Accelerate would make a loader that records nothing."""
    batches = accelerator.prepare(DataLoader(DATA, sampler=ElasticSampler(DATA)))
    assert accelerator.skip_first_batches(batches) is batches
    with pytest.raises(UsageError, match="leave out skip_first_batches"):
        accelerator.skip_first_batches(batches, 2)
    assert len(list(accelerator.skip_first_batches(accelerator.prepare(DataLoader(DATA)), 1))) == 3


def test_a_batch_size_of_all_ranks_is_the_samplers(accelerator):
    """Else each rank would take that many samples."""
    accelerator.dataloader_config.split_batches = True
    with pytest.raises(UsageError, match=r"write nbe.ElasticSampler\(data, global_batch=…\)"):
        accelerator.prepare(DataLoader(DATA, batch_size=6, sampler=ElasticSampler(DATA)))
    accelerator.prepare(DataLoader(DATA, batch_size=6, sampler=ElasticSampler(DATA, global_batch=6)))


def test_accelerates_checkpoint_does_not_replace_recovered_values(accelerator, monkeypatch):
    """A program that begins with `load_state` does so in each world; after a step it loads on purpose."""
    loaded, state = [], SimpleNamespace(commits=0)
    base = type(accelerator).__base__
    monkeypatch.setattr(base, "load_state", lambda _, folder: loaded.append((folder, state.commits)))
    monkeypatch.setattr(session, "current", lambda: SimpleNamespace(holder=SimpleNamespace(state=state)))
    accelerator.load_state("first")
    state.commits = 3
    accelerator.load_state("again")
    accelerator.backward(torch.nn.Parameter(torch.ones(())))
    accelerator.load_state("on purpose")
    assert loaded == [("first", 0), ("on purpose", 3)]


@pytest.mark.parametrize(
    ("options", "used", "expected"),
    [
        ({}, 0, 10),
        ({}, 3, 7),
        ({"drop_last": True}, 0, 9),
        ({"global_batch": 3}, 0, 10),
        ({"global_batch": 5}, 2, 8),
        ({"global_batch": 3}, 3, 7),
        ({"global_batch": 3, "drop_last": True}, 0, 9),
    ],
)
def test_what_is_gathered_in_an_epoch_is_as_much_as_it_has_samples(accelerator, options, used, expected):
    """No sample that counts is left out, and none is repeated, also in a smaller last batch that has unequal shares."""
    sampler = ElasticSampler(DATA, **options)
    sampler.used = used
    batches = accelerator.prepare(DataLoader(DATA, batch_size=2, sampler=sampler))
    others = accelerator.prepare(DataLoader(DATA))
    gathered = 0
    for batch in batches:
        gathered += len(accelerator.gather_for_metrics({"a": [batch]})["a"][0])
        for _ in others:
            break
    assert gathered == expected


@pytest.mark.parametrize("texts", [["a", "b"], ["a"], ["a", "b", "c"]])
def test_objects_are_gathered_as_they_are_unless_they_are_one_per_sample(accelerator, monkeypatch, texts):
    """Then the object of a repeated sample is left out."""
    elastic = import_module("nbelastic.integrations.accelerate")
    monkeypatch.setattr(elastic, "gather_object", lambda objects: objects)
    batches = accelerator.prepare(DataLoader(DATA, batch_size=2, sampler=ElasticSampler(DATA)))
    found = [accelerator.gather_for_metrics(texts, use_gather_object=True) for _ in batches]
    assert found == [texts, ["a"] if len(texts) == 2 else texts]  # the last of this rank's samples is repeated


def test_the_end_of_a_training_leaves_the_process_group(accelerator):
    """`end_training` finishes trackers. The elastic loop ends its group itself, and later lines may use it."""
    accelerator.end_training()
    assert torch.distributed.is_initialized()


def test_automatic_checkpoints_go_on_counting_in_a_later_world(accelerator, monkeypatch, tmp_path):
    """Each world makes an Accelerator, which counts from 0: Accelerate refuses a folder that exists."""
    elastic = import_module("nbelastic.integrations.accelerate")
    monkeypatch.setattr(elastic, "broadcast_object_list", lambda found: found)
    options = import_module("accelerate.utils").ProjectConfiguration
    saved = []
    for _ in range(2):
        present = elastic.Accelerator(project_config=options(str(tmp_path), automatic_checkpoint_naming=True))
        saved += [present.save_state(), present.save_state()]
    assert [os.path.basename(one) for one in saved] == [f"checkpoint_{number}" for number in range(4)]
