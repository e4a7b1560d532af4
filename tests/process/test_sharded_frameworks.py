"""Models that Accelerate, Lightning and Hugging Face's Trainer shard with FSDP2 lose ranks and train on."""

import functools

import pytest

from tests.process import sharded_framework_programs as programs
from tests.process import sharded_lightning_programs
from tests.process.training import lines_in

CLOSE = {"rel": 1e-9, "abs": 1e-12}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster whose workers have imported the frameworks already."""
    import nbelastic as nbe

    options = {
        "preload": ["nbelastic.integrations.accelerate", "lightning"],
        "log_dir": tmp_path_factory.mktemp("logs"),
    }
    with nbe.Cluster("localhost:3", min=1, cooldown=(0, 0), **options) as one:
        yield one


@pytest.fixture
def run(cluster, tmp_path):
    """Run a program on three workers, of which one is killed in each place; returns one result per rank of the last world."""

    def start(program, places):
        cluster.wait(3, timeout=60)
        found = cluster.run(program, str(tmp_path), places).result(timeout=60)
        assert places.keys() <= {path.name for path in tmp_path.iterdir()}
        return found

    return start


def lost_steps(folder):
    """For each world after the first, how many steps that a rank had made were made again."""
    begins = {line["generation"]: line["begin"] for line in lines_in(folder) if "begin" in line}
    steps = [(line["generation"], line["step"]) for line in lines_in(folder) if "step" in line]
    return [
        max((step for made_in, step in steps if made_in < generation), default=0) - begins[generation]
        for generation in sorted(begins)[1:]
    ]


def check(found, expected, folder):
    """All ranks end with the weights and the learning rate of one process, and no loss cost more than one step."""
    for one in found:
        assert (one["steps"], one["lr"]) == (expected["steps"], pytest.approx(expected["lr"]))
        assert one["weights"] == pytest.approx(expected["weights"], **CLOSE)
    lost = lost_steps(folder)
    assert len(lost) >= 2
    assert max(lost) <= 1


@pytest.mark.soak(share=0.2)
def test_accelerate_loses_two_of_three_ranks(run, tmp_path):
    """One while it accumulates gradients, one in a step: `prepare` shards a new model in each world."""
    found = run(programs.train_with_accelerate, {"in an accumulation": 6, "before a step": 9})
    check(found, programs.train_in_one_process(), tmp_path)


def test_accelerate_shards_a_model_that_is_made_once(run, tmp_path):
    """The first rank is lost before the first step: model, optimizer and scheduler are again what they were."""
    program = functools.partial(programs.train_with_accelerate, made_once=True)
    found = run(program, {"before a step": 0, "in an accumulation": 6})
    check(found, programs.train_in_one_process(), tmp_path)


def test_lightnings_trainer_loses_two_of_three_ranks(run, tmp_path):
    """One in a backward pass, one in a validation: the module is whole again before each world, and sharded anew."""
    places = {"before a backward pass": 4, "in a validation": 10}
    found = run(sharded_lightning_programs.train_with_trainer, places)
    check(found, programs.train_in_one_process(), tmp_path)
    assert {one["validations"] for one in found} == {programs.EPOCHS}
    assert list(tmp_path.rglob("*.ckpt"))


def test_fabric_loses_two_of_three_ranks(run, tmp_path):
    """In a loop that accumulates gradients without communication."""
    found = run(sharded_lightning_programs.train_with_fabric, {"before a backward pass": 4, "before a step": 9})
    check(found, programs.train_in_one_process(), tmp_path)
