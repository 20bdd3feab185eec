"""Common parts of the oracles: averaging over ranks, clipping by a global norm, top-k, the weight update."""

import torch
from torch import Tensor

Grads = list[list[Tensor]]  # grads[rank][i]


def as_float64(tensors: list[Tensor]) -> list[Tensor]:
    """Own copies, so that neither side of a comparison can write into the other."""
    return [t.detach().to(torch.float64, copy=True) for t in tensors]


def read_grads(grads: Grads, params: list[Tensor], ranks: int) -> Grads:
    """float64 copies of all ranks' gradients; a missing gradient (None) on a rank counts as zeros."""
    if len(grads) != ranks:
        raise ValueError(f"grads has {len(grads)} entries, one for each of {ranks} ranks is needed")
    for rank, local in enumerate(grads):
        if len(local) != len(params):
            raise ValueError(f"grads[{rank}] has {len(local)} tensors, there are {len(params)} parameters")
    return [
        [
            torch.zeros_like(p) if g is None else g.detach().to(torch.float64, copy=True)
            for g, p in zip(local, params, strict=True)
        ]
        for local in grads
    ]


def mean_over_ranks(grads: Grads) -> list[Tensor]:
    return [torch.stack(same_tensor).mean(0) for same_tensor in zip(*grads, strict=True)]


def clip_by_global_norm(tensors: list[Tensor], max_norm: float | None) -> list[Tensor]:
    """torch.nn.utils.clip_grad_norm_'s formula over all tensors together: never enlarges."""
    if max_norm is None:
        return tensors
    norm = torch.sqrt(sum(t.square().sum() for t in tensors))
    factor = min(1.0, max_norm / (norm.item() + 1e-6))
    return [factor * t for t in tensors]


def top_k(score: Tensor, density: float) -> Tensor:
    """Boolean mask of the max(1, round(density * n)) largest entries."""
    k = max(1, round(density * score.numel()))
    mask = torch.zeros(score.numel(), dtype=torch.bool)
    mask[score.flatten().topk(k).indices] = True
    return mask.view(score.shape)
