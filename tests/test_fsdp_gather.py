"""``gather_dtype``: FSDP2's parameter gathers in int8, on gloo processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, apart, cut, loss, make, train, whole
from ranks import run_ranks
from test_ddp_refusals import catch_message
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import compopt


def separate(model: nn.Module, **options) -> compopt.SeparateAdam:
    options = {"lr": 1e-2, "warmup_steps": 2, "rank": 4, "payload_dtype": None, "gather_dtype": "int8", **options}
    return compopt.SeparateAdam(model.parameters(), **options)


def rounded(p: Tensor, ranks: int, dim: int = 0) -> Tensor:
    """The oracle: a parameter as every rank should compute with it, by the definition."""
    if p.dim() < 2 or p.numel() < 4096:
        return p
    parts = []
    for shard in p.chunk(ranks, dim):
        flat = shard.reshape(-1)
        padded = torch.cat([flat, flat.new_zeros(-len(flat) % 128)]).view(-1, 128)
        unit = (padded.abs().amax(1, keepdim=True) / 127).float().to(p.dtype)
        codes = torch.where(unit > 0, (padded / unit + 0.5).floor(), 0)
        parts.append((codes * unit).view(-1)[: len(flat)].view(shard.shape))
    return torch.cat(parts, dim)


def seen_in_forward(model: nn.Module, *args) -> dict[str, Tensor]:
    """Whole parameters as forward has them, by name; those of nested modules when these run."""
    seen: dict[str, Tensor] = {}

    def note(module: nn.Module, prefix: str) -> None:
        for name, p in module.named_parameters(recurse=False):
            seen[prefix + name] = p.detach().clone()

    hooks = [
        module.register_forward_pre_hook(lambda module, _, prefix=f"{name}." if name else "": note(module, prefix))
        for name, module in model.named_modules()
    ]
    loss(model, *args)
    for hook in hooks:
        hook.remove()
    return seen


def farthest(seen: dict[str, Tensor], exact: dict[str, Tensor], ranks: int) -> float:
    """The largest distance from the oracle, relative to the largest value of each tensor."""
    wanted = {name: rounded(p, ranks) for name, p in exact.items()}
    return max(
        float((seen[name].double() - p.double()).abs().max() / p.abs().max().clamp(min=1e-9)) for name, p in wanted.items()
    )


def forward_values(rank: int, dtype: torch.dtype) -> dict[str, float]:
    ranks, exact = dist.get_world_size(), {n: p.detach().clone() for n, p in make(dtype=dtype).named_parameters()}
    model = cut(make(dtype=dtype))
    optimizer, masters = separate(model), dict(model.named_parameters())
    seen = seen_in_forward(model, 0, rank, dtype)
    mine = torch.cat([p.reshape(-1) for p in seen.values()])
    first = mine.clone()
    dist.broadcast(first, 0)
    with torch.inference_mode():
        loss(model, 0, rank, dtype)
    with torch.no_grad():
        again = seen_in_forward(model, 0, rank, dtype)
    del optimizer
    return {
        "far": farthest(seen, exact, ranks),
        "apart": float((mine - first).abs().max()),
        "masters": max(float((masters[n].full_tensor() - p).abs().max()) for n, p in exact.items()),
        "rounded": sum(not torch.equal(seen[n], p) for n, p in exact.items()),
        "eval": max(float((again[n] - p).abs().max()) for n, p in seen.items()),
    }


def all_of(rank: int) -> dict[str, dict[str, float]]:
    return {str(dtype): forward_values(rank, dtype) for dtype in (torch.float32, torch.float64)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_computes_with_the_values_of_the_definition(ranks):
    for results in run_ranks(all_of, ranks):
        for dtype, got in results.items():
            assert got["far"] < (2e-6 if dtype == "torch.float32" else 1e-7), (dtype, got)
            assert got["apart"] == got["masters"] == got["eval"] == 0, (dtype, got)
            assert got["rounded"] == 4  # up, down, flat, conv: no bias, no norm
