"""Small tensors and torch's AdamW on them, for the tests of the oracles."""

import torch

SHAPES = [(6, 5), (4, 3, 2), (7,)]
ADAM = dict(lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def start() -> list[torch.Tensor]:
    return [randn(*shape, seed=i) for i, shape in enumerate(SHAPES)]


def random_grads(ranks: int, step: int) -> list[list[torch.Tensor]]:
    return [[randn(*s, seed=1000 * step + 10 * rank + i) for i, s in enumerate(SHAPES)] for rank in range(ranks)]


def mean(grads: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [sum(local) / len(grads) for local in zip(*grads, strict=True)]


def assert_close(got: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=tolerance, atol=tolerance)


def torch_adamw(ranks: int, steps: int, max_grad_norm: float | None = None, maximize: bool = False):
    """Parameters after each step of torch's AdamW on the averaged gradient."""
    params = [p.requires_grad_() for p in start()]
    optimizer = torch.optim.AdamW(params, **ADAM, maximize=maximize)
    for step in range(steps):
        for p, g in zip(params, mean(random_grads(ranks, step)), strict=True):
            p.grad = g
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_grad_norm)
        optimizer.step()
        yield params
