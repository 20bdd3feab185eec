"""`compopt.diagnose` measures what an oracle finds."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn
from watched import FEW, noise, watch

from compopt.planning.candidates import CANDIDATES, Candidate, CandidateRuns, adam_options
from compopt.planning.diagnosis import summarize_stability, weighted_mean
from compopt.planning.gradient_statistics import (
    TopKStability,
    crop_shape,
    find_eligible_tensors,
    sample_tensors,
)
from compopt.planning.methods import Workload


def brute_force(rows: list[torch.Tensor], density: float, lag: int, every: int) -> tuple[float, float]:
    k, overlaps, norms = round(density * len(rows[0])), [], []
    for t in range(lag, len(rows)):
        if lag > 1 and (t + 1) % every:
            continue
        now, before = (set(rows[s].abs().argsort(descending=True)[:k].tolist()) for s in (t, t - lag))
        overlaps.append(len(now & before) / k)
        of = [math.sqrt(sum(float(rows[t][i]) ** 2 for i in chosen)) for chosen in (before, now)]
        norms.append(of[0] / of[1])
    return sum(overlaps) / len(overlaps), sum(norms) / len(norms)


def test_stability_is_what_sets_say():
    random = torch.Generator().manual_seed(0)
    rows, x = [], torch.randn(200, generator=random)
    for _ in range(121):
        x = 0.9 * x + 0.4 * torch.randn(200, generator=random)
        rows.append(x.clone())
    meter = TopKStability([200])
    for x in rows:
        meter.record_step([x])
    for density in (0.4, 0.1, 0.01):
        for lag in (1, 10, 100):
            results = [sum(v) / len(v) for v in (meter.overlaps[density, lag, 0], meter.norms[density, lag, 0])]
            assert results == pytest.approx(brute_force(rows, density, lag, 10), abs=1e-6)
    assert len(meter.masks) <= 11  # every tenth of the last 100 steps, and the last


def test_known_sets_have_known_overlaps():
    """Three of the ten largest are others from step to step; between them nobody has a gradient."""
    meter = TopKStability([100], densities=(0.1,))
    for step in range(3):
        x = torch.zeros(100)
        x[3 * step : 3 * step + 10] = 1
        meter.record_step([x])
    meter.record_step([None])
    meter.record_step([x])
    assert meter.overlaps[0.1, 1, 0] == pytest.approx([0.7, 0.7])
    assert meter.norms[0.1, 1, 0] == pytest.approx([math.sqrt(0.7)] * 2)


def test_masks_settle_from_the_first_third_of_the_steps_to_the_last():
    meter = TopKStability([4096, 4096])
    for i, shift in enumerate((0.0, 0.125)):
        meter.overlaps[0.1, 1, i] = [shift, shift, 0.5, 0.5, 0.75 + shift, 0.75 + shift]
    results = summarize_stability(meter, parts_of(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))))
    assert (results["settling", "first"], results["settling", "last"]) == (0.0625, 0.8125)


def test_names_are_those_of_the_model_within_its_wrappers():
    compiled = nn.Sequential(OrderedDict(_orig_mod=nn.Sequential(nn.Linear(64, 64))))
    wrapped = nn.Sequential(OrderedDict(module=compiled))
    assert [part.name for part in parts_of(wrapped)] == ["0.weight"]


def test_of_a_large_tensor_some_elements_are_compared():
    meter = TopKStability([1 << 17])
    meter.record_step([torch.arange(float(1 << 17))])
    (mask,) = meter.masks[1]
    assert mask.shape[1] == 1 << 15 and mask[:, -300:].all() and mask.sum(1).tolist() == [13107, 3277, 328]


def parts_of(model: nn.Module, elements: int = 1 << 20) -> list:
    named = {id(p): name for name, p in model.named_parameters()}
    return sample_tensors(find_eligible_tensors([{"params": list(model.parameters())}], named), elements)


def test_residuals_are_in_units_of_the_gradient():
    rows = noise(8)
    records = watch(rows, {"SCAPE": FEW["SCAPE 0.1"], "dense": Candidate("AdamS", {}, "AdamW+DDP")})
    run = records.runs.runs["SCAPE"]
    assert run.residual_norm() == pytest.approx(run.optimizer.stats.residual_norm() / 0.1)
    assert {row.method: row.share for row in records.rows}["dense"] == 1.0


def test_bytes_are_those_on_the_network():
    """An all-reduce sends each value twice; TAGC's reduce-scatter and gather send each once, and its bitmaps go there
    and back.
    """
    work = Workload(parameters=1000, compressed=1.0, side=10, perimeter=20, large=0.8)
    union = 1 - 0.9**2  # of two ranks' selections
    sent = 4 * (union * 800 + 200) + 2 * 800 / 8 + 4 * 1000
    assert CANDIDATES["TAGC 0.1"].share_of_bytes(work, 2) == pytest.approx(sent / (2 * 4 * 1000))
    mask = 1000 / 8 / 20  # a broadcast, every 20 steps
    sent = 2 * 4 * 1000 * (0.4 * 19 / 20 + 1 / 20) + mask
    assert CANDIDATES["Radius 0.4"].share_of_bytes(work, 2) == pytest.approx(sent / (2 * 4 * 1000))


def updates_of(rows: list[torch.Tensor], betas: tuple[float, float] = (0.9, 0.999)) -> list[torch.Tensor]:
    """AdamW's, written down again in float64."""
    m, v, results = torch.zeros_like(rows[0]).double(), torch.zeros_like(rows[0]).double(), []
    for t, g in enumerate(rows, 1):
        m, v = betas[0] * m + (1 - betas[0]) * g.double(), betas[1] * v + (1 - betas[1]) * g.double() ** 2
        results.append(m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + 1e-8))
    return results


def top_k(rows: list[torch.Tensor], density: float, start: int) -> tuple[list[torch.Tensor], list[float]]:
    """Return what one rank of TAGC's sends of each gradient, and the norms of what it holds back."""
    held, sent, norms = torch.zeros_like(rows[0]), [], []
    for t, g in enumerate(rows):
        h = g + held
        if t >= start:
            mask = torch.zeros(h.numel(), dtype=torch.bool)
            mask[h.flatten().abs().argsort(descending=True)[: h.numel() - math.ceil((1 - density) * h.numel())]] = True
            held = h * ~mask.view_as(h)
            h = h - held
            norms.append(float(held.norm()))
        sent.append(h)
    return sent, norms


def test_what_a_method_keeps_and_holds_back_is_what_an_oracle_finds():
    rows, start = noise(20), 3
    candidate = Candidate("TagcAdamW", {"density": 0.25})
    records = watch(rows, {"top-k": candidate}, start, betas=(0.8, 0.99))
    sent, norms = top_k(rows, 0.25, start)
    pairs = zip(updates_of(sent, (0.8, 0.99))[start:], updates_of(rows, (0.8, 0.99))[start:], strict=True)
    cosines = [float((a * b).sum() / a.norm() / b.norm()) for a, b in pairs]
    assert records.rows[0].kept == pytest.approx(sum(cosines) / len(cosines), abs=1e-4)
    assert records.findings["kept", "top-k", "weight"] == pytest.approx(records.rows[0].kept, abs=1e-6)
    assert (records.rows[0].least, records.rows[0].most) == (records.findings["kept", "top-k", "weight"],) * 2
    assert records.runs.residuals["top-k"] == pytest.approx(norms, rel=1e-4)
    gradient = sum(float(g.norm()) for g in rows[start:]) / len(rows[start:])
    half = len(norms) // 2
    assert records.rows[0].residual == pytest.approx(max(norms[half:]) / gradient, rel=1e-4)
    assert records.findings["growth", "top-k"] == pytest.approx(max(norms[half:]) / max(norms[:half]), rel=1e-4)
    assert records.rows[0].grows == (max(norms[half:]) / max(norms[:half]) > 1.2)


def test_a_residual_that_shrinks_has_not_grown():
    rows = [0.8**t * g for t, g in enumerate(noise(20))]
    records = watch(rows, {"top-k": Candidate("TagcAdamW", {"density": 0.25})})
    _, norms = top_k(rows, 0.25, 3)
    half = len(norms) // 2
    growth = max(norms[half:]) / max(norms[:half])
    assert growth < 0.9 and records.findings["growth", "top-k"] == pytest.approx(growth, rel=1e-4)


def test_a_part_counts_for_what_it_stands_for():
    """The whole's cosine is that of the layers put together, each as often as its weight says."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(80, 64, bias=False))
    parts = [dataclasses.replace(part, weight=w) for part, w in zip(parts_of(model), (1.0, 9.0), strict=True)]
    runs = CandidateRuns({"one": FEW["Radius 0.4"]}, parts, adam_options([{"betas": (0.9, 0.99)}]), 1)
    for a, b in zip(noise(5, 64, 64), noise(5, 64, 80), strict=True):
        weights, grads = [torch.zeros(64, 64), torch.zeros(64, 80)], [a, b * (torch.rand(64, 80) < 0.5)]
        dense = [u.clone() for u in runs.record_step(weights, grads)]
    theirs = [p.detach() for p in runs.runs["one"].params]
    dots, squares, local = (
        [float((x * y).sum()) for x, y in zip(*pair, strict=True)]
        for pair in ((theirs, dense), (theirs, theirs), (dense, dense))
    )
    wanted = (dots[0] + 9 * dots[1]) / math.sqrt((squares[0] + 9 * squares[1]) * (local[0] + 9 * local[1]))
    assert runs.cosines["one"][-1][-1] == pytest.approx(wanted, rel=1e-5)
    assert weighted_mean(parts, {0: 1.0, 1: 0.0}) == pytest.approx(4096 / (4096 + 9 * 5120))


def test_what_sends_everything_keeps_everything():
    whole = {"whole": Candidate("RadiusAdamW", {"density": 1.0}), "other": Candidate("TagcAdamW", {"density": 1.0})}
    for row in watch(noise(12), whole).rows:
        assert row.kept == pytest.approx(1, abs=1e-6) and row.residual == pytest.approx(0, abs=1e-6)
        assert not row.grows


def test_the_order_follows_the_gradients():
    """Of rank 4, tracked columns lose nothing; of few elements other than 0, nor do those that select."""
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(128, 4, generator=random), torch.randn(4, 128, generator=random)
    low = watch([left @ torch.randn(4, 4, generator=random) @ right for _ in range(20)], dict(CANDIDATES))
    assert low.order[0].startswith("tracked") and low.rows[0].kept > 0.999
    few = torch.rand(128, 128, generator=random) < 0.05
    sparse = watch([few * torch.randn(128, 128, generator=random) for _ in range(20)], dict(CANDIDATES))
    assert sparse.findings["kept", "Radius 0.2", ""] > 0.99 > sparse.findings["kept", "tracked 4, int8", ""]
    assert sparse.findings["overlap", "0.01", "10", ""] < 1
    assert "Start with compopt.SeparateAdam" in str(low)


def test_maximize_and_weight_decay_are_the_optimizers_own():
    """Radius selects by the update, decay and all; a training upwards is judged as it goes."""
    rows = noise(12)
    one = {"radius": Candidate("RadiusAdamW", {"density": 0.2, "interval": 50})}
    kept = {
        name: watch(rows, one, **options).rows[0].kept
        for name, options in {"down": {}, "up": {"maximize": True}, "decayed": {"weight_decay": 10.0}}.items()
    }
    assert kept["down"] == pytest.approx(kept["up"], abs=1e-6) and kept["down"] != pytest.approx(
        kept["decayed"], abs=1e-3
    )


def test_every_shape_is_looked_at_and_large_ones_in_part():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)), nn.Embedding(5000, 64))
    parts = parts_of(model, 60_000)
    assert [part.name for part in parts] == ["0.weight", "1.weight", "2.weight", "3.weight", "4.weight", "5.weight"] + [
        "6.weight"
    ]
    assert (parts[-1].rows, parts[-1].columns) == (553, 64) and not parts[-1].is_complete
    assert sum(part.numel for part in parts) <= 60_000
    assert sum(part.weight * part.numel for part in parts) == pytest.approx(6 * 64 * 64 + 5000 * 64)
    few = parts_of(model, 16_000)  # one layer of the six, from their middle
    assert [part.name for part in few] == ["3.weight", "6.weight"] and few[0].weight == 6
    some = parts_of(model, 30_000)  # three of the six, evenly spaced
    assert [part.name for part in some] == ["1.weight", "3.weight", "5.weight", "6.weight"]
    for sampled in (few, some):
        assert sum(part.weight * part.numel for part in sampled) == pytest.approx(6 * 64 * 64 + 5000 * 64)
    large_first = parts_of(nn.Sequential(nn.Linear(80, 80, bias=False), nn.Linear(64, 64, bias=False)))
    assert [part.name for part in large_first] == ["0.weight", "1.weight"]
    counted = torch.arange(5000.0).view(-1, 1).expand(5000, 64)
    cut = parts[-1].extract(counted)
    assert torch.equal(cut[:, 0], torch.arange(553.0) * (5000 // 553))


def test_the_longer_side_is_cut_first():
    assert crop_shape(100, 50, 5000) == (100, 50)
    assert crop_shape(1000, 50, 5000) == (100, 50) and crop_shape(50, 1000, 5000) == (50, 100)
    assert crop_shape(1000, 2000, 5000) == (70, 70)
