"""Runs of local steps on simulated ranks, on random gradients."""

from __future__ import annotations

import torch
from problems import SHAPES, gradients, replicas, step, weights

import compopt


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def train(ranks: int, steps: int, dtype=torch.float64, shapes=SHAPES, inner=adamw, **options):
    options = {"every": 4, "growth_steps": 0, "payload_dtype": None, **options}

    def make(params, process_group):
        return compopt.LocalSteps(inner(params), process_group=process_group, **options)

    world, params, optimizers = replicas(ranks, weights(shapes, dtype), make)
    for t in range(steps):
        step(world, params, optimizers, gradients(ranks, t, shapes, dtype))
    return params, optimizers


def single(ranks: int, t: int) -> list[list[torch.Tensor]]:
    return gradients(ranks, t, dtype=torch.float32)


def end_round(optimizers) -> None:
    optimizers[0].comm.world.run([optimizer.end_round for optimizer in optimizers])


def are_equal(params) -> bool:
    """Return True if all ranks hold the same parameters, to the bit."""
    return all(torch.equal(p, q) for other in params[1:] for p, q in zip(params[0], other, strict=True))


def copies(params) -> list[list[torch.Tensor]]:
    return [[p.detach().clone() for p in rank] for rank in params]
