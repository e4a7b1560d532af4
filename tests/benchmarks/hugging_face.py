"""How fast a Trainer and an Accelerate loop go on after a kill: `python -m tests.benchmarks.hugging_face [--json FILE]`.

Random ranks of three are killed. The model is a GPT-2 of 0.5 M parameters; other options are those of `recovery`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.benchmarks.recovery import Cases, faults, run

SAMPLES, BATCH = 600, 12


def _model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 256, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))


def _data() -> list[dict[str, Any]]:
    import torch

    texts = torch.randint(0, 256, (SAMPLES, 32), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": text, "labels": text} for text in texts]


def _line(step: int) -> str:
    here = {"t": time.time(), "step": step, "rank": nbe.rank(), "world": nbe.size(), "pid": os.getpid()}
    return json.dumps(here) + "\n"


def train_with_trainer(folder: str, steps: int) -> int:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from nbelastic.integrations.transformers import train

    with (Path(folder) / f"{os.getpid()}.jsonl").open("a", buffering=1) as log:

        class Lines(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                log.write(_line(state.global_step))

        options = {"per_device_train_batch_size": BATCH, "logging_steps": 10, "save_strategy": "no", "report_to": []}
        arguments = TrainingArguments(f"{folder}/out", max_steps=steps, disable_tqdm=True, **options)
        trainer = Trainer(_model(), arguments, train_dataset=_data(), callbacks=[Lines()])
        train(trainer, global_batch=BATCH)
        return int(trainer.state.global_step)


def train_with_accelerate(folder: str, steps: int) -> int:
    import torch

    from nbelastic.integrations.accelerate import Accelerator

    model, data = _model(), _data()
    optimizer = torch.optim.AdamW(model.parameters())
    state = nbe.TorchState(
        model=model, optimizer=optimizer, sampler=nbe.ElasticSampler(data, global_batch=BATCH), epoch=0
    )
    loader = torch.utils.data.DataLoader(data, sampler=state.sampler)

    with (Path(folder) / f"{os.getpid()}.jsonl").open("a", buffering=1) as log:

        @nbe.elastic
        def loop(state: Any) -> int:
            accelerator = Accelerator()
            model, optimizer, batches = accelerator.prepare(state.model, state.optimizer, loader)
            while state.commits < steps:
                for batch in batches:
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    log.write(_line(state.commits + 1))
                    state.commit()
                state.epoch += 1
            return int(state.commits)

        return int(loop(state))


def cases(part: int) -> Cases:
    options = {"size": 3, "preload": ["nbelastic.integrations.transformers"]}
    return {
        "trainer": lambda: faults(signal.SIGKILL, 20 // part, 1.0, train_with_trainer, **options),
        "accelerate": lambda: faults(signal.SIGKILL, 20 // part, 1.0, train_with_accelerate, **options),
    }


if __name__ == "__main__":
    run(__doc__, 4, cases)
