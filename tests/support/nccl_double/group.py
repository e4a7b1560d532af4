"""Torch's process group over one communicator.

Torch gives Python no class of back ends to derive from. So this is a whole process group, which torch takes in the place of
its own; what torch asks a group's back end, this one answers itself. C++ calls the methods that torch's `PyProcessGroup`
overrides: those that DDP's reducer and the functional collectives need are among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support.nccl_double import collectives as coll
from tests.support.nccl_double.communicator import Communicator, Task, Work
from tests.support.nccl_double.mesh import Mesh

NAME = "nccl_double"
BARRIER = dist.BarrierOptions()
Tensors = Sequence[torch.Tensor]


class NcclDouble(dist.ProcessGroup):
    """Make the group with `connect`: it has not communicated before."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, *, blocking: bool) -> None:
        super().__init__(rank, size)
        self.communicator = Communicator(store, rank, size, timeout, blocking=blocking)
        self._names = {"name": "", "desc": ""}

    def abort(self) -> None:
        self.communicator.abort()

    def shutdown(self) -> None:
        self.communicator.shutdown()

    # What torch asks of a group and of its back end.

    def getBackendName(self) -> str:
        return NAME

    _get_backend_name = name = getBackendName

    def getGroupName(self) -> str:
        return self._names["name"]

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupDesc(self) -> str:
        return self._names["desc"]

    def setGroupDesc(self, desc: str) -> None:
        self._names["desc"] = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, _device: torch.device) -> NcclDouble:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self.communicator.begun

    def _begin(self, task: Task, outputs: Tensors, opts: Any = None) -> Work:
        timeout = getattr(opts, "timeout", None)
        unset = timeout is None or timeout.total_seconds() <= 0
        return self.communicator.enqueue(task, outputs, None if unset else timeout)

    # Collectives. The first name is that of torch's C++ class, or of `dist`.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def task(mesh: Mesh) -> Tensors:
            return [coll.all_reduce(mesh, coll.flat(tensor), op) for tensor in tensors]

        return self._begin(task, tensors, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        root, (tensor,) = opts.rootRank, tensors
        outputs = [] if self.rank() == root else tensors  # the root's tensor is only read

        def task(mesh: Mesh) -> Tensors:
            data = coll.broadcast(mesh, coll.flat(tensor), root)
            return [data] if outputs else []

        return self._begin(task, outputs, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        def task(mesh: Mesh) -> Tensors:
            found = coll.gather(mesh, coll.flat(tensors[0]), opts.rootRank)
            return [coll.combine(found, opts.reduceOp)] if found else []

        return self._begin(task, tensors if self.rank() == opts.rootRank else [], opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        sizes = [tensor.numel() for tensor in outputs[0]]
        return self._begin(lambda mesh: coll.all_gather(mesh, coll.flat(inputs[0]), sizes), outputs[0], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        def task(mesh: Mesh) -> Tensors:
            return [torch.cat(coll.all_gather(mesh, coll.flat(tensor))) for tensor in inputs]

        return self._begin(task, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        def task(mesh: Mesh) -> Tensors:
            return [coll.reduce_scatter(mesh, [coll.flat(part) for part in inputs[0]], opts.reduceOp)]

        return self._begin(task, outputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def task(mesh: Mesh) -> Tensors:
            return [coll.reduce_scatter(mesh, coll.flat(tensor).chunk(mesh.size), op) for tensor in inputs]

        return self._begin(task, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        here = outputs[0] if outputs else []
        return self._begin(lambda mesh: coll.gather(mesh, coll.flat(inputs[0]), opts.rootRank), here, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        def task(mesh: Mesh) -> Tensors:
            parts = [coll.flat(part) for part in inputs[0]] if inputs else []
            return [coll.scatter(mesh, parts, coll.flat(outputs[0]), opts.rootRank)]

        return self._begin(task, outputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        sizes = [tensor.numel() for tensor in outputs]
        return self._begin(
            lambda mesh: coll.all_to_all(mesh, [coll.flat(part) for part in inputs], sizes), outputs, opts
        )

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Work:
        def rows(data: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
            return list(data.split(counts) if counts else data.chunk(self.size()))

        sizes = [part.numel() for part in rows(output, received)]

        def task(mesh: Mesh) -> Tensors:
            return [torch.cat(coll.all_to_all(mesh, [coll.flat(part) for part in rows(tensor, sent)], sizes))]

        return self._begin(task, [output], opts)

    alltoall_base = all_to_all_single

    def send(self, tensors: Tensors, rank: int, _tag: int = 0) -> Work:
        return self._begin(lambda mesh: mesh.exchange([(rank, coll.flat(tensors[0]))], []) or [], [])

    def recv(self, tensors: Tensors, rank: int, _tag: int = 0) -> Work:
        def task(mesh: Mesh) -> Tensors:
            into = coll.flat(tensors[0])
            mesh.exchange([], [(rank, into)])
            return [into]

        return self._begin(task, tensors)

    def barrier(self, opts: Any = None) -> Work:
        byte = torch.zeros(1, dtype=torch.uint8)
        return self._begin(lambda mesh: coll.all_gather(mesh, byte) and [], [], opts)
