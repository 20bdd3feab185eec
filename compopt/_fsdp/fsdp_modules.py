"""FSDP2 and tensor parallelism: parameters that are DTensors.

Hybrid sharding: shards inside a node, compressed averages between nodes::

    mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    group = mesh.get_group("replicate")
    optimizer = compopt.RadiusAdamW(model.parameters(), lr=3e-4, process_group=group)

``fully_shard`` averages over the fast links, densely. The optimizer averages its rank's shards over
``process_group``, as soon as FSDP2 has reduced them. Every new optimizer that
averages between nodes is checked here, and its parameters are set to those of the first rank of
``process_group``, as DistributedDataParallel does.

If FSDP2 shards the parameters over the optimizer's own ranks, the optimizer takes the place of
FSDP2's reduce-scatter in backward, for classes that can (see ``_fsdp.fsdp_backward``).
With ``gather_dtype`` it takes the place of FSDP2's all-gather too (see ``fsdp_gather``).
FSDP2 modules are found when the optimizer is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .._engine.engine import Role
from .._engine.module_hooks import (
    Backward,
    ModuleWatch,
    call_after_backward,
    copy_first_parameters,
    list_parameters,
)
from .._engine.optimizer import CompressedOptimizer, construction_callbacks
from .._state.tensors import HOOKS
from .._wire.collectives import list_mesh_groups
from .fsdp_backward import ReducingOptimizer
from .fsdp_bucket import longest_part_numel
from .fsdp_gather import FSDPAllGather, TorchAllocation

ADVICE = (
    "call fully_shard(model, mesh=mesh['shard']) with the mesh dimension inside a node, and give "
    "the optimizer process_group=mesh.get_group('replicate'), the dimension between nodes."
)


def _on_construction(optimizer: CompressedOptimizer) -> None:
    """Check a new optimizer's DTensors, copy those of the first rank of its group to the others,
    and connect it to FSDP2.
    """
    params = list_parameters(optimizer)
    if isinstance(optimizer, ReducingOptimizer) and optimizer.replaces_reduce_scatter:
        replace_reduce_scatter(optimizer)
        return
    has_dtensors = any(hasattr(p, "device_mesh") for p in params)
    if has_dtensors or any(map(_is_flat_parameter, params)):
        check_meshes(optimizer)
    if not has_dtensors:
        return
    copy_first_parameters(optimizer._engine)
    register_gradient_hooks(optimizer)
    if isinstance(optimizer, ReducingOptimizer):
        set_gathers(list_fsdp_modules(), optimizer)


def list_fsdp_modules() -> list[nn.Module]:
    """Return all modules that were given to ``fully_shard``, or to another function of torch that
    keeps a state for them.
    """
    from torch.distributed import _composable_state  # imported already with the model's

    return list(getattr(_composable_state, "_module_state_mapping", ()))  # private


def list_param_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's groups of the parameters of a module, without those of modules in it that
    ``fully_shard`` wraps, too; none for a module that it does not wrap.
    """
    if not hasattr(module, "_get_fsdp_state"):
        return []
    # private: torch has no public access to the order of parameters in a message
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group]


# Hybrid sharding


def check_meshes(optimizer: CompressedOptimizer) -> None:
    """Raise ValueError if ranks of the optimizer's group hold different shards, if FSDP2 averages
    their gradients already, or if a parameter belongs to FSDP1.
    """
    engine = optimizer._engine
    ranks = set(engine.refresh_ranks().ranks)
    buckets = [*engine.buckets, *engine.frozen_buckets]
    for p, name in (pair for b in buckets for pair in zip(b.params, b.names, strict=True)):
        if _is_flat_parameter(p):
            raise ValueError(
                f"{name} belongs to a FullyShardedDataParallel, whose flat shards cannot be "
                f"compressed a matrix at a time: {ADVICE}"
            )
        mesh: Any = getattr(p, "device_mesh", None)
        for dim, (mesh_group, placement) in enumerate(list_mesh_groups(p)):
            shared = sorted(ranks.intersection(dist.get_process_group_ranks(mesh_group)))
            if len(shared) < 2:
                continue
            where = f"mesh dimension {mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else dim!r}"
            if placement.is_replicate():
                raise ValueError(
                    f"the gradient of {name} is averaged over {where} before the optimizer sees "
                    f"it, and process_group holds ranks {shared} of it as well: {ADVICE} In place "
                    "of torch's replicate() use DistributedDataParallel."
                )
            raise ValueError(
                f"process_group holds ranks {shared}, which have different shards of {name} "
                f"({where}), so their gradients cannot be averaged: {ADVICE}"
            )


def _is_flat_parameter(p: Tensor) -> bool:
    """Return True for a part of a flat parameter of FullyShardedDataParallel, by its own mark."""
    return getattr(p, "_fsdp_flattened", False)


class GradientHook:
    """A hook of parameters: starts the exchange between nodes in backward, as soon as FSDP2 has
    reduced a shard's gradient. At the end of backward it starts those of the others, which have no
    gradient here: on other nodes they may have one, and ranks start equally many in each backward.
    """

    def __init__(self, optimizer: CompressedOptimizer):
        self._optimizer, self._backward = weakref.ref(optimizer), Backward()

    @_disable_dynamo
    def __call__(self, p: Tensor) -> None:
        if (optimizer := self._optimizer()) is not None:
            self._backward.is_new(self._on_backward_end)
            optimizer.gradients_ready([p])

    def _on_backward_end(self) -> None:
        if (optimizer := self._optimizer()) is not None:
            optimizer.gradients_ready(list_parameters(optimizer))
            optimizer.backward_done()


def register_gradient_hooks(optimizer: CompressedOptimizer) -> None:
    """Register a ``GradientHook`` on the optimizer's parameters, in place of earlier ones.

    An earlier optimizer over the same parameters may still be alive on some ranks only, and would
    start exchanges there that the others do not join.
    """
    hook = GradientHook(optimizer)
    optimizer._engine.backwards_are_alike = False
    for p in list_parameters(optimizer):
        hooks = getattr(p, HOOKS, None) or {}
        for key in [key for key, other in hooks.items() if isinstance(other, GradientHook)]:
            del hooks[key]
        mesh = getattr(p, "device_mesh", None)
        # not for offloaded parameters: with a hook FSDP2 would wait for its copies to host memory
        if p.requires_grad and mesh is not None and mesh.device_type == p.device.type:
            p.register_post_accumulate_grad_hook(hook)


# Inside FSDP2


def replace_reduce_scatter(optimizer: ReducingOptimizer) -> None:
    """Find the FSDP2 modules of ``optimizer``, and replace their reduce-scatter.

    It does so when the optimizer is made. A search at the first forward would miss a compiled
    model, because ``model.compile()`` compiles forward hooks too.

    Raises ValueError if this PyTorch has no hook for that.
    """
    from torch.distributed.fsdp import FSDPModule  # imported already with the model's

    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise ValueError(
            f"FSDP2 shards the parameters over the ranks of this {optimizer._engine.name}, and "
            f"PyTorch {torch.__version__} has no hook into its reduce-scatter "
            "(FSDPModule.set_custom_reduce_scatter): use a later PyTorch (2.13 has it), or "
            "DistributedDataParallel."
        )
    known = list_fsdp_modules()
    ModuleWatch(optimizer, _integrate_modules, _integrate_modules(known, optimizer))


def _integrate_modules(
    modules: list[nn.Module], optimizer: CompressedOptimizer
) -> Sequence[nn.Module]:
    """Replace the reduce-scatter of the FSDP2 modules that hold parameters of ``optimizer``."""
    assert isinstance(optimizer, ReducingOptimizer)
    params = list_parameters(optimizer)
    integrated = []
    for module in modules:
        for group in list_param_groups(module):
            if not params.isdisjoint(one.sharded_param for one in group.fsdp_params):
                _warn_if_shared(group, optimizer, params)
                reduce_scatter = OptimizerReduceScatter(group, optimizer)
                module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[operator]
                integrated.append(module)
    set_gathers(modules, optimizer)
    return integrated


def set_gathers(modules: list[nn.Module], optimizer: ReducingOptimizer) -> None:
    """Set the all-gather of FSDP2 modules that hold parameters of ``optimizer``, and of those in
    them, whose parameters may all be frozen, to its ``gather_dtype``.

    An earlier optimizer's is replaced. Raises ValueError if this PyTorch has no hook for that.
    """
    params = list_parameters(optimizer)
    for module in modules:
        if not hasattr(module, "_get_fsdp_state"):
            continue
        inside = [(one, group) for one in module.modules() for group in list_param_groups(one)]
        sharded = (one.sharded_param for _, group in inside for one in group.fsdp_params)
        if params.isdisjoint(sharded):
            continue
        for one, group in inside:
            previous = getattr(group, "_all_gather_comm", None)
            if optimizer.gather_dtype is None and not isinstance(previous, FSDPAllGather):
                continue
            if not hasattr(one, "set_custom_all_gather"):
                raise ValueError(
                    f"gather_dtype={optimizer.gather_dtype!r}: PyTorch {torch.__version__} has no "
                    "hook into FSDP2's all-gather (FSDPModule.set_custom_all_gather): use a later "
                    "PyTorch (2.13 has it), or leave gather_dtype out."
                )
            gather = FSDPAllGather(group, optimizer.gather_dtype, optimizer.ops)
            one.set_custom_all_gather(gather)  # type: ignore[operator]
            optimizer.has_gathers = True


def _warn_if_shared(group: Any, optimizer: CompressedOptimizer, params: set[Tensor]) -> None:
    """Warn once if another optimizer compressed other parameters of one of FSDP2's groups."""
    previous = getattr(group, "_reduce_scatter_comm", None)
    other = previous._optimizer() if isinstance(previous, OptimizerReduceScatter) else None
    if other is None or other is optimizer:
        return
    others = list_parameters(other) - params
    if any(one.sharded_param in others for one in group.fsdp_params):
        optimizer._engine.warn_once_on_rank_0(
            "shared module",
            "two optimizers of compopt share a module that fully_shard wraps. "
            f"{optimizer._engine.name}, which came last, averages its gradients, those of the "
            "other uncompressed: give all parameters of a module to one optimizer, in parameter "
            "groups or as compopt.Separate([first, second]).",
        )


class OptimizerReduceScatter(TorchAllocation):
    """The reduce-scatter of one of FSDP2's groups of parameters, by the optimizer."""

    def __init__(self, group: Any, optimizer: ReducingOptimizer):
        self._group, self._optimizer = group, weakref.ref(optimizer)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        optimizer = self._optimizer()
        reduce_scatter = None if optimizer is None else optimizer.fsdp_backward
        if optimizer is None or reduce_scatter is None or optimizer._engine.role is Role.REPLACED:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)
            return
        trainable = [one for one in self._group.fsdp_params if one.sharded_param.requires_grad]
        params = [(one.sharded_param, one.fsdp_placement.dim) for one in trainable]
        rows = input_tensor.view(group.size(), -1)
        ranks, length = rows.shape
        needed = sum(longest_part_numel(p, dim, ranks) for p, dim in params)
        problem: Exception | None = None
        if needed != length:  # perhaps on this rank only
            problem = RuntimeError(
                "some parameters that one fully_shard averages together had no gradient in this "
                "backward, and the optimizer cannot tell which: call "
                "model.set_reduce_scatter_unused_params(True), which gives them zeros, or set "
                "requires_grad=False where they are never used."
            )
            output_tensor.fill_(float("nan"))
            rows, output_tensor = rows.new_zeros(1).expand(ranks, needed), rows.new_empty(needed)
        multiplied, postdivided = self._compute_scales(op, rows)
        if multiplied != 1 and problem is None:
            rows.mul_(multiplied)
        is_read = postdivided > 1 or self._is_read_in_backward(trainable, output_tensor)
        is_idle = not reduce_scatter.in_flight
        with torch.no_grad():
            backward = torch._C._current_graph_task_id()
            reduce_scatter.reduce(params, rows, output_tensor, is_read, backward, problem)
            if postdivided > 1:
                output_tensor.mul_(postdivided)
        if is_idle and reduce_scatter.in_flight:
            call_after_backward(reduce_scatter.finish)

    def _compute_scales(self, op: Any, rows: Tensor) -> tuple[float, float]:
        """Return two factors: of ``rows`` before the average, and of the average after it.

        FSDP2 divides the sum of all ranks by their number, or by its ``gradient_divide_factor``. In
        float16 and float64 it divides in two halves, one before and one after the reduction.
        """
        divisor, ranks = self._group.gradient_divide_factor, len(rows)
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):  # PREMUL_SUM: it divides nothing else
            return ranks / divisor, 1
        if op == dist.ReduceOp.AVG:
            return 1, 1
        divisor, predivided = divisor or ranks, 1
        if rows.dtype not in (torch.float32, torch.bfloat16):
            while divisor % predivided == 0 and divisor / predivided > predivided:
                predivided *= 2
        return predivided, ranks / predivided

    def _is_read_in_backward(self, trainable: list[Any], out: Tensor) -> bool:
        """Return True if FSDP2, or a hook of its own, reads the averaged gradient before backward
        has ended.
        """
        is_kept = all(
            one.sharded_param.dtype == out.dtype and not one.offload_to_cpu for one in trainable
        )
        return not is_kept or self._group._all_reduce_hook is not None


construction_callbacks.append(_on_construction)
