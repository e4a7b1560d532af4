"""Trainings with Hugging Face's Trainer and Accelerate whose ranks kill themselves, and the same ones undisturbed.

All are in double precision, so that the results of worlds of different sizes are equal to twelve digits.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.process.programs import Log, generation

SAMPLES, BATCH, EPOCHS = 100, 12, 3  # each epoch ends with a batch of 4: fewer than the parts of three ranks


def die_once(folder: str, where: str) -> None:
    """The last rank kills itself here, the first time that a rank comes here."""
    if nbe.size() > 1 and nbe.rank() == nbe.size() - 1:
        try:
            Path(folder, where).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def _make_trainer(folder: str, kind: str, callback: Any, **options: Any) -> Any:
    import torch
    import transformers

    generator = torch.Generator().manual_seed(3)
    common = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "llama":  # it divides its loss by the number of labels in the whole batch
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.LlamaConfig(**common, **sizes, max_position_embeddings=8)
        model = transformers.LlamaForCausalLM(config)
    else:  # its loss is a mean, although it takes the number of labels
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.BertConfig(
            **common, **sizes, max_position_embeddings=8, hidden_dropout_prob=0, attention_probs_dropout_prob=0
        )
        model = transformers.BertForSequenceClassification(config)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    texts = torch.randint(1, 20, (SAMPLES, 6), generator=generator)
    labels = texts.clone() if kind == "llama" else texts.sum(1) % 2
    if kind == "llama":
        labels[::3, 3:] = -100  # the samples have different numbers of labels
    data = [{"input_ids": text, "labels": label} for text, label in zip(texts, labels, strict=True)]
    arguments = transformers.TrainingArguments(
        f"{folder}/out",
        num_train_epochs=EPOCHS,
        logging_steps=4,
        eval_strategy="epoch",
        per_device_eval_batch_size=1,  # the Trainer's loss of an evaluation depends on the batches
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        optim="sgd",
        learning_rate=0.2,
        warmup_steps=5,
        train_sampling_strategy="sequential",
        **options,
    )
    equal = [one for number, one in enumerate(data) if number % 3][:12]  # they have equally many labels

    class OwnLoss(transformers.Trainer):
        """It has a mean loss of its own, as in many programs."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"])
            return (loss, {"loss": loss, "logits": outputs.logits}) if return_outputs else loss

    make = OwnLoss if kind == "own loss" else transformers.Trainer
    return make(model, arguments, train_dataset=data, eval_dataset=equal, callbacks=[callback])


def weights(model: Any) -> list[list[float]]:
    """Collective if the model is sharded."""
    whole = [getattr(p, "full_tensor", p.clone)() for p in model.parameters()]
    return [one.detach().flatten().tolist() for one in whole]


def _result(trainer: Any, output: Any) -> dict[str, Any]:
    """What must not depend on the ranks that have come and gone."""
    timed = ("runtime", "per_second")
    history = [
        {name: value for name, value in entry.items() if not name.endswith(timed)}
        for entry in trainer.state.log_history
    ]
    return {
        "weights": weights(trainer.model),
        "history": history,
        "step": trainer.state.global_step,
        "loss": output.training_loss,
    }


def train_alone(folder: str, kind: str) -> dict[str, Any]:
    """Each rank trains by itself, without nbelastic: one process, whole batches."""
    from transformers import TrainerCallback

    options = {"per_device_train_batch_size": BATCH, "use_cpu": True}
    trainer = _make_trainer(f"{folder}/{os.getpid()}", kind, TrainerCallback(), **options)
    return _result(trainer, trainer.train())


def train_elastic(folder: str, kind: str, places: dict[str, int], **sharding: Any) -> dict[str, Any]:
    """The last rank kills itself once in each place, after this number of steps."""
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    from nbelastic.integrations.transformers import train

    log = Log(folder)

    class Disturbance(TrainerCallback, ExportableState):
        """It keeps a value of its own, as an early stopping does."""

        def __init__(self) -> None:
            self.seen = 0

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"seen": self.seen}}

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.die(state, "after a commit")

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.die(state, "in a step")

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.die(state, "in an evaluation")

        def die(self, state: Any, place: str) -> None:
            if places.get(place) == state.global_step:
                die_once(folder, place)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen += 1
            assert self.seen == state.global_step
            log(step=state.global_step, generation=generation(), world=nbe.size())
            self.die(state, "before a commit")

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = _make_trainer(folder, kind, Disturbance(), **options, **sharding)
    return _result(trainer, train(trainer, global_batch=BATCH))


def train_with_accelerate(folder: str, disturbed: bool) -> dict[str, Any]:
    """An ordinary loop of Accelerate, which accumulates gradients over two batches."""
    import torch
    from torch.nn.functional import mse_loss

    from nbelastic.integrations.accelerate import Accelerator

    log = Log(folder)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), x, x.prod(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    sampler = nbe.ElasticSampler(data, global_batch=BATCH)
    state = nbe.TorchState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, epoch=0)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, optimizer, batches, scheduler = accelerator.prepare(
            state.model, state.optimizer, loader, state.scheduler
        )
        for state.epoch in range(state.epoch, EPOCHS):
            for indices, inputs, targets in batches:
                whole, _ = accelerator.gather_for_metrics((indices, inputs))
                assert len(set(whole.tolist())) == len(whole) == (sampler.used % BATCH or BATCH)
                with accelerator.accumulate(model):
                    accelerator.backward(mse_loss(model(inputs), targets))
                    if disturbed and state.commits in (3, 5):  # the first epoch is used up after 5 steps
                        die_once(folder, f"after {state.commits} steps")
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                log(used=indices.tolist(), epoch=state.epoch, generation=generation(), weight=batches.weight)
                state.commit()
        return {
            "weights": weights(state.model),
            "lr": scheduler.get_last_lr(),
            "commits": state.commits,
        }

    return dict(loop(state))


def try_what_is_refused(folder: str) -> list[str]:
    """Return the errors of Trainers, an Accelerator and a loader that cannot be elastic."""
    import accelerate
    import torch
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from nbelastic.errors import UsageError
    from nbelastic.integrations.accelerate import Accelerator
    from nbelastic.integrations.transformers import train

    class OwnBatches(Trainer):
        def get_train_dataloader(self) -> Any:
            raise AssertionError

    errors: list[str] = []

    def note(attempt: Any) -> None:
        try:
            attempt()
        except UsageError as error:
            errors.append(str(error))

    def trainer(kind: Any = Trainer, data: Any = (1, 2), **options: Any) -> Any:
        arguments = TrainingArguments(f"{folder}/out", report_to=[], max_steps=2, **options)
        return kind(torch.nn.Linear(1, 1), arguments, train_dataset=data, callbacks=[TrainerCallback()])

    note(lambda: train(trainer(data=iter([1]))))
    note(lambda: train(trainer(OwnBatches)))
    note(lambda: train(trainer(train_sampling_strategy="group_by_length")))
    note(lambda: train(trainer(auto_find_batch_size=True)))

    @nbe.elastic
    def loop(state: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a worker that has used neither framework
        note(accelerate.Accelerator)
        note(lambda: Accelerator(fsdp_plugin=accelerate.FullyShardedDataParallelPlugin(fsdp_version=1)))
        sharding = Accelerator(fsdp_plugin=accelerate.FullyShardedDataParallelPlugin(fsdp_version=2))
        model = torch.nn.Linear(1, 1)
        note(lambda: sharding.prepare(model, torch.optim.SGD(model.parameters())))
        note(lambda: Accelerator().prepare(torch.utils.data.DataLoader([1, 2], shuffle=True)))

    loop(nbe.ObjectState(step=0))
    return errors
