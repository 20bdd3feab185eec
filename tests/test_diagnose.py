"""`compopt.diagnose`: the training is not touched, and what is measured is what an oracle finds."""

from __future__ import annotations

import builtins
import contextlib
import copy
import csv
import dataclasses
import itertools
import math
import zlib
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import compopt
from compopt._diagnose import methods
from compopt._diagnose.diagnosis import Diagnosis
from compopt._diagnose.findings import weighted
from compopt._diagnose.meaning import settling_of
from compopt._diagnose.methods import Judged
from compopt._diagnose.sampling import candidates, cut_to, sample
from compopt._diagnose.shadows import Shadows
from compopt._diagnose.shares import Shares
from compopt._diagnose.spreading import Spread
from compopt._diagnose.stability import Stability
from compopt._wire.comm import Comm

CPU = torch.device("cpu")
ROOT = Path(compopt.__file__).parents[1]
FEW = {name: methods.JUDGED[name] for name in ("tracked 16, int8", "Radius 0.4", "SCAPE 0.1", "TAGC 0.9")}


class Odd(nn.Module):
    """With everything that is not a trained float32 matrix: frozen, empty, 1-D, bfloat16, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 80), nn.Linear(80, 64).bfloat16()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.kernel = nn.Conv2d(8, 64, 3)
        self.unused = nn.Linear(64, 64)
        self.empty = nn.Parameter(torch.zeros(0, 64))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.first(self.frozen(x))).relu()
        image = self.kernel(x.view(-1, 8, 4, 2).repeat(1, 1, 1, 2)).flatten(1).mean()
        return self.second(hidden.bfloat16()).float().square().mean() + image.square() + self.empty.sum()


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int, rank: int = 0) -> None:
    random = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        model(torch.randn(8, 64, generator=random)).backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(thing: object) -> list:
    """Everything in a state dict, tensors as their bytes."""
    if isinstance(thing, torch.Tensor):
        whole = thing.detach().contiguous().view(-1)
        return [str(thing.dtype), *thing.shape, zlib.crc32(bytes(whole.view(torch.uint8).tolist()))]
    if isinstance(thing, dict):
        return [[str(key), bits(value)] for key, value in thing.items()]
    return [bits(one) for one in thing] if isinstance(thing, list | tuple) else [repr(thing)]


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
    return [bits(model.state_dict()), bits(optimizer.state_dict()), bits(torch.get_rng_state())]


OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=False),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "ours": lambda ps: compopt.SeparateAdam(ps, lr=1e-2, rank=4, warmup_steps=2, simulate=True),
    "around": lambda ps: compopt.Separate(torch.optim.SGD(ps, lr=1e-2), rank=4, simulate=True),
}


def once(make, watched: bool, steps: int = 8) -> tuple[list, int, str]:
    torch.manual_seed(0)
    model, calls = Odd(), []
    optimizer = make(list(model.parameters()))
    hook = register_optimizer_step_post_hook(lambda *of: calls.append(type(of[0])))
    try:
        if watched:
            with compopt.diagnose(model, optimizer, start=2) as seen:
                train(optimizer, model, steps)
            assert seen.steps == steps
        else:
            train(optimizer, model, steps)
    finally:
        hook.remove()
    assert not optimizer._optimizer_step_post_hooks and torch.get_num_threads() == once.threads
    return contents(model, optimizer), len(calls), str(seen) if watched else ""


once.threads = torch.get_num_threads()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_training_is_the_same_to_the_bit(name, capfd):
    """Parameters, state, random numbers; and nobody's hooks see the methods' steps."""
    (plain, calls, _), (watched, seen, text) = (once(OPTIMIZERS[name], watched) for watched in (False, True))
    assert plain == watched and calls == seen
    assert "first.weight" in text and "second.weight" in text and "frozen" not in text and "empty" not in text
    assert once(OPTIMIZERS[name], True)[2] == text  # deterministic
    assert capfd.readouterr().err.count("compopt:") <= 3  # of the user's own optimizers alone


def test_gradients_are_left_as_they_are():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with compopt.diagnose(model, optimizer, start=1):
        for step in range(4):
            model.weight.grad = torch.full((64, 64), step + 1.0)
            optimizer.step()
            assert torch.equal(model.weight.grad, torch.full((64, 64), step + 1.0))


# Stability


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
    meter = Stability([200])
    for x in rows:
        meter.see([x])
    for density in (0.4, 0.1, 0.01):
        for lag in (1, 10, 100):
            found = [sum(v) / len(v) for v in (meter.overlaps[density, lag, 0], meter.norms[density, lag, 0])]
            assert found == pytest.approx(brute_force(rows, density, lag, 10), abs=1e-6)
    assert len(meter.sets) <= 12  # of the last 100 steps, each tenth, and the last


def test_known_sets_have_known_overlaps():
    """Three of the ten largest are others from step to step; between them nobody has a gradient."""
    meter = Stability([100], densities=(0.1,))
    for step in range(3):
        x = torch.zeros(100)
        x[3 * step : 3 * step + 10] = 1
        meter.see([x])
    meter.see([None])
    meter.see([x])
    assert meter.overlaps[0.1, 1, 0] == pytest.approx([0.7, 0.7])
    assert meter.norms[0.1, 1, 0] == pytest.approx([math.sqrt(0.7)] * 2)


# Shares


def test_the_share_that_columns_keep_is_that_of_singular_values():
    random = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, 40, generator=random)).Q for n in (96, 48))
    values = 2.0 ** -torch.arange(40.0)
    meter = Shares([(96, 48)], [CPU])
    for _ in range(12):
        meter.see([(u * values) @ v.t()])
    for rank in (4, 8, 16, 32, 64):
        wanted = values[:rank].norm() / values.norm()
        assert meter.kept[rank, 0][-1] == pytest.approx(float(wanted), abs=1e-5), rank
    assert meter.kept[4, 0][0] < meter.kept[4, 0][-1] - 1e-4  # it had to find them


def test_a_rank_alone_keeps_what_it_keeps_among_others():
    """One iteration of 64 columns gives what one of 8 does."""
    random = torch.Generator().manual_seed(0)
    meter, Q = Shares([(128, 96)], [CPU]), None
    for step in range(6):
        x = torch.randn(128, 96, generator=random) + 3 * torch.randn(128, 6, generator=random) @ torch.randn(6, 96)
        Q = meter.bases[0][:, :8].clone() if Q is None else Q
        R = torch.linalg.qr(x @ Q).Q
        p = x.t() @ R
        meter.see([x])
        assert meter.kept[8, 0][step] == pytest.approx(float(p.norm() / x.norm()), rel=1e-4)
        Q = torch.linalg.qr(p).Q


# Spread


def parts_of(model: nn.Module, elements: int = 1 << 20) -> list:
    named = {id(p): name for name, p in model.named_parameters()}
    return sample(candidates([{"params": list(model.parameters())}], named), elements)


def test_two_batches_stand_for_two_ranks():
    meter = Spread(parts_of(nn.Linear(64, 64, bias=False)))
    a, b = torch.zeros(64, 64), torch.zeros(64, 64)
    a[0, 0], b[0, 0], b[0, 1] = 1.0, 0.6, 0.8  # of length 1, at a cosine of 0.6
    for step in range(6):
        meter.see([(a, b)[step % 2]])
    ((cosine, ratio),) = meter.found(Comm(alone=True), CPU)
    assert cosine == pytest.approx(0.6) and ratio == pytest.approx(1 / math.sqrt(0.8))


# Methods


def watch(rows: list[torch.Tensor], judged: dict[str, Judged], start: int = 3, **options: object) -> Diagnosis:
    """What is found of a model of one matrix that has these gradients."""
    model = nn.Linear(rows[0].shape[1], rows[0].shape[0], bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "weight_decay": 0.0, **options})
    with Diagnosis(model, optimizer, len(rows), start, 1 << 20, None, judged) as seen:
        for g in rows:
            model.weight.grad = g.clone()
            optimizer.step()
    return seen


def noise(steps: int, rows: int = 64, columns: int = 80) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(rows, columns, generator=random) for _ in range(steps)]


def updates_of(rows: list[torch.Tensor], betas: tuple[float, float] = (0.9, 0.999)) -> list[torch.Tensor]:
    """AdamW's, written down again in float64."""
    m, v, found = torch.zeros_like(rows[0]).double(), torch.zeros_like(rows[0]).double(), []
    for t, g in enumerate(rows, 1):
        m, v = betas[0] * m + (1 - betas[0]) * g.double(), betas[1] * v + (1 - betas[1]) * g.double() ** 2
        found.append(m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + 1e-8))
    return found


def top_k(rows: list[torch.Tensor], density: float, start: int) -> tuple[list[torch.Tensor], list[float]]:
    """What one rank of TAGC's sends of each gradient, and the norms of what it holds back."""
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
    judged = Judged("TagcAdamW", {"sparsity": 0.75})
    seen = watch(rows, {"top-k": judged}, start, betas=(0.8, 0.99))
    sent, norms = top_k(rows, 0.25, start)
    pairs = zip(updates_of(sent, (0.8, 0.99))[start:], updates_of(rows, (0.8, 0.99))[start:], strict=True)
    cosines = [float((a * b).sum() / a.norm() / b.norm()) for a, b in pairs]
    assert seen.rows[0].kept == pytest.approx(sum(cosines) / len(cosines), abs=1e-4)
    assert seen.findings["kept", "top-k", "weight"] == pytest.approx(seen.rows[0].kept, abs=1e-6)
    assert (seen.rows[0].least, seen.rows[0].most) == (seen.findings["kept", "top-k", "weight"],) * 2
    assert seen._watch.shadows.residuals["top-k"] == pytest.approx(norms, rel=1e-4)
    gradient = sum(float(g.norm()) for g in rows[start:]) / len(rows[start:])
    half = len(norms) // 2
    assert seen.rows[0].residual == pytest.approx(max(norms[half:]) / gradient, rel=1e-4)
    assert seen.findings["growth", "top-k"] == pytest.approx(max(norms[half:]) / max(norms[:half]), rel=1e-4)
    assert seen.rows[0].grows == (max(norms[half:]) / max(norms[:half]) > 1.2)


def test_a_part_counts_for_what_it_stands_for():
    """The whole's cosine is that of the layers put together, each as often as its weight says."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(80, 64, bias=False))
    parts = [dataclasses.replace(part, weight=w) for part, w in zip(parts_of(model), (1.0, 9.0), strict=True)]
    shadows = Shadows({"one": FEW["Radius 0.4"]}, parts, methods.of_groups([{"betas": (0.9, 0.99)}]), 1)
    for a, b in zip(noise(5, 64, 64), noise(5, 64, 80), strict=True):
        weights, grads = [torch.zeros(64, 64), torch.zeros(64, 80)], [a, b * (torch.rand(64, 80) < 0.5)]
        dense = [u.clone() for u in shadows.see(weights, grads)]
    theirs = [p.detach() for p in shadows.shadows["one"].params]
    dots, squares, own = (
        [float((x * y).sum()) for x, y in zip(*pair, strict=True)]
        for pair in ((theirs, dense), (theirs, theirs), (dense, dense))
    )
    wanted = (dots[0] + 9 * dots[1]) / math.sqrt((squares[0] + 9 * squares[1]) * (own[0] + 9 * own[1]))
    assert shadows.cosines["one"][-1][-1] == pytest.approx(wanted, rel=1e-5)
    assert weighted(parts, {0: 1.0, 1: 0.0}) == pytest.approx(4096 / (4096 + 9 * 5120))


def test_what_sends_everything_keeps_everything():
    whole = {"whole": Judged("RadiusAdamW", {"density": 1.0}), "other": Judged("TagcAdamW", {"sparsity": 0.0})}
    for row in watch(noise(12), whole).rows:
        assert row.kept == pytest.approx(1, abs=1e-6) and row.residual == pytest.approx(0, abs=1e-6)
        assert not row.grows


def test_the_order_follows_the_gradients():
    """Of rank 4, tracked columns lose nothing; of few elements other than 0, nor do those that select."""
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(128, 4, generator=random), torch.randn(4, 128, generator=random)
    low = watch([left @ torch.randn(4, 4, generator=random) @ right for _ in range(20)], dict(methods.JUDGED))
    assert low.order[0].startswith("tracked") and low.findings["share", "gradient", "4", ""] == pytest.approx(1)
    few = torch.rand(128, 128, generator=random) < 0.05
    sparse = watch([few * torch.randn(128, 128, generator=random) for _ in range(20)], dict(methods.JUDGED))
    assert sparse.findings["kept", "Radius 0.2", ""] > 0.99 > sparse.findings["kept", "tracked 4, int8", ""]
    assert sparse.findings["overlap", "update", "0.01", "10", ""] < 1
    assert "Start with compopt.SeparateAdam" in str(low)


def test_maximize_and_weight_decay_are_the_optimizers_own():
    """Radius selects by the update, decay and all; a training upwards is judged as it goes."""
    rows = noise(12)
    one = {"radius": Judged("RadiusAdamW", {"density": 0.2, "interval": 50})}
    kept = {
        name: watch(rows, one, **options).rows[0].kept
        for name, options in {"down": {}, "up": {"maximize": True}, "decayed": {"weight_decay": 10.0}}.items()
    }
    assert kept["down"] == pytest.approx(kept["up"], abs=1e-6) and kept["down"] != pytest.approx(
        kept["decayed"], abs=1e-3
    )


# What is looked at


def test_every_shape_is_looked_at_and_large_ones_in_part():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)), nn.Embedding(5000, 64))
    parts = parts_of(model, 60_000)
    assert [part.name for part in parts] == ["0.weight", "1.weight", "2.weight", "3.weight", "4.weight", "5.weight"] + [
        "6.weight"
    ]
    assert (parts[-1].rows, parts[-1].columns) == (553, 64) and not parts[-1].whole
    assert sum(part.numel for part in parts) <= 60_000
    assert sum(part.weight * part.numel for part in parts) == pytest.approx(6 * 64 * 64 + 5000 * 64)
    few = parts_of(model, 16_000)
    assert [part.name for part in few] == ["3.weight", "6.weight"] or len(few) == 2 or few[0].weight > 1
    counted = torch.arange(5000.0).view(-1, 1).expand(5000, 64)
    cut = parts[-1].of(counted)
    assert torch.equal(cut[:, 0], torch.arange(553.0) * (5000 // 553))


def test_the_longer_side_is_cut_first():
    assert cut_to(100, 50, 5000) == (100, 50)
    assert cut_to(1000, 50, 5000) == (100, 50) and cut_to(50, 1000, 5000) == (50, 100)
    assert cut_to(1000, 2000, 5000) == (70, 70)


def test_sparse_gradients_are_left_out():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(100, 64, sparse=True), nn.Linear(64, 64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with compopt.diagnose(model, optimizer, start=1) as seen:
        for step in range(5):
            model[1](model[0](torch.tensor([step, 7]))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen.findings["kept", "tracked 16, int8", "0.weight"] == 0 and seen.rows[0].kept > 0.5
    assert ("overlap", "gradient", "0.1", "1", "0.weight") not in seen.findings


def test_steps_that_are_not_finite_are_left_out():
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with compopt.diagnose(model, optimizer, start=2) as seen:
        for number, g in enumerate(noise(9, 64, 64)):
            model.weight.grad = g / (number != 4)
            optimizer.step()
            nn.init.zeros_(model.weight)
    assert (seen.steps, seen.skipped) == (8, 1) and "1 more steps were left out" in str(seen)
    assert all(math.isfinite(value) for value in seen.findings.values())
    with pytest.raises(RuntimeError, match="has seen 0 steps"), compopt.diagnose(model, optimizer):
        for g in noise(13, 64, 64):  # weights are lost, and stay so
            model.weight.grad = g
            nn.init.constant_(model.weight, math.nan)
            optimizer.step()


def test_a_step_that_a_scaler_takes_back_is_left_out():
    """AdamW's fused kernel skips by itself, and its hooks run all the same."""
    model = nn.Sequential(nn.Linear(64, 64), Square())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with compopt.diagnose(model, optimizer, start=2) as seen:
        for step in range(7):
            scaler.scale(model(torch.ones(2, 64))).backward()
            model[0].bias.grad[0] /= step != 3  # which is not looked at
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert (seen.steps, seen.skipped) == (6, 1)


def test_steps_after_the_limit_cost_nothing():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with compopt.diagnose(model, optimizer, steps=5, start=2) as seen:
        train(optimizer, nn.Sequential(model, Square()), 9)
        assert not optimizer._optimizer_step_post_hooks
    assert seen.steps == 5 and seen.rows


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


# Ranks


def on_a_rank(rank: int, ours: bool, watched: bool) -> tuple[list, str, float, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), Square())
    ddp = DistributedDataParallel(model)
    make = OPTIMIZERS["ours" if ours else "AdamW"]
    optimizer = make(list(ddp.parameters()))
    own: list[torch.Tensor] = []
    model[0].weight.register_hook(lambda g: own.append(g.clone()))
    if not watched:
        train(optimizer, ddp, 6, rank)
        return bits([model.state_dict(), optimizer.state_dict()]), "", 0.0, 0.0
    with compopt.diagnose(ddp, optimizer, start=2) as seen:
        train(optimizer, ddp, 6, rank)
    both = [torch.zeros(2, 64, 64) for _ in own]
    for pair, g in zip(both, own, strict=True):
        torch.distributed.all_gather(list(pair.unbind()), g)
    dots = sum(float((a * b).sum()) for a, b in both)
    squares = sum(float((a * a).sum() + (b * b).sum()) for a, b in both) / 2
    assert seen.findings["cosine", ""] == pytest.approx(dots / squares, abs=1e-4)
    return bits([model.state_dict(), optimizer.state_dict()]), str(seen), seen.findings["cosine", ""], seen.rows[0].kept


@pytest.mark.parametrize("ours", [False, True])
def test_two_ranks_train_as_without_it_and_tell_the_same(ours):
    plain, watched = (run_ranks(on_a_rank, 2, ours, how) for how in (False, True))
    assert [one[0] for one in plain] == [one[0] for one in watched]
    assert watched[0][1] == watched[1][1] and "2 ranks" in watched[0][1]
    assert 0 < watched[0][2] < 1


def sharded(rank: int, watched: bool) -> tuple[list, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), Square())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not watched:
        train(optimizer, model, 6, rank)
        return bits([p.to_local() for p in model.parameters()]), ""
    with compopt.diagnose(model, optimizer, start=2) as seen:
        train(optimizer, model, 6, rank)
    return bits([p.to_local() for p in model.parameters()]), str(seen)


def test_under_fsdp_shards_are_looked_at():
    plain, watched = (run_ranks(sharded, 2, how) for how in (False, True))
    assert [one[0] for one in plain] == [one[0] for one in watched]
    told = watched[0][1]
    assert told == watched[1][1] and "128 x 64" in told and "two batches in a row, which stand for ranks" in told


def in_pieces(rank: int) -> float:
    """The last of three micro-batches averages over ranks; a rank's own gradient is the sum of all three."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), Square())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    random, whole = torch.Generator().manual_seed(rank), []
    with compopt.diagnose(ddp, optimizer, start=2) as seen:
        for _ in range(5):
            own = torch.zeros(64, 64)
            for piece in range(3):
                x = torch.randn(2, 64, generator=random)
                w = model[0].weight.detach().clone().requires_grad_()
                (x @ w.t()).square().mean().backward()
                own += w.grad
                with ddp.no_sync() if piece < 2 else contextlib.nullcontext():
                    ddp(x).backward()
            whole.append(own)
            optimizer.step()
            optimizer.zero_grad()
    dots = squares = 0.0
    for own in whole:
        pair = torch.zeros(2, 64, 64)
        torch.distributed.all_gather(list(pair.unbind()), own)
        dots, squares = dots + float((pair[0] * pair[1]).sum()), squares + float(pair.square().sum()) / 2
    assert seen.findings["cosine", ""] == pytest.approx(dots / squares, abs=1e-4)
    return seen.findings["cosine", ""]


def test_micro_batches_are_one_gradient():
    assert 0 < run_ranks(in_pieces, 2)[0] < 1


def one_step_less(rank: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Square())
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        with compopt.diagnose(model, optimizer, start=2):
            train(optimizer, model, 6 - rank)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_that_have_seen_different_steps_say_so():
    assert all("different numbers of steps (6, 5)" in told for told in run_ranks(one_step_less, 2))


# What is told


def test_what_is_told_has_every_method_and_what_it_means():
    seen = watch(noise(14), dict(methods.JUDGED))
    text = str(seen)
    assert all(name in text for name in methods.JUDGED) and max(map(len, text.split("\n\n")[1].splitlines())) <= 100
    for word in ("Start with", "Rank:", "Radius's interval:", "Start: of", "Spread:", "not a loss"):
        assert word in text, word
    kept = [row.kept for row in seen.rows]
    assert kept == sorted(kept, reverse=True) and seen.order == [row.method for row in seen.rows]
    front = [row for row in seen.rows if row.front]
    assert all(a.share > b.share for a, b in itertools.pairwise(front)) and len(front) >= 2


def test_a_start_is_advised_where_the_largest_elements_settle():
    told = {(0.5, 0.6): "had not settled", (0.6, 0.5): "change faster", (0.5, 0.54): "would change little"}
    for (first, last), words in told.items():
        assert words in settling_of({("settling", "first"): first, ("settling", "last"): last})
    found = watch(noise(30), {"one": FEW["TAGC 0.9"]}).findings  # moments of the first steps change most
    assert found["settling", "first"] < found["settling", "last"] < 1


def test_a_line_that_is_told_can_be_run():
    params = [nn.Parameter(torch.zeros(64, 64))]
    for judged in methods.JUDGED.values():
        made = eval(judged.line.replace("lr=...", "lr=1e-3"), {"compopt": compopt, "params": params})
        assert type(made).__name__ == judged.cls


def test_a_plot_is_saved(tmp_path, monkeypatch):
    seen = watch(noise(8), FEW)
    seen.plot(str(tmp_path / "seen.png"))
    assert (tmp_path / "seen.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="there is no folder"):
        seen.plot(str(tmp_path / "nowhere" / "seen.png"))
    real = builtins.__import__

    def without(name: str, *args: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        seen.plot(str(tmp_path / "seen.png"))


def test_the_page_says_how_well_it_predicts_as_the_kept_table_does(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from diagnosed import GROUPS, rho, tau

    assert tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6) and rho([1, 2, 3], [6, 5, 4]) == pytest.approx(-1)
    assert tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(6))  # a tie counts for neither side
    with (ROOT / "bench/results/diagnosed.csv").open() as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "docs/diagnose.md").read_text()
    for steps, lr in GROUPS:
        group = [row for row in rows if (int(row["steps"]), float(row["lr"])) == (steps, lr)]
        loss = [float(row["loss"]) for row in group]
        cells = [score([-float(row[key]) for row in group], loss) for score in (tau, rho) for key in ("first", "after")]
        assert f"| {steps}, {lr:g} | {len(group)} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |" in page


def test_wrappers_of_optimizers_are_seen_through():
    class Wrapper(torch.optim.Optimizer):
        """As Accelerate's: an optimizer by its class, without what an optimizer has."""

        def __init__(self, optimizer: torch.optim.Optimizer):
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.step()

    model = nn.Sequential(nn.Linear(64, 64), Square())
    optimizer = torch.optim.AdamW(model.parameters())
    with compopt.diagnose(model, Wrapper(optimizer), start=1) as seen:
        train(optimizer, model, 4)
    assert seen.steps == 4


def test_mistakes_are_told_in_sentences():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="takes a model and its optimizer, in this order; got AdamW and Linear"):
        compopt.diagnose(optimizer, model)
    for name, value in (("steps", 3), ("start", 0), ("elements", 100), ("steps", 20.0), ("start", True)):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least"):
            compopt.diagnose(model, optimizer, **{name: value})
    with pytest.raises(ValueError, match="larger than start by 2"):
        compopt.diagnose(model, optimizer, steps=10)
    small = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="nothing to look at"):
        compopt.diagnose(small, torch.optim.AdamW(small.parameters()))
    with pytest.raises(RuntimeError, match="has seen 0 steps"), compopt.diagnose(model, optimizer):
        pass
    seen = compopt.diagnose(model, optimizer, start=1)
    assert "0 steps seen" in str(seen)
    with pytest.raises(RuntimeError, match="nothing to plot"):
        seen.plot("seen.png")
    with seen:
        train(optimizer, nn.Sequential(model, Square()), 4)
    with pytest.raises(RuntimeError, match="used before"), seen:
        pass


def test_what_the_loop_raises_is_what_is_raised():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(KeyError), compopt.diagnose(model, optimizer):
        raise KeyError("the loop's own")
    assert not optimizer._optimizer_step_post_hooks
    assert copy.deepcopy(optimizer)  # nothing of ours is left in it
