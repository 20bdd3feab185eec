"""Payloads of 16 bits: what rounding takes off what compressed tensors send is owed again, whatever is sent of them."""

from __future__ import annotations

import conformance
import pytest
import test_quantized as quantized
import torch
from sim import Ranks
from table import CASES, projecting
from torch import nn

import compopt

by_name = {case.name: case for case in CASES}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
BACKENDS = pytest.mark.parametrize("backend", ["torch", "auto"])


@pytest.fixture
def at_half(monkeypatch):
    """The tests of int8's conservation, with payloads of this dtype: one rank, for which the mean is exact."""

    def use(backend: str, dtype: torch.dtype) -> None:
        monkeypatch.setenv("COMPOPT_BACKEND", backend)
        make = conformance.make_ranks
        monkeypatch.setattr(
            conformance, "make_ranks", lambda case, size, **options: make(case, size, **options, payload_dtype=dtype)
        )

    return use


@HALVES
@BACKENDS
def test_radius_conserves(dtype, backend, at_half, monkeypatch):
    at_half(backend, dtype)
    quantized.test_radius_conserves_what_rounding_drops(1, backend, monkeypatch, "int8")


@HALVES
@BACKENDS
def test_scape_conserves(dtype, backend, at_half):
    at_half(backend, dtype)
    quantized.test_scape_conserves_what_rounding_drops(1, "int8")


@HALVES
@BACKENDS
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("delay", [0, 1])
def test_sharded_scape_conserves(delay, size, dtype, backend, monkeypatch):
    """The owners add up in float32: momentum and both residuals are b1 m + (1 - b1) g + e, at any number of ranks."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    ranks = conformance.make_ranks(
        by_name["ScapeAdamS"], size, sharded=True, payload_dtype=dtype, warmup_steps=2, mask_delay=delay
    )

    def owed() -> list[torch.Tensor]:
        own = quantized.mean_of(ranks, lambda rank: [ranks.optimizers[rank].state[p]["residual"].double().view(-1)
                                                for p in quantized.matrices(ranks.models[rank])])  # fmt: skip
        return [a + c for a, c in zip(own, shared("common"), strict=True)]

    def shared(name: str) -> list[torch.Tensor]:
        return [
            torch.cat([o.state[quantized.matrices(model)[i]][name].double() for _, model, o in ranks]) for i in range(2)
        ]

    for _ in range(7):
        before, m = owed(), shared("exp_avg")
        gradient = [g.view(-1) for g in quantized.one_step(ranks)]
        came = [0.9 * a + 0.1 * g + e for a, g, e in zip(m, gradient, before, strict=True)]
        quantized.assert_conserved(came, shared("exp_avg"), owed())
    assert ranks.optimizers[0].stats.phase == "sparse"


@HALVES
@BACKENDS
@pytest.mark.parametrize("codec", ["compact", "sketch"])
@pytest.mark.parametrize("size", [1, 3])
def test_tagc_conserves(size, codec, dtype, backend, monkeypatch):
    """b1 = 0: the first moment is what the owner was given."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    ranks = conformance.make_ranks(
        by_name["TagcAdamW"], size, betas=(0.0, 0.999), codec=codec, payload_dtype=dtype, sketch_ratio=4
    )
    for step in range(6):
        before = quantized.residual_of(ranks)
        if step == 4:
            for optimizer in ranks.optimizers:  # a dense start taken up again
                optimizer.param_groups[0]["warmup_steps"] = 5
        came = [(g + e).view(-1) for g, e in zip(quantized.one_step(ranks), before, strict=True)]
        given = [
            torch.cat([o.state[quantized.matrices(model)[i]]["exp_avg"].double() for _, model, o in ranks])
            for i in range(2)
        ]
        quantized.assert_conserved(came, given, [e.view(-1) for e in quantized.residual_of(ranks)])
    assert any(e.any() for e in quantized.residual_of(ranks))


@HALVES
@BACKENDS
@pytest.mark.parametrize("projection", ["gaussian", "orthonormal", "tracked"])
def test_separate_feeds_back_what_was_sent(projection, dtype, backend, monkeypatch):
    """e <- beta e + (1 - beta) (h - what arrived of it): plain SGD shows what arrived."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    options = projecting(projection, rank=6, ef_beta=0.8, warmup_steps=2, payload_dtype=dtype)

    def make(params, process_group):
        return compopt.Separate(torch.optim.SGD(params, lr=1.0), process_group=process_group, **options)

    ranks = Ranks(1, conformance.Small, make)
    for t in range(6):
        before, weights = (
            quantized.residual_of(ranks),
            [p.detach().double() for p in quantized.matrices(ranks.models[0])],
        )
        h = [g + e for g, e in zip(quantized.one_step(ranks), before, strict=True)]
        after = [p.detach().double() for p in quantized.matrices(ranks.models[0])]
        beta = 0.8 if t >= 2 else 0.0  # the dense start owes all that was rounded
        for e, x, w, p, got in zip(before, h, weights, after, quantized.residual_of(ranks), strict=True):
            torch.testing.assert_close(got, beta * e + (1 - beta) * (x - (w - p)), rtol=1e-3, atol=1e-6)
        if t < 2:
            assert all(e.any() for e in quantized.residual_of(ranks)), "a dense start rounds too"


@BACKENDS
@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "scale"), [("RadiusAdamW", 1.0), ("ScapeAdamS", 10.0)])
def test_every_rank_owes_what_it_sent_too_little(name, scale, model, backend, monkeypatch):
    """Of dense steps at 2 ranks: message and residual are the gradient and the residual before, also of bfloat16
    models, which send in the gradients' dtype."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    payload = torch.bfloat16 if model == torch.float32 else None
    ranks = conformance.make_ranks(by_name[name], 2, model, warmup_steps=9, payload_dtype=payload)
    ranks.world.record = True
    bucket = ranks.optimizers[0]._buckets[0]
    before = [[torch.zeros(p.shape, dtype=torch.float64) for p in quantized.matrices(model)] for model in ranks.models]
    owed = 0.0
    for _ in range(4):
        ranks.world.log.clear()
        quantized.one_step(ranks)
        ((_, messages),) = [entry for entry in ranks.world.log if entry[0] == "AllReduceMean"]
        for rank, module, optimizer in ranks:
            body = messages[rank][-bucket.numel :].double().split(bucket.lengths)
            for i, p in enumerate(quantized.matrices(module)):
                sent = body[[q is p for q in optimizer._buckets[0].params].index(True)].view(p.shape)
                after = optimizer.state[p]["residual"].double()
                came = p.grad.double() + scale * before[rank][i]
                torch.testing.assert_close(sent + scale * after, came, rtol=1e-5, atol=1e-7)
                before[rank][i], owed = after, owed + float(after.abs().sum())
    assert (owed > 0) == (model == torch.float32), "a gradient of bfloat16 is sent as it is"


def test_a_float32_gradient_of_a_bfloat16_parameter_is_sent_as_it_is():
    """``payload_dtype=None`` is the gradient's dtype, which need not be the parameter's."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this PyTorch knows no dtype of gradients but the parameter's")

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = (nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(2))
            self.wide.grad_dtype = torch.float32

    def loss(model: Wide, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        return ((model.wide.float() + model.narrow.float()) * x).sum()

    for case in CASES:
        if case.build:
            continue  # around torch's AdamW, which does not take such gradients
        ranks = Ranks(2, Wide, lambda params, process_group: case.make(params, process_group=process_group))  # noqa: B023
        ranks.world.record = True
        ranks.train(loss, 5)
        ranks.assert_replicas_equal()
        assert {model.wide.grad.dtype for model in ranks.models} == {torch.float32}
        kinds = {t.dtype for kind, sent in ranks.world.log if "Mean" in kind for t in sent}
        assert kinds - {torch.float64} == {torch.float32, torch.bfloat16}  # TAGC agrees on a norm
        assert ranks.optimizers[0].stats.bytes_dense == 64 * 64 * (4 + 2)
