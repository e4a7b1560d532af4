"""A program that trains all parts of `sharded_parts` at once, through a kill, a growth and a planned removal."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import nbelastic as nbe

KILL_AT, FULL_AT, LESS_AT, END = 2, 3, 5, 7  # steps
SIZE, LESS = 4, 2


def train(folder: str, parts: dict[str, Any], init: Any = None) -> dict[str, Any]:
    """Kill rank 2 within step `KILL_AT`, wait for `SIZE` ranks at `FULL_AT` and for `LESS` at `LESS_AT`.

    Returns "values": all tensors at the end; "worlds": the sizes of the worlds by their first step; "equal": how many
    worlds began with exactly the values of the last commit.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from nbelastic.sharded.parameters import plain_name
    from tests.process import sharded_parts as sp

    torch.set_num_threads(1)
    state = nbe.ShardedState(step=0)
    committed: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {"worlds": {}, "equal": 0}

    def whole(tensor: Any) -> Any:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    def contents(models: dict[str, Any], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Collective: all tensors, whole."""
        values = {}
        for name, model in models.items():
            values |= {f"{name}.{plain_name(key)}": whole(one) for key, one in model.named_parameters()}
            values |= {f"{name}.{plain_name(key)}": whole(one) for key, one in model.named_buffers()}
            for kind, one in made[name].items():
                if isinstance(one, torch.optim.Optimizer):
                    for number, group in enumerate(one.param_groups):
                        values[f"{name} {kind} {number} lr"] = torch.as_tensor(group["lr"]).clone()
                        for index, parameter in enumerate(group["params"]):
                            values |= {
                                f"{name} {kind} {number} {index} {key}": whole(value)
                                for key, value in one.state.get(parameter, {}).items()
                                if isinstance(value, torch.Tensor)
                            }
                else:
                    values[f"{name} {kind}"] = torch.tensor(one.last_epoch)
        return values

    def same(key: str, one: Any, other: Any) -> bool:
        """Ranks of a tensor dimension compute replicated values each for itself, which may differ in the last bit."""
        exact = parts[key.partition(".")[0].partition(" ")[0]].mesh[1] is None
        return torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-6, atol=1e-7)

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        meshes = {key: nbe.device_mesh(*key) for key in dict.fromkeys(part.mesh for part in parts.values())}
        models, made = {}, {}
        for name, part in parts.items():
            with torch.device("meta" if part.on_meta else "cpu"):
                models[name] = part.make()
            part.shard(models[name], meshes[part.mesh])
            made[name] = part.optimize(models[name])
        bound = {f"{name}_{kind}": one for name in parts for kind, one in made[name].items()}
        torch.manual_seed(sp.SEED)
        state.bind(**models, **bound, init=init)
        found["worlds"].setdefault(state.step, []).append(nbe.size())
        now = contents(models, made)
        if state.step in committed:
            before = committed[state.step]
            assert now.keys() == before.keys()
            odd = [(key, now[key], before[key]) for key in now if not same(key, now[key], before[key])]
            assert not odd, (state.step, odd)
            found["equal"] += 1
        while state.step < END:
            if (state.step, nbe.size()) in [(FULL_AT, n) for n in range(SIZE)] + [(LESS_AT, SIZE)]:
                (Path(folder) / f"waits-{state.step}").touch()
                time.sleep(0.005)
                state.commit()
                continue
            for name, part in parts.items():
                mesh = meshes[part.mesh]
                if "tensor" in (mesh.mesh_dim_names or ()):
                    tensor = mesh["tensor"].size()
                    share = nbe.rank() // tensor, nbe.size() // tensor
                else:
                    share = nbe.rank(), nbe.size()
                sp.add_gradients(part, models[name], state.step, share)
                for parameter in models[name].parameters():
                    if parameter.grad is not None and not isinstance(parameter, DTensor):
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= nbe.size()
            commits = state.commits
            state.commit()  # between gradients and step: it does not count
            assert state.commits == commits
            if state.step == KILL_AT and nbe.rank() == 2 and not (Path(folder) / "killed").exists():
                (Path(folder) / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            for name, part in parts.items():
                sp.finish_step(part, models[name], made[name])
            state.step += 1
            if state.step in (KILL_AT, FULL_AT, LESS_AT):
                committed[state.step] = contents(models, made)
            state.commit()
        values = contents(models, made)
        return found | {"values": values if nbe.rank() == 0 else None}

    result: dict[str, Any] = loop(state)
    return result
