"""FSDP2 over the optimizer's own ranks: the optimizer in place of its reduce-scatter (see
``_engine.inside``).

The modules are found at their first forward, as DistributedDataParallels are. Each gets a reduce-
scatter of ours (``set_custom_reduce_scatter``); parameters are FSDP's to gather.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._engine.base import CompressedOptimizer
from .._engine.inside import ReducingOptimizer
from .._engine.session import Role
from .._state.shards import part_of
from ._watch import ModuleWatch, call_after_backward


def go_inside(optimizer: ReducingOptimizer) -> None:
    """Find the FSDP modules of ``optimizer`` at their first forward.

    Raises ValueError where this PyTorch cannot let an optimizer reduce.
    """
    from torch.distributed.fsdp import FSDPModule  # loaded with the model's

    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise ValueError(
            f"FSDP cuts the parameters over the ranks of this {optimizer._session.name}, and "
            f"PyTorch {torch.__version__} does not let it take part in FSDP's reduce-scatter "
            "(FSDPModule.set_custom_reduce_scatter): use a later PyTorch (2.13 has it), or "
            "DistributedDataParallel."
        )
    this = weakref.ref(optimizer)
    optimizer.told_of_steps.append(lambda: _stepped(this))
    ModuleWatch(optimizer, _hand_over)


def _stepped(this: weakref.ref[ReducingOptimizer]) -> None:
    optimizer = this()
    if optimizer is not None and optimizer.inside is not None:
        optimizer.inside.discard_unsent()


def _hand_over(modules: list[nn.Module], optimizer: CompressedOptimizer) -> Sequence[nn.Module]:
    """Give the FSDP modules among ``modules`` that hold parameters of ``optimizer`` its
    reduce-scatter.
    """
    assert isinstance(optimizer, ReducingOptimizer)
    ours = {p for group in optimizer.param_groups for p in group["params"]}
    found = []
    for module in modules:
        for group in _param_groups(module):
            if ours.isdisjoint(one.sharded_param for one in group.fsdp_params):
                continue
            module.set_custom_reduce_scatter(Reducing(group, optimizer))  # type: ignore[operator]
            found.append(module)
    return found


def _param_groups(module: nn.Module) -> Iterable[Any]:
    """What FSDP gathers and reduces together of ``module``; nothing where it is not sharded.

    Private to torch, which tells nobody else the order of parameters in a reduce-scatter.
    """
    if not hasattr(module, "set_custom_reduce_scatter"):
        return ()
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


class Reducing:
    """FSDP's reduce-scatter of one group of parameters, by the optimizer while there is one."""

    def __init__(self, group: Any, optimizer: ReducingOptimizer):
        self._group, self._optimizer = group, weakref.ref(optimizer)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        optimizer = self._optimizer()
        if (
            optimizer is None
            or optimizer.inside is None
            or optimizer._session.role is Role.REPLACED
        ):
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)
            return
        inside, trained = optimizer.inside, self._trained()
        params = [(one.sharded_param, one.fsdp_placement.dim) for one in trained]
        rows = input_tensor.view(group.size(), -1)
        self._check(params, rows)
        # what FSDP has divided by, and will divide by
        before = self._divided_before(op, rows)
        rows.mul_(before) if before > 1 else None
        after = group.size() / before if op != dist.ReduceOp.AVG else 1
        looked_at = after > 1 or self._looked_at(trained, output_tensor)
        idle = not inside.flows
        with torch.no_grad():
            backward = torch._C._current_graph_task_id()
            inside.reduce(params, rows, output_tensor, looked_at, backward)
            output_tensor.mul_(after) if after > 1 else None
        if idle and inside.flows:
            call_after_backward(inside.finish)

    def _trained(self) -> list[Any]:
        return [one for one in self._group.fsdp_params if one.sharded_param.requires_grad]

    def _check(self, params: list[tuple[Tensor, int]], rows: Tensor) -> None:
        ranks, length = rows.shape
        if sum(part_of(p, dim, ranks) for p, dim in params) != length:
            raise RuntimeError(
                "some parameters that one fully_shard averages together had no gradient in this "
                "backward, and the optimizer cannot tell which: call "
                "model.set_reduce_scatter_unused_params(True), which gives them zeros, or set "
                "requires_grad=False where they are never used."
            )

    def _divided_before(self, op: Any, rows: Tensor) -> int:
        """By what FSDP has divided ``rows``, as it does in float16 and float64, in two halves."""
        if self._group.gradient_divide_factor is not None:
            raise RuntimeError(
                "the optimizer takes the mean of gradients, and set_gradient_divide_factor asks "
                "for something else: leave it out, and scale the loss."
            )
        before, ranks = 1, len(rows)
        if op == dist.ReduceOp.AVG or rows.dtype in (torch.float32, torch.bfloat16):
            return before
        while ranks % before == 0 and ranks / before > before:
            before *= 2
        return before

    def _looked_at(self, trained: list[Any], out: Tensor) -> bool:
        """Whether somebody reads the averaged gradient before backward has ended."""
        hooked = any(getattr(one.sharded_param, HOOKS, None) for one in trained)
        kept_as_is = all(
            one.sharded_param.dtype == out.dtype and not one.offload_to_cpu for one in trained
        )
        return hooked or not kept_as_is or self._group._all_reduce_hook is not None


HOOKS = "_post_accumulate_grad_hooks"
