"""Ranks that compute with different numbers of threads: what each finds by itself, of equal numbers, is equal."""

from __future__ import annotations

import hashlib

import pytest
import torch
from ranks import run_ranks
from torch import nn

import compopt
from compopt._ops.operations import reproducible_squared_norm, squared_norm

SHAPE = (50, 7001)
MAKES = {
    "Radius": lambda p: compopt.RadiusAdamW(p, density=0.3, interval=3, dense_steps=1, max_grad_norm=1.0),
    "SCAPE": lambda p: compopt.ScapeAdamS(p, density=0.1, dense_steps=2, max_grad_norm=1.0),
    "TAGC": lambda p: compopt.TagcAdamW(p, density=0.1, max_grad_norm=1.0),
    "tracked": lambda p: compopt.SeparateAdam(
        p, projection="tracked", rank=8, max_grad_norm=1.0, payload_dtype=torch.int8, dense_steps=0
    ),
    "gaussian": lambda p: compopt.SeparateAdam(p, projection="gaussian", ratio=16, max_grad_norm=1.0),
}


def train(rank: int, backend: str) -> dict[str, str]:
    import os

    os.environ["COMPOPT_BACKEND"] = backend
    torch.set_num_threads(1 + rank)
    results = {}
    for name, make in MAKES.items():
        params = [nn.Parameter(torch.linspace(-1, 1, 50 * 7001).view(SHAPE)), nn.Parameter(torch.zeros(200_001))]
        optimizer = make(params)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        results[name] = hashlib.blake2b(b"".join(p.detach().numpy().tobytes() for p in params)).hexdigest()
    return results


@pytest.mark.parametrize("backend", ["torch"])
def test_replicas_are_equal_to_the_bit(backend):
    one, other = run_ranks(train, 2, backend)
    assert one == other


@pytest.mark.parametrize("n", [0, 1, 65535, 65536, 65537, 500_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_norm_that_clips_is_the_norm(n, dtype):
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(float(reproducible_squared_norm(x)))
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1] == pytest.approx(float(x.double().square().sum()), rel=1e-6)
    if n:
        assert float(reproducible_squared_norm(x.float() * 1e25)) == pytest.approx(
            float(squared_norm(x.double() * 1e25)), rel=1e-5
        )
