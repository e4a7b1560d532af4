"""Hugging Face's Trainer and Accelerate train on when ranks are killed, and end where an undisturbed training ends."""

import functools

import pytest

from tests.process import framework_programs
from tests.process.training import lines_in
from tests.support.waiting import until

CLOSE = {"rel": 1e-9, "abs": 1e-12}
SINGLE = {"rel": 1e-6, "abs": 1e-7}  # the Trainer adds losses, and Llama computes its loss, in single precision


def flat(weights):
    return [number for one in weights for number in one]


@pytest.fixture(scope="module")
def frameworks(tmp_path_factory):
    """A cluster whose workers have imported both frameworks already."""
    import nbelastic as nbe

    options = {"preload": ["nbelastic.integrations.transformers"], "env": {"HF_HUB_OFFLINE": "1"}}
    with nbe.Cluster("localhost:3", min=1, cooldown=(0, 0), log_dir=tmp_path_factory.mktemp("logs"), **options) as one:
        yield one


@pytest.fixture
def run(frameworks, tmp_path):
    """Run a program on three workers; returns one result per rank of the last world."""

    def start(program, *args):
        frameworks.wait(3, timeout=60)
        return frameworks.run(program, str(tmp_path), *args).result(timeout=60)

    return start


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        pytest.param("llama", {"in an evaluation": 9, "in a step": 15}, marks=pytest.mark.soak(share=0.2)),
        ("bert", {"in a step": 6, "after a commit": 20}),
        ("own loss", {"after a commit": 3, "in an evaluation": 18}),
        pytest.param("sharded llama", {"in an evaluation": 9, "in a step": 15}, marks=pytest.mark.soak(seconds=8)),
        ("sharded bert", {"before a commit": 1, "after a commit": 20}),
    ],
    ids=["counts labels", "mean loss", "own loss", "sharded", "sharded mean loss"],
)
def test_a_trainer_loses_two_of_three_ranks(run, tmp_path, kind, places):
    """Weights, log, learning rate and epochs are those of `trainer.train()` in one process, in worlds of 3, 2 and 1."""
    program, sharded = framework_programs.train_elastic, kind.startswith("sharded")
    kind = kind.removeprefix("sharded ")
    if sharded:
        layer = {"llama": "LlamaDecoderLayer", "bert": "BertLayer"}[kind]
        program = functools.partial(program, fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": [layer]})
    found = run(program, kind, places)
    assert places.keys() <= {path.name for path in tmp_path.iterdir()}
    alone = run(framework_programs.train_alone, kind)[0]
    assert alone["step"] == 27
    for one in found:
        assert one["step"] == alone["step"]
        assert one["loss"] == pytest.approx(alone["loss"], **SINGLE)
        assert flat(one["weights"]) == pytest.approx(flat(alone["weights"]), **(SINGLE if kind == "llama" else CLOSE))
        assert len(one["history"]) == len(alone["history"])
        for mine, expected in zip(one["history"], alone["history"], strict=True):
            mine.pop("total_flos", None), expected.pop("total_flos", None)
            assert mine == pytest.approx(expected, **SINGLE)
    lines = [line for line in lines_in(tmp_path) if "step" in line]
    assert {line["step"] for line in lines} == set(range(1, 28))
    assert len({line["generation"] for line in lines}) >= 3


def test_an_accelerate_loop_loses_two_of_three_ranks(run, tmp_path):
    """Every sample is used once per epoch, and weights and learning rate are those of an undisturbed training."""
    undisturbed = run(framework_programs.train_with_accelerate, False)[0]
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    found = run(framework_programs.train_with_accelerate, True)
    assert {"after 3 steps", "after 5 steps"} <= {path.name for path in tmp_path.iterdir()}
    for one in found:
        assert (one["lr"], one["commits"]) == (undisturbed["lr"], undisturbed["commits"])
        assert flat(one["weights"]) == pytest.approx(flat(undisturbed["weights"]), **CLOSE)


def test_what_cannot_be_elastic_is_refused_in_words(run):
    """Each error says what to write instead."""
    for errors in run(framework_programs.try_what_is_refused):
        expected = (
            "give the Trainer a data set with a length",
            "give train_dataset and data_collator to the Trainer instead",
            'use "random" or "sequential"',
            "set per_device_train_batch_size",
            "from nbelastic.integrations.accelerate import Accelerator",
            "write FullyShardedDataParallelPlugin(fsdp_version=2, …)",
            "give nbe.ShardedState(…) samplers and counters",
            "make DataLoader(data, …, sampler=state.sampler)",
        )
        assert len(errors) == len(expected), errors
        for error, advice in zip(errors, expected, strict=True):
            assert advice in error
            assert "\n" not in error


TRAINER = """
import torch
from transformers import Trainer, TrainingArguments
from nbelastic.integrations.transformers import train

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels):
        loss = (self.layer(x) - labels).square().mean()
        return {"loss": loss}

arguments = TrainingArguments(
    FOLDER, learning_rate=RATE, max_steps=100_000, warmup_steps=2, save_strategy="no", report_to=[],
)
data = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(30)]
trainer = Trainer(Net(), arguments, train_dataset=data)
train(trainer, global_batch=6)
"""


def test_a_new_program_sets_the_learning_rate_of_a_trainer(frameworks, tmp_path, capsys):
    """Its schedule goes on with the new rate, also on a newcomer. A line names the argument that was edited.

    The old program's progress bar is not drawn any more.
    """

    def rates():
        found = "trainer.lr_scheduler.base_lrs, trainer.optimizer.param_groups[0]['lr'] <= 0.001"
        answers = frameworks.execute(f"print({found})", at_commit=True)
        return {answer.stdout for answer in answers}

    old = TRAINER.replace("FOLDER", repr(str(tmp_path)))
    job = frameworks.run_cell(old.replace("RATE", "0.003"))
    frameworks.step(5)
    assert rates() == {"[0.003, 0.003] False\n"}
    frameworks.resume()
    frameworks.run_cell(old.replace("RATE", "0.001"), swap=True)
    assert "the new program sets learning_rate.\n" in capsys.readouterr().out
    frameworks.wait(3)
    assert rates() == {"[0.001, 0.001] True\n"}
    bars = "from tqdm import tqdm\nprint(len(tqdm._instances))"
    assert [answer.stdout for answer in frameworks.execute(bars, at_commit=True, ranks=[0])] == ["1\n"]
    restarted = frameworks.workers[0].id
    frameworks.restart(restarted)
    until(lambda: restarted not in {worker.id for worker in frameworks.workers}, what=f"the end of {restarted}")
    frameworks.wait(3)
    assert rates() == {"[0.001, 0.001] True\n"}
    job.stop()
    job.wait(timeout=30)
