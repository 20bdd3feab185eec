"""Triton's kernels beside PyTorch's operators, with dtypes, layouts and options that their tables have to follow.

Each class has a few rows, in which every dtype, payload and layout occurs. Gradients do not follow from parameters,
so that a difference does not grow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sim import World
from torch import Tensor, nn

import compopt
from compopt.separate import stacks

compopt_kernels = pytest.importorskip("compopt_kernels", reason="needs triton")

SHAPES = [(9, 131), (9, 131), (33,)]
STEPS = 4
RADIUS = dict(density=0.3, interval=3, dense_steps=1, weight_decay=0.0)  # masks do not follow parameters
SCAPE = dict(density=0.2, dense_steps=1, density_steps=0)
TRACKED = dict(rank=3, dense_steps=2)
HALF, WIDE = torch.bfloat16, torch.float64
# class, its options, the dtype of parameters and of gradients, the payload's; a vector's gradients are float32
ROWS = [
    ("RadiusAdamW", RADIUS, HALF, HALF, "float32"),
    ("RadiusAdamW", RADIUS | dict(maximize=True), WIDE, torch.float32, "float16"),
    ("RadiusAdamW", RADIUS, torch.float32, WIDE, "int8"),
    ("AdamS", {}, HALF, torch.float32, "int4"),
    ("AdamS", dict(maximize=True), torch.float16, torch.float16, None),
    ("ScapeAdamS", SCAPE | dict(max_grad_norm=0.5), HALF, HALF, "float32"),
    ("ScapeAdamS", SCAPE | dict(maximize=True), WIDE, torch.float32, "float32"),
    ("SeparateAdam", TRACKED | dict(max_grad_norm=0.5), HALF, HALF, "float32"),
    ("SeparateAdam", dict(dense_steps=5, max_grad_norm=0.5), torch.float32, HALF, "bfloat16"),
    ("SeparateAdam", TRACKED | dict(maximize=True), torch.float16, torch.float32, None),
]
MAIN = {1, 2, 3, 4, 5, 9}  # every class and every dtype


def make_gradient(p: Tensor, rank: int, step: int) -> Tensor | None:
    """The second rank has none in the third step; a vector's is every second element of another."""
    if rank == 1 and step == 2:
        return None
    shared, own = (torch.Generator().manual_seed(1000 * (rank + 1) * k + 10 * step + p.ndim) for k in (0, 1))
    wide = torch.randn((*p.shape, 2), generator=shared) + torch.randn((*p.shape, 2), generator=own)
    return wide.to(p.grad_dtype)[..., 0] if p.ndim == 1 else wide[..., 0].to(p.grad_dtype).contiguous()


def train(backend: str, monkeypatch, device: str, row: tuple) -> dict[str, list[Tensor]]:
    """Return the state of all tensors on two ranks, and their parameters, as float64."""
    name, options, dtype, grad_dtype, payload = row
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    world, params = World(2), [[nn.Parameter(torch.ones(s, device=device).to(dtype)) for s in SHAPES] for _ in range(2)]
    for p in [p for of_rank in params for p in of_rank]:
        p.grad_dtype = grad_dtype if p.ndim == 2 else torch.float32
    known: dict[str, Any] = {"payload_dtype": payload} | ({} if name == "AdamS" else {"compress": True}) | options
    in_group = {"compress": known.pop("compress")} if "compress" in known else {}
    optimizers = [
        getattr(compopt, name)([{"params": of_rank, **in_group}], 0.1, process_group=comm, **known)
        for of_rank, comm in zip(params, world.comms, strict=True)
    ]
    for step in range(STEPS):
        for rank, of_rank in enumerate(params):
            for p in of_rank:
                g = make_gradient(p, rank, step)
                p.grad = None if g is None else g.to(device)
        world.step(optimizers)
    assert {o.backend for o in optimizers} == {backend} and not any(o.stats.reason for o in optimizers)
    results: dict[str, list[Tensor]] = {"parameter": [p.detach().double() for of_rank in params for p in of_rank]}
    for optimizer, of_rank in zip(optimizers, params, strict=True):
        optimizer.state_dict()  # masks that are on their way
        for p in of_rank:
            for key, value in optimizer.state[p].items():
                results.setdefault(key, []).append(value.double())
    return results


@pytest.mark.filterwarnings("ignore:rank 1 had no gradients")
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if n in MAIN else pytest.mark.slow) for n, row in enumerate(ROWS)],
    ids=lambda row: f"{row[0]}, {row[2]}, {row[3]}, {row[4]}".replace("torch.", ""),
)
def test_kernels_read_the_dtypes_that_tensors_have(row, monkeypatch, device):
    ours, theirs = (train(backend, monkeypatch, device, row) for backend in ("triton", "torch"))
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        # the interpreter cuts bfloat16 off, where a GPU rounds, and then masters become their parameters
        limit = {HALF: 0.05, torch.float16: 5e-3}.get(row[2], 1e-3) if name in ("parameter", "master") else 1e-3
        for mine, yours in zip(ours[name], expected, strict=True):
            if name == "basis":  # QR and Cholesky-QR may choose other signs
                mine, yours = mine.abs(), yours.abs()
            size = yours.abs()
            is_near = (mine - yours).abs() <= limit * (size + size.mean())
            # where a value is between two codes of a payload, or is selected or not, all that follows differs
            assert (~is_near).double().sum() <= 0.03 * len(is_near.view(-1)), name


def test_matrices_of_more_columns_than_a_program_holds_are_multiplied_by_pytorch(monkeypatch, device):
    monkeypatch.setenv("COMPOPT_BACKEND", "triton")
    optimizer = compopt.SeparateAdam([nn.Parameter(torch.ones(SHAPES[0], device=device))])
    (bucket,), ops = optimizer._buckets, optimizer.ops
    fused = [ops.fused[function] for function in (stacks.multiply, stacks.orthonormalize_columns)]
    most = compopt_kernels.MAX_NARROW
    for rank, count in ((16, 2), (17, 1), (most, 1), (most + 1, 0)):
        bucket.group["rank"] = rank
        assert sum(each.supports(ops, bucket) for each in fused) == count
