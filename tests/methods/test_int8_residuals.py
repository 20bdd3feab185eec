"""Residuals in 8 bits: the codec by its definition, conservation in expectation, checkpoints of both kinds."""

from __future__ import annotations

import pytest
import torch
from conformance import loss as loss_of_small
from conformance import make_ranks
from sim import Ranks
from slow_rows import in_turn
from table import by_name, in_int8
from torch import nn

import compopt
from compopt._backends.native.native_ops import NativeOps
from compopt._state.blocks import BLOCK_BYTES, BlockCodec
from compopt._state.residuals import Residuals

ROW = 128


def randn(*shape: int, seed: int = 0, **options) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def encoded(codec: BlockCodec, x: torch.Tensor, seed: tuple | None, first: int = 0) -> torch.Tensor:
    blocks = torch.full((-(-len(x) // ROW), BLOCK_BYTES), 77, dtype=torch.int8)
    codec.encode(x.clone(), blocks, seed, first)
    return blocks


def decoded(codec: BlockCodec, blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, torch.nan)
    codec.decode(blocks, out)
    return out


def units(x: torch.Tensor) -> torch.Tensor:
    """A 127th of the largest value of each value's block."""
    padded = torch.cat([x, x.new_zeros(-len(x) % ROW)]).view(-1, ROW)
    return (padded.abs().amax(1, keepdim=True) / 127).expand_as(padded).reshape(-1)[: len(x)]


@pytest.mark.parametrize("codec", [BlockCodec(), NativeOps().blocks], ids=["torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [5, ROW, 1000, 600 * ROW + 3])
def test_values_are_within_a_unit_and_encoded_again_they_are_the_same(codec, dtype, n):
    x = randn(n, dtype=dtype) * randn(n, seed=1, dtype=dtype).exp()
    x[: n // 4] = 0
    for seed, most in ((None, 0.51), ((3, 1), 1.001)):
        blocks = encoded(codec, x, seed)
        y = decoded(codec, blocks, x)
        assert ((y - x).abs() <= most * units(x)).all()
        assert not y[: n // 4].any()
        for again in (None, (3, 1), (4, 1)):  # whatever the random numbers
            assert torch.equal(encoded(codec, y, again, first=17), blocks)
    assert torch.equal(encoded(codec, x, (3, 1)), encoded(BlockCodec(), x, (3, 1)))


@pytest.mark.parametrize("codec", [BlockCodec(), NativeOps().blocks], ids=["torch", "native"])
def test_rounding_is_without_bias(codec):
    """The mean over seeds of what is stored is the value: within 5 standard errors of at most half a unit."""
    x, draws = randn(4 * ROW), 2000
    mean = sum(decoded(codec, encoded(codec, x, (step, 0)), x) for step in range(draws)) / draws
    assert ((mean - x).abs() <= 5 * 0.5 / draws**0.5 * units(x)).all()


def test_random_numbers_follow_from_the_place_and_not_from_what_is_encoded_together():
    x, native = randn(700 * ROW), NativeOps().blocks
    whole = encoded(native, x, (1, 2), first=300)
    for first, last in ((0, 100), (100, 700), (250, 260)):
        for codec in (BlockCodec(), native):
            part = encoded(codec, x[first * ROW : last * ROW], (1, 2), first=300 + first)
            assert torch.equal(part, whole[first:last])


def test_the_blocks_do_not_depend_on_the_number_of_threads(monkeypatch):
    x, native = randn(1200 * ROW + 5), NativeOps().blocks
    wanted = encoded(native, x, (1, 2), first=7)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(encoded(native, x, (1, 2), first=7), wanted)
    assert torch.equal(decoded(native, wanted, x), decoded(BlockCodec(), wanted, x))


def test_what_is_not_finite_is_stored_as_nan():
    x = randn(3 * ROW)
    x[5], x[ROW + 5] = torch.inf, torch.nan
    for codec in (BlockCodec(), NativeOps().blocks):
        y = decoded(codec, encoded(codec, x, (1,)), x)
        assert y[: 2 * ROW].isnan().all() and y[2 * ROW :].isfinite().all()


SHAPES = [(96, 160), (64, 130), (70,), (96, 160)]


def conserve(make, steps: int = 120) -> tuple[torch.Tensor, float]:
    """The part of all gradients that is missing, over compressed tensors: a parameter has moved by what was applied."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = make(torch.optim.SGD(params, lr=1.0), simulate=True, residual_dtype="int8")
    given = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    square = 0.0
    for step in range(steps):
        for n, p in enumerate(params):
            p.grad = randn(*p.shape, seed=100 * step + n)
            given[n] += p.grad
        optimizer.step()
        residual = Residuals(optimizer._buckets[0])
        square += sum(float(units(residual.read(i).reshape(-1)).square().mean()) for i in residual.select()) / 3
    missing = []
    bucket = optimizer._buckets[0]
    for i, p in enumerate(bucket.params):
        if p.dim() > 1:
            n = next(n for n, q in enumerate(params) if q is p)
            held = Residuals(bucket).read(i).double()
            missing.append((-p.detach().double() + held - given[n]).view(-1))
    return torch.cat(missing), square**0.5


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.slow), "native"], indirect=True)
@pytest.mark.parametrize(
    "make",
    [
        lambda base, **o: compopt.Separate(base, rank=4, dense_steps=3, **o),
        lambda base, **o: compopt.Average(base, payload_dtype="int4", **o),
        lambda base, **o: compopt.Average(base, payload_dtype="int2", **o),
    ],
    ids=["Separate", "Average int4", "Average int2"],
)
def test_in_expectation_gradients_are_applied_or_stay_in_residuals(backend, make):
    """Each step's rounding adds an error of mean 0 and of at most half a unit: their sum is within that, and the mean
    over all elements within 5 standard errors of 0.
    """
    missing, deviation = conserve(make)
    assert float(missing.square().mean()) ** 0.5 < 0.5 * deviation
    assert abs(float(missing.mean())) < 5 * 0.5 * deviation / len(missing) ** 0.5
    assert missing.any()  # rounded indeed


@pytest.mark.parametrize("backend", ["torch", "native"], indirect=True)
def test_what_is_set_or_added_is_rounded_at_random(backend):
    """A value of a third of a unit is stored as 0 or as a unit, in a third of all steps."""
    params = [nn.Parameter(torch.zeros(64, 128))]
    optimizer = compopt.SeparateAdam(params, simulate=True, rank=4, residual_dtype="int8")
    bucket = optimizer._buckets[0]
    residuals, value = Residuals(bucket), torch.full((64, 128), 1 / 3)
    value[:, 0] = 127
    for store in (residuals.set, residuals.add):
        units_stored = []
        for bucket.group["step"] in range(9):
            residuals.clear()
            store([(0, value)])
            units_stored.append(residuals.read(0)[:, 1:].clone())
        units_stored = torch.stack(units_stored)
        assert units_stored.unique().tolist() == [0, 1] and float(units_stored.mean()) == pytest.approx(1 / 3, abs=0.02)
        assert not torch.equal(*units_stored[:2])


def two_steps() -> tuple[torch.Tensor, torch.Tensor]:
    """A dense step, and one that sends a projection: a parameter and its residual."""
    p = nn.Parameter(torch.zeros(64, 130))
    base = torch.optim.SGD([p], lr=1.0)
    optimizer = compopt.Separate(base, rank=4, dense_steps=1, payload_dtype=None, simulate=True, residual_dtype="int8")
    for step in range(2):
        p.grad = randn(64, 130, seed=step)
        optimizer.step()
    return p.detach(), Residuals(optimizer._buckets[0]).read(0).reshape(-1)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_kernels_for_gpus_work_on_residuals_that_torchs_operators_decode(backend, monkeypatch):
    p, residual = two_steps()
    monkeypatch.setenv("COMPOPT_BACKEND", "torch")
    other, wanted = two_steps()
    torch.testing.assert_close(p, other, rtol=0, atol=1e-5)
    # what is rounded differs in last bits
    assert residual.any() and ((residual - wanted).abs() <= 1.02 * units(wanted)).all()
    assert float((residual != wanted).float().mean()) < 0.01


# Options and state

RESIDUALS = {
    "RadiusAdamW": dict(density=0.3, interval=4, dense_steps=2),
    "TagcAdamW": dict(density=0.2, dense_steps=2),
    "SeparateAdam": dict(rank=4, dense_steps=2),
}
WRAPPERS = {
    "Separate": dict(rank=4, dense_steps=2),
    "Average": dict(payload_dtype="int4"),
    "LocalSteps": dict(every=3, growth_steps=0, payload_dtype="int4"),
}


def make_optimizer(name: str, params, dtype: object = "int8", **options) -> torch.optim.Optimizer:
    options = {**RESIDUALS.get(name, {}), **WRAPPERS.get(name, {}), "residual_dtype": dtype, **options}
    if name in WRAPPERS:
        return getattr(compopt, name)(torch.optim.AdamW(params, lr=1e-2), **options)
    return getattr(compopt, name)(params, lr=1e-2, **options)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(70, 96), nn.Tanh(), nn.Linear(96, 70))


def loss(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = randn(16, 70, seed=10 * step + rank)
    return (net(x) - x.flip(1)).square().mean()


def trained(name: str, dtype: object, steps: int, **options) -> Ranks:
    ranks = Ranks(
        2, model, lambda ps, process_group: make_optimizer(name, ps, dtype, process_group=process_group, **options)
    )
    ranks.train(loss, steps)
    return ranks


def residuals_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Those of a state dict."""
    entries = optimizer.state_dict()["state"].values()
    anchored = [entry["outer"]["optimizer"] if "outer" in entry else entry for entry in entries]
    return [entry["residual"].clone() for entry in anchored if "residual" in entry]


every_class = pytest.mark.parametrize("name", [*RESIDUALS, *WRAPPERS])


@every_class
def test_state_takes_a_quarter_and_a_state_dict_has_numbers_in_the_shapes_of_parameters(name):
    ranks = trained(name, torch.int8, 6)
    optimizer = ranks.optimizers[0]
    buckets = optimizer._anchors.buckets if name == "LocalSteps" else optimizer._buckets
    stored = sum(bucket.flat["residual"].nbytes for bucket in buckets)
    kept = residuals_of(optimizer)
    numbers = sum(e.numel() for e in kept)
    assert numbers and stored <= 1.04 * numbers + BLOCK_BYTES * len(kept)
    shapes = {p.shape for p in ranks.models[0].parameters()}
    assert all(e.dtype == torch.float32 and e.shape in shapes for e in kept) and any(e.any() for e in kept)
    assert optimizer.stats.residual_norm() == pytest.approx(
        float(torch.cat([e.view(-1) for e in kept]).norm()), rel=1e-4
    )


@pytest.mark.parametrize(
    ("name", "kinds"), in_turn([*RESIDUALS, *WRAPPERS], (("int8", None), (None, "int8"), ("int8", "int8"))), ids=str
)
def test_a_checkpoint_of_either_kind_loads_into_either(name, kinds):
    saved, loaded = kinds
    before, after = trained(name, saved, 7), trained(name, loaded, 1)
    for (_, old, a), (_, new, b) in zip(before, after, strict=True):
        new.load_state_dict(old.state_dict())
        b.load_state_dict(a.state_dict())
        for wanted, got in zip(residuals_of(a), residuals_of(b), strict=True):
            off = 0 if saved else 1.001 * units(wanted.view(-1)).view(wanted.shape)
            assert ((got - wanted).abs() <= off).all()
    after.steps = before.steps
    after.train(loss, 3)
    after.finish_round(loss)
    after.assert_replicas_equal()


@pytest.mark.parametrize("damage", ["not finite", "too short"])
def test_a_damaged_residual_is_refused(damage):
    ranks = trained("SeparateAdam", "int8", 4)
    saved = ranks.optimizers[0].state_dict()
    e = next(entry for entry in saved["state"].values() if "residual" in entry)
    e["residual"] = e["residual"][:-1] if damage == "too short" else e["residual"].clone().fill_(torch.nan)
    with pytest.raises(ValueError, match=r"residual.*(damaged|elements)"):
        ranks.optimizers[0].load_state_dict(saved)


@every_class
def test_another_dtype_is_refused_by_name(name):
    for dtype in ("int4", torch.float32, 8):
        with pytest.raises(ValueError, match=r"residual_dtype must be None or 'int8'"):
            make_optimizer(name, model().parameters(), dtype)


@pytest.mark.parametrize("name", ["SeparateAdam", "RadiusAdamW", "TagcAdamW"])
def test_a_frozen_parameter_keeps_its_residual_and_uses_it_again(name):
    ranks = trained(name, "int8", 6)
    kept = [optimizer.state_dict()["state"][2]["residual"].clone() for optimizer in ranks.optimizers]
    for flag in (False, True):
        for net in ranks.models:
            net[2].weight.requires_grad_(flag)
        if not flag:
            ranks.train(loss, 2)
            assert all(p.grad is None or not p.grad.any() for p in [ranks.models[0][2].weight])
            states = [optimizer.state_dict()["state"][2]["residual"] for optimizer in ranks.optimizers]
            assert all(map(torch.equal, states, kept)) and kept[0].any()
            ranks.world.consolidate(ranks.optimizers)
            mean = ranks.optimizers[0].state_dict()["state"][2]["residual"]
            off = units(torch.stack(kept).mean(0).view(-1)).view(mean.shape)
            assert ((mean - torch.stack(kept).mean(0)).abs() <= off).all()
    ranks.train(loss, 2)
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("backend", ["torch"], indirect=True)  # as offloaded state is computed
def test_parameters_of_half_precision_and_offload_work_too(backend):
    for options in (dict(offload="residual"), dict(offload="residual", payload_dtype="int8")):
        ranks = trained("RadiusAdamW", "int8", 9, **options)
        other = trained("RadiusAdamW", "int8", 9, **{**options, "offload": None})
        for a, b in zip(ranks.models, other.models, strict=True):
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    case = in_int8(by_name["SeparateAdam"], projection="tracked", ratio=None, rank=4)
    ranks = make_ranks(case, 2, torch.bfloat16)
    ranks.train(loss_of_small, 6)
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("backend", ["torch", "native"], indirect=True)
def test_large_stacks_are_decoded_in_parts_with_the_same_result(backend, monkeypatch):
    def run(limit: int) -> list[torch.Tensor]:
        monkeypatch.setattr("compopt._state.residuals.CHUNK", limit)
        ranks = Ranks(
            2,
            lambda: nn.Sequential(*[nn.Linear(96, 96) for _ in range(4)]),
            lambda ps, process_group: make_optimizer("SeparateAdam", ps, process_group=process_group),
        )
        ranks.train(lambda net, rank, step: net(randn(8, 96, seed=10 * step + rank)).square().mean(), 6)
        return [*ranks.models[0].parameters()]

    for whole, parts in zip(run(2**20), run(2 * 96 * 96), strict=True):
        assert torch.equal(whole, parts)
