"""How Lightning sees the world of an elastic job: its ranks, its devices, its process group. For Trainer and Fabric."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import lightning.fabric.connector
import lightning.fabric.strategies as fabric_strategies
import lightning.pytorch.strategies as trainer_strategies
import lightning.pytorch.trainer.connectors.accelerator_connector
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed

from nbelastic.errors import NoWorldError, UsageError
from nbelastic.state.state import TorchState
from nbelastic.worker import ranks, session

REFUSED = (
    "{strategy} is not supported in an elastic job: use the strategy auto, ddp, or for a sharded model "
    "ModelParallelStrategy(tensor_parallel_size=1) with torch's fully_shard (FSDP2)."
)

SPLITS_LAYERS = (
    "ModelParallelStrategy(tensor_parallel_size={size!r}) may split each layer over the devices of a host, which is not elastic "
    'in Lightning: write tensor_parallel_size=1, and fully_shard with the mesh "data_parallel".'
)


def not_interactive() -> None:
    """Lightning refuses DDP where it finds `sys.ps1`, which each worker's engine sets: but here no process is started."""
    with contextlib.suppress(NoWorldError):
        session.current()
        lightning.fabric.connector._IS_INTERACTIVE = False
        lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE = False


def check_strategy(strategy: Any) -> None:
    """UsageError unless it is plain DDP, a single device, or FSDP2 over all ranks."""
    where = (fabric_strategies, trainer_strategies)
    if type(strategy) in [one.ModelParallelStrategy for one in where]:
        if strategy._tensor_parallel_size != 1:
            raise UsageError(SPLITS_LAYERS.format(size=strategy._tensor_parallel_size))
    elif not isinstance(strategy, InThisWorld) and type(strategy) not in [
        kind for one in where for kind in (one.DDPStrategy, one.SingleDeviceStrategy)
    ]:
        raise UsageError(REFUSED.format(strategy=strategy if isinstance(strategy, str) else type(strategy).__name__))


def trained_by(strategy: Any) -> dict[str, Any]:
    """The values of the state beside the module: optimizers, whose steps are short from here on, and what belongs to them."""
    for optimizer in strategy.optimizers:
        run_closure_first(optimizer)
    return {
        **{f"optimizer_{i}": one for i, one in enumerate(strategy.optimizers)},
        **{f"scheduler_{i}": one.scheduler for i, one in enumerate(strategy.lr_scheduler_configs)},
        **({"precision": strategy.precision_plugin} if strategy.precision_plugin.state_dict() else {}),
    }


def run_closure_first(optimizer: Any) -> None:
    """Lightning's closures run the backward pass inside `optimizer.step`. Run them before it, so that a step is short.

    Then no collective comes between the beginning of a step and its commit, and commits copy nothing. Each optimizer of
    torch but LBFGS calls its closure once, first of all; others may call it again, so they are left alone.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
        return
    step = optimizer.step

    @functools.wraps(step)
    def step_after(_: Any, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        if closure is None:
            return step(**options)
        result = closure()
        return step(closure=lambda: result, **options)

    optimizer.step = MethodType(step_after, optimizer)  # a scheduler that is made later wraps a method


def _trained(module: Any) -> list[bool]:
    return [parameter.requires_grad for parameter in module.parameters()]


class ElasticEnvironment(ClusterEnvironment):  # type: ignore[misc]  # mypy does not follow lightning
    """The present world. Before there is one, no process is rank 0: none of them writes files or prints for all."""

    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 0

    @staticmethod
    def detect() -> bool:
        return False  # Lightning chooses it never by itself

    def world_size(self) -> int:
        return self._formation().world_size if self._formation() else 1

    def global_rank(self) -> int:
        return self._formation().rank if self._formation() else 1

    def local_rank(self) -> int:
        return self._formation().local_rank if self._formation() else 0

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        """The world has the size that it has."""

    def set_global_rank(self, rank: int) -> None:
        """The same."""

    def _formation(self) -> Any:
        with contextlib.suppress(NoWorldError):
            return session.world()
        return None


class InThisWorld:
    """What both strategies change: the device of this worker, and the process group, which the elastic loop has made."""

    accelerator: Any
    global_rank: int
    world_size: int

    @property
    def root_device(self) -> torch.device:
        is_cpu = type(self.accelerator).__name__ == "CPUAccelerator"
        return torch.device("cpu") if is_cpu else ranks.device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        """The workers run already."""


class ElasticStrategy(InThisWorld, trainer_strategies.DDPStrategy):  # type: ignore[misc]
    """Of a Trainer. Its module is wrapped in DDP anew in each world; `weigh()` is the factor of this rank's loss."""

    weigh: Any = None
    _trained: Any = None  # for each parameter, whether it was trained when DDP was made

    def setup_distributed(self) -> None:
        """The elastic loop makes the process group."""
        reset_seed()
        self.set_world_ranks()

    def configure_ddp(self) -> None:
        """Lightning's setup runs before there is a world."""

    def make_state(self, **small: Any) -> TorchState:
        """Lightning has made the optimizers."""
        return TorchState(module=self.lightning_module, **small, **trained_by(self))

    def enter(self, state: TorchState) -> None:  # noqa: ARG002
        """Wrap the module for the present world, of which this is a rank."""
        self.set_world_ranks()
        self._wrap()

    def begin_epoch(self) -> None:
        """Wrap the module again if layers were unfrozen: DDP adds up the gradients of what is trained when it is made."""
        if self._trained != _trained(self.lightning_module):
            self._wrap()

    def _wrap(self) -> None:
        self.model = self.lightning_module
        super().configure_ddp()
        self._trained = _trained(self.lightning_module)

    def commit(self, state: TorchState) -> None:
        state.commit()

    def leave(self, *, is_over: bool) -> None:  # noqa: ARG002
        """Drop the wrapper: it would keep the old process group."""
        self.model = self.lightning_module

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weighed: torch.Tensor = super().backward(closure_loss * self.weigh(), *args, **kwargs)
        return weighed


class ElasticFabricStrategy(InThisWorld, fabric_strategies.DDPStrategy):  # type: ignore[misc]
    """Of a Fabric."""

    @classmethod
    def like(cls, strategy: Any, environment: Any) -> ElasticFabricStrategy:
        """As the user's own, in the present world. The state is the same on all ranks, so DDP need not send it."""
        options = {"init_sync": False, **getattr(strategy, "_ddp_kwargs", {})}
        plugins = {"checkpoint_io": strategy._checkpoint_io, "precision": strategy._precision}
        return cls(cluster_environment=environment, **plugins, **options)

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
