"""The C passes compute the same bits with every instruction set that this machine has; those it has not are named."""

from __future__ import annotations

import check_neon
import pytest
import torch
from sim import Ranks
from slow_rows import slow_but
from table import by_name
from test_backends import assert_same
from test_native import RUNS, run
from torch import nn

import compopt
from compopt._ops.native import build
from compopt._ops.native.native_ops import NativeOps
from compopt._ops.native.native_selection import find_largest

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="needs a C compiler")
BLOCKS = (16, 512, 4096, 16384, 131072)  # sixteens, the passes' blocks, and what else the package cuts tensors by
SIZES = [n for block in BLOCKS for n in (block - 1, block, block + 1)] + [1, 0, 40_007]


@pytest.fixture(params=["avx512", "avx2", "neon"])
def isa(request, monkeypatch) -> str:
    here = build.list_isas(build.find_compiler())
    if request.param not in here:
        pytest.skip(f"this processor has no {request.param}, only {', '.join(here)}")
    monkeypatch.setenv("COMPOPT_BACKEND", "native")
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", request.param)
    return request.param


def portable(monkeypatch) -> None:
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", "portable")


class Sizes(nn.Module):
    """A tensor beside the end of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in SIZES)


def loss(model: Sizes, rank: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1 + 10 * step + rank)
    return sum(((p - torch.randn(p.shape, generator=random)) ** 2).sum() for p in model.many)


def trained(name: str, options: dict) -> Ranks:
    def make(params, **more):
        return by_name[name].make([{"params": list(params), "compress": True}], **options, **more)

    world = Ranks(2, Sizes, make)
    world.train(loss, 4)
    world.assert_replicas_equal()
    return world


CASES = [
    ("RadiusAdamW", {"dense_steps": 1, "interval": 2, "density": 0.4}),  # read as bits
    ("RadiusAdamW", {"dense_steps": 1, "interval": 2, "density": 0.01, "max_grad_norm": 0.5}),  # as positions
    ("ScapeAdamS", {"dense_steps": 1, "density_steps": 0, "density": 0.1}),
    ("ScapeAdamS", {"dense_steps": 1, "density_steps": 0, "density": 0.01}),
    ("TagcAdamW", {"dense_steps": 1, "density": 0.1}),
    ("AdamS", {}),
    ("Average", {"payload_dtype": "int8"}),
    ("Average", {"payload_dtype": "int4"}),
]


@pytest.mark.parametrize("name, options", slow_but(lambda *row: row in CASES[::2], CASES))
def test_every_processor_computes_the_same_bits_beside_every_block(monkeypatch, isa, name, options):
    ours = trained(name, options)
    assert {o.ops.isa for o in ours.optimizers} == {isa}
    portable(monkeypatch)
    assert_same(trained(name, options), ours, 0.0)


@pytest.mark.parametrize("name, options", [RUNS[2], RUNS[5], RUNS[6]])
def test_every_processor_computes_the_same_bits(monkeypatch, isa, name, options):
    ours = run(monkeypatch, name, "native", options)
    portable(monkeypatch)
    assert_same(run(monkeypatch, name, "native", options), ours, 0.0)


def crowds(n: int) -> list[torch.Tensor]:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    return [x, x.round(), torch.full((n,), -3.0), x * (torch.arange(n) % 50 == 0)]


def selected(monkeypatch, isa: str) -> list[torch.Tensor]:
    """Positions, masks and guesses for crowds with and without ties, from no guess, a good one and bad ones."""
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", isa)
    ops, results = NativeOps(), []
    for x in (x for n in SIZES if n for x in crowds(n)):
        n = len(x)
        for k in sorted({1, n // 100 + 1, n // 3 + 1, n}):
            out = torch.empty(k, dtype=torch.int32)
            for guess in (0.0, 0.5, float(x.abs().kthvalue(n + 1 - k).values) * 0.9, 1e30):
                results += [torch.tensor(find_largest(ops, x, k, out, guess), dtype=torch.float64), out.clone()]
            results.append(ops.top_k_mask(x.abs(), k))
    return results


def test_every_processor_selects_the_same(monkeypatch, isa):
    ours, theirs = selected(monkeypatch, isa), selected(monkeypatch, "portable")
    assert len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_neon_computes_the_same_bits():
    """In an emulator where this is no ARM machine: every function of vectors.h, and all passes that use them."""
    if missing := check_neon.missing():
        pytest.skip(f"neon: not here: {missing}")
    results = check_neon.checksums(["portable"])
    assert set(results) == {"portable", "neon"} and len(set(results.values())) == 1


def test_less_than_there_is_can_be_asked_for_and_nothing_else(monkeypatch):
    monkeypatch.setenv("COMPOPT_BACKEND", "native")
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", "portable")
    assert NativeOps().isa == "portable"
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", "sse9")
    with pytest.raises(ValueError, match=r"COMPOPT_NATIVE_ISA must be one of avx512, .*portable, got 'sse9'"):
        compopt.AdamS([nn.Parameter(torch.zeros(3))])
    here = build.list_isas(build.find_compiler())
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", next(isa for isa in build.INCLUDED if isa not in here))
    with pytest.raises(ValueError, match=r"COMPOPT_NATIVE_ISA=\w+ cannot run here: this processor"):
        compopt.AdamS([nn.Parameter(torch.zeros(3))])
