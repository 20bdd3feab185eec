"""Compression inside torch's tensor parallelism. The only file of this package that talks to other ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel

from .codecs import Alone, Compressor

# torch is renaming it; 2.6 knows only the old name.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def _all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", mesh))


class _Sum(torch.autograd.Function):
    """All-reduce forward. What follows is replicated, so every rank already holds the whole gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return _all_reduce(x, mesh)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """All-gather forward, (ranks, *shape); backward a rank takes the gradient of its own part."""

    @staticmethod
    def forward(ctx, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.rank = mesh.get_local_rank()
        return collectives.wait_tensor(_all_gather(x.contiguous()[None], 0, mesh))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.rank], None


class _Shared(torch.autograd.Function):
    """Nothing forward; backward sums the gradients the ranks got from their own activations."""

    @staticmethod
    def forward(ctx, weight: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient, ctx.mesh), None


class MeshRanks(Alone):
    """The ranks of a one-dimensional device mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise ValueError(f"mesh must have one dimension, for example mesh['tp']; this one has {mesh.ndim}.")
        self.mesh, self.size = mesh, mesh.size()

    @classmethod
    def world(cls, device_type: str, size: int) -> MeshRanks:
        """All ranks torchrun started. Initialises torch.distributed where that has not happened yet."""
        return cls(init_device_mesh(device_type, (size,)))

    def sum(self, x: Tensor) -> Tensor:
        return _Sum.apply(x, self.mesh)

    def gather(self, x: Tensor) -> list[Tensor]:
        return list(_Gather.apply(x, self.mesh).unbind(0))

    def shared(self, weight: Tensor) -> Tensor:
        return _Shared.apply(weight, self.mesh)


class CompressedRowwiseParallel(RowwiseParallel):
    """torch's RowwiseParallel of an nn.Linear whose partial outputs are added up through a compressor.

    The compressor becomes the module's child `compressor`, equal on all ranks of the mesh: its parameters, if any, are
    trained and saved with the model. A bias is added by torch before the exchange, on the first rank.

    Args:
        make: called once for each module this style is applied to, returns its compressor.
        input_layouts, use_local_output: as in RowwiseParallel. The output is always replicated.
    """

    def __init__(self, make: Callable[[], Compressor], *, input_layouts=None, use_local_output: bool = True) -> None:
        super().__init__(input_layouts=input_layouts, use_local_output=use_local_output)
        self.make = make

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise TypeError(f"CompressedRowwiseParallel is for nn.Linear; this module is {type(module).__name__}.")
        if not isinstance(compressor := self.make(), Compressor):
            raise TypeError(
                f"make must return a Compressor, as in `lambda: TopK(0.1)`; got {type(compressor).__name__}."
            )
        compressor.to(module.weight.device)
        module = super()._apply(module, device_mesh)
        with torch.no_grad():
            for tensor in [*compressor.parameters(), *compressor.buffers()]:
                tensor.copy_(distribute_tensor(tensor.detach(), device_mesh, [Replicate()]).to_local())
        module.compressor = compressor
        return module

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        if not all(placement.is_partial() for placement in outputs.placements):
            return RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
        part = outputs.to_local(grad_placements=[Replicate()])
        total = mod.compressor(part, MeshRanks(device_mesh))
        return total if use_local_output else DTensor.from_local(total, device_mesh, [Replicate()], run_check=False)
