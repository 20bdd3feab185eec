"""torchtitan's optimizer container, and a mesh that averages nothing between machines.

    from compopt.integrations.torchtitan import OptimizersContainer, shard_only

    config.optimizer = OptimizersContainer.Config(
        make=lambda params, group: compopt.SeparateAdam(params, lr=3e-4, process_group=group)
    )
    config.model_spec = shard_only(config.model_spec)  # with data_parallel_replicate_degree > 1

``make`` gets the parameters with their names, and the process group of the ranks that hold the same
shards (None: all ranks, which the optimizer averages over inside FSDP2).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from .._engine.module_hooks import end_open_rounds
from .._engine.optimizer import CompressedOptimizer

try:
    import tyro
    from torchtitan.components import optimizer as titan
    from torchtitan.components.checkpointer.utils import canonical_fqn
except ImportError as error:
    raise ImportError(
        "compopt.integrations.torchtitan needs torchtitan 0.3 or later (pip install torchtitan), "
        f"whose import failed: {error}"
    ) from error


class OptimizersContainer(titan.OptimizersContainer):  # type: ignore[misc]  # no types
    """torchtitan's container around the optimizer that ``make`` returns.

    Its ``state_dict()``, which torchtitan calls on all ranks, ends the running round of
    :class:`compopt.LocalSteps` and consolidates, so that checkpoints hold the residuals of all
    ranks and load on any number of them.

    Raises:
        ValueError: ``make`` is missing, or the model is cut into stages of a pipeline.
        TypeError: ``make`` returns another package's optimizer.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(titan.OptimizersContainer.Config):  # type: ignore[misc]
        make: Annotated[Callable[..., Any] | None, tyro.conf.Suppress] = None

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.make is None or config.param_groups:
            raise ValueError(
                "OptimizersContainer.Config needs make=, a function of parameters and a process "
                "group that returns an optimizer, and no param_groups: make groups in it."
            )
        model, self.model_parts = model_parts[0], model_parts
        if len(model_parts) > 1 or find_group(model.parameters(), "pp"):
            raise ValueError(
                "OptimizersContainer saves no state of pipelines, whose stages have other "
                "parameters on each rank: set config.parallelism.pipeline_parallel_degree = 1."
            )
        named = [(canonical_fqn(n), p) for n, p in model.named_parameters() if p.requires_grad]
        optimizer = config.make(named, find_group(model.parameters(), "dp_replicate"))
        if not isinstance(optimizer, CompressedOptimizer):
            raise TypeError(
                f"make= must return an optimizer of compopt, not {type(optimizer).__name__}: "
                "use torchtitan's own OptimizersContainer for others."
            )
        self.optimizers = [optimizer]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._validate_params(params)
        self._post_init(params)

    def state_dict(self) -> dict[str, Any]:
        [model], [optimizer] = self.model_parts, self.optimizers
        end_open_rounds([optimizer])
        optimizer.consolidate_state()
        return get_optimizer_state_dict(model, optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        [model], [optimizer] = self.model_parts, self.optimizers
        set_optimizer_state_dict(model, optimizer, state_dict)


def find_group(params: Iterable[Tensor], dim: str) -> torch.distributed.ProcessGroup | None:
    """Return the process group of a dimension of the mesh of ``params``, None if it has one rank.

    By "dp_replicate" torchtitan means the ranks that hold the same shards.
    """
    for p in params:
        mesh: Any = getattr(p, "device_mesh", None)
        root = None if mesh is None else mesh._get_root_mesh()
        if root and dim in (root.mesh_dim_names or ()) and root[dim].size() > 1:
            group: torch.distributed.ProcessGroup = root[dim].get_group()
            return group
    return None


def shard_only(model_spec: Any) -> Any:
    """Return ``model_spec`` with a model that FSDP2 shards inside each replica, and averages not
    between replicas, which the optimizer does.

    Gradients are still those of the sum over all ranks, by which torchtitan divides its loss.
    """

    def parallelize(model: nn.Module, *, parallel_dims: Any, **options: Any) -> nn.Module:
        if parallel_dims.spmd_backend != "partial_dtensor":
            raise ValueError(
                f"shard_only cannot take the mesh of spmd_backend={parallel_dims.spmd_backend!r} "
                'apart: set config.parallelism.spmd_backend = "partial_dtensor".'
            )
        replicas = parallel_dims.dp_replicate
        parallel_dims.get_mesh("fsdp")  # makes all meshes, which the copy below shares
        inside = copy.copy(parallel_dims)
        inside.dp_replicate = 1
        model = model_spec.parallelize_fn(model, parallel_dims=inside, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1 / replicas)
        return model

    return dataclasses.replace(model_spec, parallelize_fn=parallelize)
