"""Inside FSDP2: nothing is lost, and a gradient that is not finite is always noticed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conformance import OTHERS
from fsdp_models import Net, cut, loss, make, whole
from ranks import run_ranks
from slow_rows import slow_but
from table import CASES, FORMS, Case, muon
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import compopt
from compopt._ops.operations import Ops
from compopt._state.blocks import BlockCodec

# Classes of the table that work inside FSDP2, by their lines; of SEPARATE those forms whose errors add up.
CASES_INSIDE = {case.name: case for case in CASES + FORMS if case.works_inside and case.method != "separate"}


def rounds_to(case: Case, payload_dtype: str) -> bool:
    try:
        case.make([nn.Parameter(torch.zeros(64, 64))], payload_dtype=payload_dtype)
    except ValueError:
        return False
    return True


def payloads(case: Case) -> list[str]:
    """The payloads by which every line is tested: none that rounds, where a residual is kept then, and a narrow one."""
    keeps_more = case.compressed.get("payload_dtype") is None
    return [*([""] if keeps_more else []), "int8" if rounds_to(case, "int8") else "bfloat16"]


METHODS = [
    *(f"{name}, {payload}" for name, case in CASES_INSIDE.items() for payload in payloads(case)),
    *("tracked, int8", "tracked, residual in int8", "Average, bfloat16"),
]
MAIN = "tracked, residual in int8"  # TAGC's residuals are beside DDP's in test_fsdp_inside.py
assert MAIN in METHODS


def build(method: str, model: nn.Module) -> torch.optim.Optimizer:
    kind, _, payload = method.rpartition(", ")
    payload_dtype = payload or None
    if kind == "tracked":
        options = dict(rank=4, dense_steps=0, payload_dtype=payload_dtype)
        if payload == "residual in int8":
            options |= dict(payload_dtype=None, residual_dtype="int8")
        return compopt.SeparateAdam(model.parameters(), lr=1e-2, **options)
    if kind == "Average, Muon":  # one iteration of Newton-Schulz is enough: it averages nothing
        return compopt.Average(muon(model.parameters(), lr=1e-2, ns_steps=1), payload_dtype=payload_dtype)
    return CASES_INSIDE[kind].make(model.parameters(), payload_dtype=payload_dtype)


def decode(stored: Tensor, like: Tensor) -> Tensor:
    """Return the values of a residual as it is stored."""
    if stored.is_floating_point():
        return stored
    values = torch.empty_like(like)
    BlockCodec().decode(stored, values.view(-1))
    return values


class Run:
    """A model that FSDP2 cuts, its optimizer, and what the gradients of all ranks are."""

    def __init__(self, method: str, rank: int, make_model: Callable[[], nn.Module] = make):
        self.rank, self.ranks, self.number = rank, dist.get_world_size(), 0
        self.uncut, self.model = make_model(), cut(make_model())
        self.optimizer = build(method, self.model)

    def mean_gradient(self, number: int) -> dict[str, Tensor]:
        shards = [p.detach().to_local() for p in self.model.parameters()]
        for p, weight in zip(self.uncut.parameters(), self.put_together(shards), strict=True):
            p.data.copy_(weight)
        total = sum(loss(self.uncut, number, who) for who in range(self.ranks)) / self.ranks
        names = [name for name, _ in self.uncut.named_parameters()]
        return dict(zip(names, torch.autograd.grad(total, list(self.uncut.parameters())), strict=True))

    def put_together(self, shards: list[Tensor]) -> list[Tensor]:
        """Return whole tensors, for all of which one collective is enough: FSDP2 cuts as ``chunk`` does."""
        shapes = [p.shape for p in self.uncut.parameters()]
        flat = torch.zeros(sum(shape.numel() for shape in shapes), dtype=shards[0].dtype)
        parts = flat.split([shape.numel() for shape in shapes])
        results = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        for result, shard in zip(results, shards, strict=True):
            if shard.numel():
                result.chunk(self.ranks)[self.rank].copy_(shard)
        dist.all_reduce(flat)
        return results

    def mean_residuals(self) -> dict[str, Tensor]:
        """The mean over ranks of what they hold back."""
        pairs = dict(self.model.named_parameters())
        zeros = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in pairs.items()}
        local = [decode(self.optimizer.state[p].get("residual", zeros[name]), zeros[name]) for name, p in pairs.items()]
        flat = torch.cat([residual.reshape(-1) for residual in local])
        dist.all_reduce(flat)
        parts = (flat / self.ranks).split([zero.numel() for zero in zeros.values()])
        return {name: part.view(zero.shape) for (name, zero), part in zip(zeros.items(), parts, strict=True)}

    def compute_gradients(self) -> None:
        loss(self.model, self.number, self.rank).backward()
        self.number += 1

    def backward(self) -> dict[str, Tensor]:
        """Backward once more; returns the mean gradient that it computed."""
        wanted = self.mean_gradient(self.number)
        self.compute_gradients()
        return wanted

    def applied(self) -> dict[str, Tensor]:
        """Return what the step takes for the averaged gradient."""
        pairs = dict(self.model.named_parameters())
        shards = [torch.zeros_like(p).to_local() if p.grad is None else p.grad.to_local() for p in pairs.values()]
        return dict(zip(pairs, self.put_together(shards), strict=True))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.compute_gradients()
            self.optimizer.step()

    def lost(self, between: Callable[[], None] = lambda: None, without: str = "none") -> float:
        """A step, and how much of what its backward computed is neither applied nor owed.

        ``between`` is called before the step. What is ``without`` a gradient in this step stays as it was.
        """
        self.optimizer.zero_grad()
        return self.lost_of(self.backward(), between, without)

    def lost_of(self, wanted: dict[str, Tensor], between: Callable[[], None], without: str = "none") -> float:
        between()
        before = self.mean_residuals()
        self.optimizer.step()
        assert self.optimizer.stats.phase in ("sparse", "projected", "rounded"), self.optimizer.stats.phase
        worst, applied, after = 0.0, self.applied(), self.mean_residuals()
        for name in wanted:
            if without in name:
                assert torch.equal(before[name], after[name])
                continue
            if not self.holds_back(name):  # what rounding takes off it is lost
                continue
            far = applied[name] + after[name] - before[name] - wanted[name]
            worst = max(worst, float(far.norm() / wanted[name].norm()))
        assert max(float(x.norm()) for x in after.values()) > 1e-3
        return worst

    def holds_back(self, name: str) -> bool:
        return "residual" in self.optimizer.state[self.model.get_parameter(name)]

    def freeze(self, on: bool = True) -> None:
        for p in self.model.down.parameters():
            p.requires_grad_(not on)


def frozen(run: Run) -> dict[str, float]:
    """A layer that is frozen and unfrozen: between steps, and between a backward and its step."""
    results = {}
    run.freeze()
    results["frozen between steps"] = run.lost(without="down")
    results["frozen"] = run.lost(without="down")
    run.freeze(False)
    results["unfrozen between steps"] = run.lost()
    results["frozen before step"] = run.lost(run.freeze, without="down")
    results["still frozen"] = run.lost(without="down")
    results["unfrozen before step"] = run.lost(lambda: run.freeze(False), without="down")
    results["at last"] = run.lost()
    return results


def loaded(run: Run) -> dict[str, float]:
    """A checkpoint that is loaded, a group that is made anew: between a backward and its step."""
    results = {}
    saved = tree_map_only(Tensor, torch.clone, run.optimizer.state_dict())
    run.train(2)
    results["load_state_dict"] = run.lost(lambda: run.optimizer.load_state_dict(saved))
    results["after it"] = run.lost()
    results["rebind"] = run.lost(lambda: run.optimizer.rebind(dist.new_group()))
    results["after that"] = run.lost()
    results["consolidate_state"] = run.lost(run.optimizer.consolidate_state)
    results["state_dict"] = run.lost(run.optimizer.state_dict)
    return results


def discarded(run: Run) -> dict[str, float]:
    """A backward whose gradients are thrown away, and one whose gradients are added to."""
    results = {}
    for name, clear in {
        "None": run.optimizer.zero_grad,
        "zeros": lambda: run.optimizer.zero_grad(set_to_none=False),
        "zeros of the model": lambda: run.model.zero_grad(set_to_none=False),
    }.items():
        run.optimizer.zero_grad()
        run.backward()
        clear()
        results[f"discarded, {name}"] = run.lost_of(run.backward(), lambda: None)
        results[f"after it, {name}"] = run.lost()
    run.optimizer.zero_grad()
    first = run.backward()
    results["added up"] = run.lost_of({n: g + first[n] for n, g in run.backward().items()}, lambda: None)
    run.optimizer.zero_grad()
    run.model.set_requires_gradient_sync(False)
    first = run.backward()
    run.model.set_requires_gradient_sync(True)
    results["kept back"] = run.lost_of({n: g + first[n] for n, g in run.backward().items()}, lambda: None)
    run.optimizer.zero_grad()
    run.backward(), run.optimizer.zero_grad(set_to_none=False), run.backward(), run.optimizer.zero_grad()
    results["twice discarded"] = run.lost_of(run.backward(), lambda: None)
    left = run.applied()  # by the step before, and not set to zero after it
    results["left over"] = run.lost_of({n: g + left[n] for n, g in run.backward().items()}, lambda: None)
    return results


def zeroed(run: Run) -> bool:
    """Gradients that are set to zero between a backward and its step: nothing was sent, nothing is held back."""
    run.optimizer.zero_grad()
    before = run.mean_residuals()
    run.compute_gradients()
    run.optimizer.zero_grad(set_to_none=False)
    run.optimizer.step()
    after = run.mean_residuals()
    return all(torch.equal(before[name], after[name]) for name in before)


class Halves(nn.Module):
    """A matrix whose second half has no gradient: the shard of some ranks is 0."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(64, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x)[:, :64].tanh().sum(1, keepdim=True)


def in_half(method: str, rank: int) -> float:
    """Added up: a rank whose own shard is 0 does not take it for gradients that were set to zero."""
    run = Run(method, rank, lambda: make(Halves))
    run.train(3)
    run.optimizer.zero_grad()
    first = run.backward()
    return run.lost_of({n: g + first[n] for n, g in run.backward().items()}, lambda: None)


def one_by_one(run: Run) -> dict[str, float]:
    """Of a module's parameters one without its gradient: before another backward, and before the step."""
    results = {}
    run.optimizer.zero_grad()
    first = run.backward()
    run.model.down.weight.grad = None
    second = run.backward()
    both = {n: g if n == "down.weight" else g + first[n] for n, g in second.items()}
    results["cleared before a backward"] = run.lost_of(both, lambda: None)

    def clear() -> None:
        run.model.down.weight.grad = None

    results["cleared before the step"] = run.lost(clear, without="down.weight")
    return results


def left_over(run: Run, other: Run) -> bool:
    """Gradients that nobody sets to zero after their step: the next backward sends residuals all the same."""
    run.optimizer.zero_grad()
    runs = [run, other]
    for run in runs:
        run.compute_gradients()
        run.optimizer.step()
    mean_residuals = [run.mean_residuals() for run in runs]
    dense = sum(p.numel() * p.element_size() for p in runs[0].uncut.parameters())
    assert [run.optimizer.stats.bytes_dense for run in runs] == [dense] * 2
    return all(torch.equal(mean_residuals[0][name], mean_residuals[1][name]) for name in mean_residuals[0])


def continues_as_its_copy(run: Run, method: str) -> bool:
    """Return True if a copy, which lays its buckets out anew, takes the same steps: no stale residual is sent."""
    copy = Run(method, run.rank)
    for p, q in zip(copy.model.parameters(), run.model.parameters(), strict=True):
        p.data.copy_(q.data)
    copy.optimizer.load_state_dict(tree_map_only(Tensor, torch.clone, run.optimizer.state_dict()))
    copy.number = run.number
    for one in (run, copy):
        one.train(2)
    return torch.equal(whole(run.model), whole(copy.model))


def all_of(rank: int, method: str) -> dict[str, float]:
    """All events befall one run, one after the other; a checkpoint is loaded, and the group made anew, at last."""
    run, other = Run(method, rank), Run(method, rank)
    run.train(3), other.train(3)
    results = {"left over is sent": float(not left_over(run, other)), **frozen(run)}
    results["residuals after it are stale"] = float(not continues_as_its_copy(run, method))
    results |= {**discarded(run), **one_by_one(run), "zeroed": float(not zeroed(run)), **loaded(run)}
    return {**results, "added up in one half": in_half(method, rank)}


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(lambda method: method == MAIN, METHODS))
def test_nothing_is_lost_and_nothing_is_sent_twice(method):
    bound = 1e-6 if "int8" in method or "bfloat16" in method else 1e-12
    if "residual in int8" in method:  # each time it is stored it is off by a 127th of a block's largest at most
        bound = 0.05
    for results in run_ranks(all_of, 2, method):
        assert max(results.values()) < bound, {name: far for name, far in results.items() if far >= bound}


INSIDE = {case.name: case for case in CASES + FORMS + OTHERS if case.works_inside}
BACKENDS = ("torch", "native")
SELECT = "top_k_of_each"
FILLS = {  # which elements of one rank's gradient are replaced, and by what
    "the first is NaN": ((0, 0), math.nan),
    "the last is NaN": ((-1, -1), math.nan),
    "all are 1e18": ((slice(None), slice(None)), 1e18),  # each would do, their squared norm overflows
}


class FilledGradient(torch.autograd.Function):
    """The identity, whose gradient has ``value`` at ``where``."""

    @staticmethod
    def forward(ctx, weight: Tensor, where: tuple, value: float) -> Tensor:
        ctx.fill = where, value
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        where, value = ctx.fill
        grad = grad.clone()
        grad[where] = value
        return grad, None, None


class FilledLinear(nn.Linear):
    fill: tuple | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.fill is None else FilledGradient.apply(self.weight, *self.fill)
        return nn.functional.linear(x, weight, self.bias)


class FilledNet(Net):
    def __init__(self):
        super().__init__()
        self.down = FilledLinear(99, 64)


def select_finite_top_k(select):
    """A selection that never takes what is not finite, however a backend orders NaN."""
    return lambda ops, parts, ks: select(ops, [part.nan_to_num(0.0, 0.0, 0.0) for part in parts], ks)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, rank, torch.float32).backward()
        optimizer.step()


def copy_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return [getattr(value, "_local_tensor", value).detach().clone() for value in [*model.parameters(), *states]]


def mistake_of(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, fill: tuple, step: int) -> str:
    """A step of which rank 1 has such a gradient, and one more: "" if all is as it should be."""
    phase, before = optimizer.stats.phase, copy_state(model, optimizer)
    model.down.fill = fill if rank == 1 else None
    train(model, optimizer, range(step, step + 1), rank)
    model.down.fill = None
    if optimizer.stats.phase != "skipped":
        return f"was {optimizer.stats.phase}, not skipped"
    if not all(map(torch.equal, before, copy_state(model, optimizer))):
        return "changed parameters or state"
    train(model, optimizer, range(step + 1, step + 2), rank)
    is_finite = all(bool(tensor.isfinite().all()) for tensor in copy_state(model, optimizer))
    return "" if is_finite and optimizer.stats.phase == phase else f"does not go on: {optimizer.stats.phase}"


def mistakes_of(rank: int, name: str) -> dict[str, str]:
    """Of one run, in which such a step follows another, by what the gradient is filled with."""
    model = cut(make(FilledNet, torch.float32))
    optimizer = INSIDE[name].make(model.parameters())
    if optimizer.backend != os.environ["COMPOPT_BACKEND"]:
        return {"any": f"runs on {optimizer.backend}"}
    train(model, optimizer, range(3), rank)  # two of a dense start, and one that leaves residuals
    return {what: mistake_of(rank, model, optimizer, FILLS[what], 3 + 2 * n) for n, what in enumerate(FILLS)}


def find_mistakes(rank: int) -> dict[str, str]:
    answers = {}
    for backend in BACKENDS:
        os.environ["COMPOPT_BACKEND"] = backend
        answers |= {f"{name}, {backend}": mistakes_of(rank, name) for name in INSIDE}
        with mock.patch.object(Ops, SELECT, select_finite_top_k(getattr(Ops, SELECT))):
            answers[f"TagcAdamW without NaN among the largest, {backend}"] = mistakes_of(rank, "TagcAdamW")
    return {f"{name}, {what}": mistake for name, of in answers.items() for what, mistake in of.items() if mistake}


@pytest.mark.slow
@pytest.mark.long
def test_a_gradient_that_is_not_finite_makes_all_ranks_skip():
    assert run_ranks(find_mistakes, 2) == [{}, {}]
