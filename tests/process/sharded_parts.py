"""Small models of every kind that `ShardedState` works with. The same models, not sharded, tell what the training must give."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BATCH = 12  # samples of each step, in every world
SEED = 7
Mesh = Any


@dataclass
class Part:
    """`make` builds the model, `shard` shards it over the meshes by name, `optimize` makes what is bound beside it."""

    make: Callable[[], nn.Module]
    shard: Callable[[nn.Module, Mesh], object]
    optimize: Callable[[nn.Module], dict[str, Any]]
    mesh: tuple[int | None, int | None] = (None, None)  # of `nbe.device_mesh(shard, tensor)`
    on_meta: bool = True
    whole_batch: bool = False  # every rank computes all samples: the buffers of the ranks are then equal
    micro_batches: int = 1
    clip: float = 0.0
    tolerance: float = 1e-5
    integers: int = 0  # the inputs are integers below


def mlp(*sizes: int, dtype: Any = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(sizes):
        layers += [nn.Linear(inner, outer, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def each(**options: Any) -> Callable[[nn.Module, Mesh], object]:
    """`fully_shard` on each layer with parameters, and on the model."""

    def shard(model: nn.Module, mesh: Mesh) -> None:
        from torch.distributed.fsdp import fully_shard

        for layer in model.children():
            if next(layer.parameters(), None) is not None:
                fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    return shard


def adamw(**options: Any) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda model: {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2, **options)}


def sgd(**options: Any) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda model: {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, **options)}


def with_schedule(model: nn.Module) -> dict[str, Any]:
    """The learning rate is halved every second step; it is a tensor."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(2e-2), foreach=False)
    return {"optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


def weights_and_biases(model: nn.Module) -> dict[str, Any]:
    """Two optimizers, one of them with two parameter groups."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights[:1], "lr": 1e-2}, {"params": weights[1:], "lr": 2e-2, "weight_decay": 0.1}]
    return {
        "optimizer": torch.optim.Adam(groups, amsgrad=True),
        "of_biases": torch.optim.SGD(biases, lr=0.1, momentum=0.9, nesterov=True),
    }


def frozen_first() -> nn.Module:
    model = mlp(6, 16, 16, 3)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return model


def only_the_middle(model: nn.Module, mesh: Mesh) -> None:
    """The first layer is frozen and the last one trained; both are whole on each rank."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[2], mesh=mesh)


class Tied(nn.Module):
    """A language model's head has the weights of its embedding. 11 rows are not divisible by any world."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: Any) -> Any:
        return self.head(torch.tanh(self.body(self.embedding(inputs)))).mean(dim=1)


def tied(model: nn.Module, mesh: Mesh) -> None:
    """Modules that share a parameter are sharded together."""
    from torch.distributed.fsdp import fully_shard

    fully_shard([model.embedding, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)


class Counted(nn.Module):
    """A BatchNorm, and a buffer that is in no `state_dict()`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(2), persistent=False)

    def forward(self, inputs: Any) -> Any:
        self.calls += 1
        return self.head(self.norm(self.body(inputs))) * (1 + 0.01 * self.calls[0])


class Attention(nn.Module):
    """Blocks of a transformer, with activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True) for _ in range(1)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Any) -> Any:
        found = inputs.unsqueeze(1) * torch.linspace(0.5, 1.5, 4).unsqueeze(1)
        for block in self.blocks:
            found = block(found)
        return self.head(found).mean(dim=1)


def checkpointed(model: nn.Module, mesh: Mesh) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    for index, block in enumerate(model.blocks):
        model.blocks[index] = fully_shard(checkpoint_wrapper(block), mesh=mesh)
    fully_shard(model, mesh=mesh)


def compiled(model: nn.Module, mesh: Mesh) -> None:
    from torch.distributed.fsdp import fully_shard

    for index in (0, 2):
        model[index] = fully_shard(torch.compile(model[index], backend="eager"), mesh=mesh)
    fully_shard(model, mesh=mesh)


def in_bfloat16(model: nn.Module, mesh: Mesh) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    each(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))(model, mesh)


def tensor_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Columns and rows over the ranks of a host; `fully_shard` over the hosts, in the same dimension for the columns."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = [name for name in mesh.mesh_dim_names if name != "tensor"]
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh[tuple(names)] if len(names) > 1 else mesh[names[0]])


PARTS = {
    "resharded": Part(lambda: mlp(6, 16, 3), each(reshard_after_forward=True), with_schedule, clip=0.5),
    "kept": Part(lambda: mlp(6, 16, 3), each(reshard_after_forward=False), adamw(fused=True), micro_batches=2),
    "some": Part(frozen_first, only_the_middle, sgd(momentum=0.9)),
    "odd": Part(lambda: mlp(6, 3, 2), each(), weights_and_biases),
    "counted": Part(Counted, each(), sgd(), on_meta=False, whole_batch=True),
    "attention": Part(Attention, checkpointed, sgd()),
    "mixed": Part(lambda: mlp(6, 16, 3), in_bfloat16, adamw(), tolerance=0.05),
    "half": Part(lambda: mlp(6, 16, 3, dtype=torch.bfloat16), each(), sgd(momentum=0.9), tolerance=0.05),
    "tied": Part(Tied, tied, sgd(), integers=11),  # last: the plain head draws numbers that are not used
}
MESHES = {
    "columns": Part(lambda: mlp(6, 16, 4), tensor_parallel, adamw(), mesh=(None, 2)),
    "replicas": Part(lambda: mlp(6, 5, 3), each(), adamw(amsgrad=True), mesh=(2, None), clip=0.5),
    "both": Part(lambda: mlp(6, 8, 4), tensor_parallel, sgd(momentum=0.9), mesh=(1, 2)),
}
COMPILED = {
    "compiled": Part(lambda: mlp(6, 16, 3), compiled, adamw()),
}


def batch(part: Part, step: int) -> tuple[Any, Any]:
    """The inputs and targets of a step."""
    generator = torch.Generator().manual_seed(step)
    if part.integers:
        return torch.randint(part.integers, (BATCH, 4), generator=generator), torch.zeros(BATCH, part.integers)
    inputs = torch.randn(BATCH, 6, generator=generator)
    return inputs, inputs[:, :1].sin()


def add_gradients(part: Part, model: nn.Module, step: int, share: tuple[int, int] = (0, 1)) -> None:
    """Of the loss of a step; this rank computes the part `share` (index, number of parts) of the samples."""
    index, count = (0, 1) if part.whole_batch else share
    inputs, targets = (one[BATCH * index // count : BATCH * (index + 1) // count] for one in batch(part, step))
    if not part.integers:
        inputs = inputs.to(next(model.parameters()).dtype)
    for piece, wanted in zip(inputs.chunk(part.micro_batches), targets.chunk(part.micro_batches), strict=True):
        loss = (model(piece) - wanted).square().sum() * count / BATCH
        loss.backward()


def finish_step(part: Part, model: nn.Module, made: dict[str, Any]) -> None:
    """Clip the gradients, let optimizers and schedulers step, and drop the gradients."""
    if part.clip:
        nn.utils.clip_grad_norm_(model.parameters(), part.clip)
    for one in made.values():
        one.step()
    model.zero_grad()


def set_values(model: nn.Module) -> None:
    """First values by the functions of `torch.nn.init`, of sharded and of whole models."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.trunc_normal_(parameter, std=0.4)
        else:
            nn.init.uniform_(parameter, -0.1, 0.1)


def trained_whole(parts: dict[str, Part], steps: int, init: Callable[[Any], object] | None = None) -> dict[str, Any]:
    """The parameters and buffers after the same steps in one process, by part, name and tensor."""
    models = {}
    torch.manual_seed(SEED)
    for name, part in parts.items():
        if part.on_meta:
            models[name] = part.make()
    if init is not None:
        torch.manual_seed(SEED)
    for name, part in parts.items():
        if not part.on_meta:
            models[name] = part.make()
        if init is not None:
            with torch.no_grad():
                init(models[name])
    found = {}
    for name, part in parts.items():
        made = part.optimize(models[name])
        for step in range(steps):
            add_gradients(part, models[name], step)
            finish_step(part, models[name], made)
        found[name] = {
            key: one.detach() for key, one in (*models[name].named_parameters(), *models[name].named_buffers())
        }
    return found
