"""How Lightning sees the world of an elastic job: its ranks, its devices, its process group. For Trainer and Fabric."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning.fabric.connector
import lightning.fabric.strategies as fabric_strategies
import lightning.pytorch.strategies as trainer_strategies
import lightning.pytorch.trainer.connectors.accelerator_connector
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed

from nbelastic.errors import NoWorldError, UsageError
from nbelastic.worker import ranks, session

REFUSED = (
    "{strategy} is not supported in an elastic job: use the strategy auto or ddp. For a sharded model write a plain loop with "
    "torch's fully_shard and nbe.ShardedState."
)


def not_interactive() -> None:
    """Lightning refuses DDP where it finds `sys.ps1`, which each worker's engine sets: but here no process is started."""
    with contextlib.suppress(NoWorldError):
        session.current()
        lightning.fabric.connector._IS_INTERACTIVE = False
        lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE = False


def check_strategy(strategy: Any) -> None:
    """UsageError unless it is plain DDP or a single device."""
    plain = (fabric_strategies, trainer_strategies)
    if type(strategy) not in [kind for where in plain for kind in (where.DDPStrategy, where.SingleDeviceStrategy)]:
        raise UsageError(REFUSED.format(strategy=type(strategy).__name__))


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


class _InThisWorld:
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


class ElasticStrategy(_InThisWorld, trainer_strategies.DDPStrategy):  # type: ignore[misc]
    """Of a Trainer. Its module is wrapped in DDP anew in each world; `weigh()` is the factor of this rank's loss."""

    weigh: Any = None

    def setup_distributed(self) -> None:
        """The elastic loop makes the process group."""
        reset_seed()
        self.set_world_ranks()

    def configure_ddp(self) -> None:
        """Lightning's setup runs before there is a world."""

    def enter(self) -> None:
        """Wrap the module for the present world, of which this is a rank."""
        self.set_world_ranks()
        super().configure_ddp()

    def leave(self) -> None:
        """Drop the wrapper: it would keep the old process group."""
        self.model = self.lightning_module

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weighed: torch.Tensor = super().backward(closure_loss * self.weigh(), *args, **kwargs)
        return weighed


class ElasticFabricStrategy(_InThisWorld, fabric_strategies.DDPStrategy):  # type: ignore[misc]
    """Of a Fabric."""

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
