"""Compression inside torch's tensor parallelism (MCBench, figure 2): the all-reduce g of a
row-parallel layer's partial outputs, through a compressor, and the parallel style.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel

from .base import Compressor, TensorParallelRanks, apply_function, replicated

# The second is the name in older versions of torch.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def _all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    total: Tensor = collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", mesh))
    return total


class _Sum(torch.autograd.Function):
    """All-reduce in forward. The output is replicated, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return _all_reduce(x, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """All-gather to (ranks, *shape) in forward; return this rank's row of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.rank = mesh.get_local_rank()
        rows: Tensor = collectives.wait_tensor(_all_gather(x.contiguous()[None], 0, mesh))
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.rank], None


class _Shared(torch.autograd.Function):
    """Identity in forward; in backward, sum the gradients of all ranks' activations."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient, ctx.mesh), None


class MeshRanks(TensorParallelRanks):
    """The ranks of a one-dimensional device mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh must have one dimension, for example mesh['tp']; this one has {mesh.ndim}."
            )
        self.mesh, self.size = mesh, mesh.size()

    @classmethod
    def world(cls, device_type: str, size: int) -> MeshRanks:
        """Return the mesh of all ranks; initializes torch.distributed if necessary."""
        return cls(init_device_mesh(device_type, (size,)))

    def sum(self, x: Tensor) -> Tensor:
        return apply_function(_Sum, x, self.mesh)

    def gather(self, x: Tensor) -> list[Tensor]:
        return list(apply_function(_Gather, x, self.mesh).unbind(0))

    def shared(self, weight: Tensor) -> Tensor:
        return apply_function(_Shared, replicated(weight), self.mesh)


class _LinearThenBias(nn.Linear):
    """A linear layer whose bias is added after the exchange, uncompressed."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


@_disable_dynamo
def _exchange_partial(module: nn.Module, part: Tensor, mesh: DeviceMesh) -> Tensor:
    total: Tensor = module.get_submodule("compressor")(part, MeshRanks(mesh))
    if isinstance(module, _LinearThenBias) and module.bias is not None:
        # Under autocast it is wider than the product.
        total = total + replicated(module.bias).to(total.dtype)
    return total


class CompressedRowwiseParallel(RowwiseParallel):
    """torch's RowwiseParallel of an nn.Linear whose partial outputs are added up through a
    compressor.

    The compressor becomes the module's child `compressor`, equal on all ranks of the mesh: its
    parameters, if any, are DTensors as the module's are, trained and saved with the model. A bias
    is added after the exchange.

    Args:
        make: called once for each module this style is applied to, returns its compressor.
        input_layouts, output_layouts, use_local_output: as in RowwiseParallel. The exchange makes
            the output on every rank; with ``output_layouts=Shard(1)``, sequence parallelism, each
            keeps its own part.
    """

    def __init__(
        self,
        make: Callable[[], Compressor],
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        if isinstance(make, Compressor) or not callable(make):
            raise TypeError(
                "make must be a function that returns a new compressor, one for each module: "
                "`lambda: TopK(0.1)`; got "
                f"{'the compressor itself, ' if isinstance(make, Compressor) else ''}{make!r}."
            )
        if any(placement.is_partial() for placement in self.output_layouts):
            raise ValueError(
                "output_layouts must be Replicate() or Shard(...): the exchange adds all parts up."
            )
        self.make = make

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise TypeError(
                "CompressedRowwiseParallel is for nn.Linear; this module is "
                f"{type(module).__name__}."
            )
        if not isinstance(compressor := self.make(), Compressor):
            raise TypeError(
                "make must return a Compressor, as in `lambda: TopK(0.1)`; got "
                f"{type(compressor).__name__}."
            )
        if any(isinstance(parameter, DTensor) for parameter in compressor.parameters()):
            raise ValueError(
                "make must return a new compressor each time it is called; this one is in use "
                "already."
            )
        compressor.to(module.weight.device)
        module = super()._apply(module, device_mesh)
        # A subclass with its own forward adds its own bias.
        if type(module).forward is nn.Linear.forward:
            module.__class__ = _LinearThenBias
        _replicate_compressor(compressor, module.get_parameter("weight").dtype, device_mesh)
        module.compressor = compressor
        return module

    @staticmethod
    def _prepare_output_fn(
        output_layouts: tuple[Placement, ...],
        use_local_output: bool,
        mod: nn.Module,
        outputs: DTensor,
        device_mesh: DeviceMesh,
    ) -> Tensor:
        if not all(placement.is_partial() for placement in outputs.placements):
            plain: Tensor = RowwiseParallel._prepare_output_fn(
                output_layouts, use_local_output, mod, outputs, device_mesh
            )
            return plain
        part = outputs.to_local(grad_placements=[Replicate()])
        total = _exchange_partial(mod, part, device_mesh)
        everywhere = all(placement.is_replicate() for placement in output_layouts)
        if everywhere and use_local_output:
            return total
        output = DTensor.from_local(total, device_mesh, [Replicate()], run_check=False)
        output = output if everywhere else output.redistribute(placements=output_layouts)
        return output.to_local() if use_local_output else output


@torch.no_grad()
def _replicate_compressor(compressor: Compressor, dtype: torch.dtype, mesh: DeviceMesh) -> None:
    """Copy parameters and buffers from the first rank; make parameters DTensors in the module's
    precision.
    """
    for part in compressor.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            replica = distribute_tensor(parameter.detach().to(dtype), mesh, [Replicate()])
            part.register_parameter(
                name, nn.Parameter(replica, requires_grad=parameter.requires_grad)
            )
        for buffer in part.buffers(recurse=False):
            buffer.copy_(distribute_tensor(buffer.detach(), mesh, [Replicate()]).to_local())
