"""Lightning's ModelParallelStrategy (FSDP2) in an elastic job: a module is sharded anew in each world."""

from __future__ import annotations

from typing import Any

import lightning.fabric.strategies as fabric_strategies
import lightning.pytorch.strategies as trainer_strategies
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nbelastic.errors import UsageError
from nbelastic.integrations.lightning_strategy import InThisWorld, trained_by
from nbelastic.integrations.unsharded import Unsharded
from nbelastic.sharded.state import ShardedState


def mesh_of_world(size: int, device: torch.device) -> DeviceMesh:
    """Collective: the mesh that Lightning would make, over all ranks of the present world."""
    return init_device_mesh(device.type, (size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))


class ElasticShardedStrategy(InThisWorld, trainer_strategies.ModelParallelStrategy):  # type: ignore[misc]
    """Of a Trainer. It calls the module's `configure_model` and `configure_optimizers` in each world."""

    weigh: Any = None
    _trainer: Any = None
    _unsharded: Any = None

    def setup_environment(self) -> None:
        """There is no world yet: `configure_model` waits for one."""
        super(trainer_strategies.ModelParallelStrategy, self).setup_environment()
        reset_seed()
        self.set_world_ranks()
        self.check_module()
        self.lightning_module.configure_model = _later

    def check_module(self) -> None:
        """UsageError if it has no method that shards it."""
        if not is_overridden("configure_model", self.lightning_module):
            raise UsageError("a module for ModelParallelStrategy shards itself in configure_model(), with fully_shard.")

    def setup(self, trainer: Any) -> None:
        """The hooks before this one may have made layers."""
        self.accelerator.setup(trainer)
        del self.lightning_module.configure_model
        self._trainer, self._unsharded = trainer, Unsharded(self.lightning_module)

    def make_state(self, **small: Any) -> ShardedState:
        """The module and its optimizers are bound in each world."""
        return ShardedState(**small)

    def enter(self, state: ShardedState) -> None:
        """Collective: shard the module over the present world, make its optimizers, and bind them."""
        self.set_world_ranks()
        module = self.lightning_module
        self._unsharded.restore(empty=state._choice is not None)
        self._device_mesh = module._device_mesh = mesh_of_world(self.world_size, self.root_device)
        call._call_configure_model(self._trainer)
        self.model = self.precision_plugin.convert_module(module)
        self.model._apply(lambda one: one if one.is_meta else one.to(self.root_device))
        self._unsharded.sharded()
        self.setup_optimizers(self._trainer)
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers, self.root_device)
        state.bind(module=module, **trained_by(self))

    def begin_epoch(self) -> None:
        """FSDP2 adds up the gradients of layers that are unfrozen later, too."""

    def commit(self, state: ShardedState) -> None:
        state.commit()
        if state._holdings.recoverable:
            self._unsharded.forget_values()

    def leave(self, *, is_over: bool) -> None:
        """Make the module whole again, unless the training is over: its sharded parameters would keep the old process group."""
        if is_over:
            return
        self._unsharded.restore(empty=True)
        self.model, self._device_mesh = self.lightning_module, None
        self.lightning_module._device_mesh = None
        self._reset_optimizers_and_schedulers()

    def load_checkpoint(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            "an elastic fit of a sharded module does not begin from Lightning's checkpoints: leave out ckpt_path, and give "
            "the job a checkpoint folder, as in cluster.run(main, checkpoint=folder)."
        )

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weighed: torch.Tensor = super().backward(closure_loss * self.weigh(), *args, **kwargs)
        return weighed


class ElasticShardedFabricStrategy(InThisWorld, fabric_strategies.ModelParallelStrategy):  # type: ignore[misc]
    """Of a Fabric."""

    @classmethod
    def like(cls, strategy: Any, environment: Any) -> ElasticShardedFabricStrategy:
        """As the user's own, in the present world."""
        made = cls(
            strategy._parallelize_fn,
            tensor_parallel_size=1,
            save_distributed_checkpoint=strategy._save_distributed_checkpoint,
        )
        made.cluster_environment = environment
        return made

    def setup_environment(self) -> None:
        super(fabric_strategies.ModelParallelStrategy, self).setup_environment()
        reset_seed()
        self._set_world_ranks()
        self._device_mesh = mesh_of_world(self.world_size, self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Shard it. Its parameters on the meta device stay there: `bind` gives them values."""
        sharded = self._parallelize_fn(module, self.device_mesh)
        if not isinstance(sharded, torch.nn.Module):
            raise UsageError(f"parallelize_fn returns the module that it has sharded, not {type(sharded).__name__}.")
        sharded._apply(lambda one: one if one.is_meta else one.to(self.root_device))
        return sharded


def _later() -> None:
    """In place of `configure_model` until there is a world."""
