"""Tables of tensors' addresses, made anew when a tensor moves; norms of averaged gradients on every backend.

Triton's kernels, in the interpreter.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from sim import World
from slow_rows import slow_but
from torch import Tensor, nn

import compopt

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip(
        "kernels run either on the GPU or, with TRITON_INTERPRET=1, in the interpreter", allow_module_level=True
    )

import compopt_kernels as kernels

from compopt._backends.triton.tables import TableCache, addresses, make_key
from compopt._state import masks

RANKS = 2
CLASSES = {
    "AdamS": lambda params, comm: compopt.AdamS(params, process_group=comm),
    "Radius": lambda params, comm: compopt.RadiusAdamW(
        params, density=0.3, dense_steps=0, interval=100, process_group=comm
    ),
    "Radius, bfloat16": lambda params, comm: compopt.RadiusAdamW(
        params, density=0.3, dense_steps=0, interval=100, payload_dtype="bfloat16", process_group=comm
    ),
    "SCAPE": lambda params, comm: compopt.ScapeAdamS(
        params, density=0.1, dense_steps=0, density_steps=0, process_group=comm
    ),
}


class Job:
    """Two ranks, each with a matrix that is compressed, one that is not, and a vector."""

    def __init__(self, make: Callable, dtype: torch.dtype = torch.float32):
        self.world = World(RANKS)
        draw = torch.Generator().manual_seed(0)
        first = [torch.randn(shape, generator=draw).to(dtype) for shape in ((70, 64), (20, 30), (33,))]
        self.params = [[nn.Parameter(x.clone()) for x in first] for _ in range(RANKS)]
        self.optimizers = [make(params, self.world.comms[rank]) for rank, params in enumerate(self.params)]
        self.keep: list[object] = []  # so that no address is used again

    def gradients(self, t: int) -> None:
        """In the memory of those of before, if there are any."""
        for rank, params in enumerate(self.params):
            draw = torch.Generator().manual_seed(100 * t + rank)
            for p in params:
                g = torch.randn(p.shape, generator=draw).to(p.dtype)
                if p.grad is None:
                    p.grad = g
                else:
                    p.grad.copy_(g)

    def step(self) -> None:
        self.world.step(self.optimizers)


def elsewhere(job: Job) -> None:
    """Gradients in other memory."""
    for params in job.params:
        job.keep += [p.grad for p in params]
        for p in params:
            p.grad = p.grad.clone()


def elsewhere_by_data(job: Job) -> None:
    """Gradients in other memory, in the same tensors."""
    for params in job.params:
        for p in params:
            job.keep.append(p.grad.detach())
            p.grad.data = p.grad.data.clone()


def parameters_elsewhere(job: Job) -> None:
    for params in job.params:
        for p in params:
            job.keep.append(p.data)
            p.data = p.data.clone() + 1


def turned(x: Tensor) -> Tensor:
    """The same numbers in another order in memory."""
    return x.t().contiguous().t() if x.is_contiguous() else x.contiguous()


def gradients_turned(job: Job) -> None:
    for params in job.params:
        for p in params[:2]:
            p.grad = turned(p.grad)


def gradients_turned_in_place(job: Job) -> None:
    """At the same address, no longer contiguous."""
    for params in job.params:
        p = params[0]
        g = p.grad.clone()
        p.grad.data = p.grad.data.view(64, 70).t()
        p.grad.copy_(g)


def parameters_turned(job: Job) -> None:
    for params in job.params:
        for p in params[:2]:
            p.data = turned(p.data)


def parameters_turned_in_place(job: Job) -> None:
    for params in job.params:
        p = params[0]
        w = p.data.clone()
        p.data = p.data.view(64, 70).t()
        p.data.copy_(w)


def absent(job: Job) -> None:
    """For one step, on all ranks."""
    for params in job.params:
        params[1].grad = None


def absent_on_one(job: Job) -> None:
    job.params[1][0].grad = None


def options(job: Job) -> None:
    for optimizer in job.optimizers:
        optimizer.param_groups[0].update(lr=3e-3, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-4)


def one_more_group(job: Job) -> None:
    for params, optimizer in zip(job.params, job.optimizers, strict=True):
        params.append(nn.Parameter(torch.full((70, 64), 0.5)))
        params[-1].grad = torch.linspace(-1, 1, 4480).view(70, 64)
        optimizer.add_param_group({"params": params[-1:], "lr": 2e-3})


def loaded(job: Job) -> None:
    """State of this rank's own, as it was saved, with momenta that are other than they were."""
    for optimizer in job.optimizers:
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["exp_avg"].mul_(0.5)
        optimizer.load_state_dict(state)


def state_set_from_outside(job: Job) -> None:
    for optimizer in job.optimizers:
        for p in optimizer.param_groups[0]["params"]:
            entry = dict(optimizer.state[p])
            entry["exp_avg"] = entry["exp_avg"] * 0.5
            optimizer.state[p] = entry


def masks_forgotten(job: Job) -> None:
    """A step that chooses masks anew."""
    for optimizer in job.optimizers:
        optimizer._engine.forget_masks(optimizer.mask_state)


def not_finite(job: Job) -> None:
    """A step that all ranks skip."""
    job.params[0][0].grad[3, 4] = float("inf")


EVENTS = {
    "gradients": [elsewhere, elsewhere_by_data, gradients_turned_in_place, gradients_turned],
    "parameters": [parameters_elsewhere, parameters_turned_in_place, parameters_turned],
    "absent": [absent, absent_on_one, not_finite],
    "state": [options, loaded, state_set_from_outside, masks_forgotten, one_more_group],
}


@pytest.fixture
def triton(monkeypatch) -> None:
    monkeypatch.setenv("COMPOPT_BACKEND", "triton")


def parts_of(made: kernels.Table | tuple[kernels.Table, ...]) -> list[tuple]:
    """Return all that a launch reads of what was made for it, fit for comparison."""
    tables = made if isinstance(made, tuple) else (made,)
    return [(table.cells.tolist(), table.device, table.constants) for table in tables]


@pytest.fixture
def comparisons(triton, monkeypatch) -> Counter[bool]:
    """Compare every table that a launch takes from the cache with one made anew; count both."""
    call, records = TableCache.__call__, Counter()

    def compared(tables: TableCache, use: object, key: object, make: Callable) -> object:
        new = []

        def noted() -> object:
            new.append(make())
            return new[-1]

        table = call(tables, use, key, noted)
        records[not new] += 1
        assert new or parts_of(table) == parts_of(make()), f"{use}: the table in the cache is out of date"
        return table

    monkeypatch.setattr(TableCache, "__call__", compared)
    return records


# a step takes the interpreter a quarter of a second: SCAPE's tables, the most, see all, the others' half of it
CASES = [("SCAPE", torch.float32, EVENTS[about]) for about in EVENTS]
CASES += [("Radius", torch.float32, EVENTS[about]) for about in ("gradients", "state")]
CASES += [("AdamS", torch.float32, EVENTS[about]) for about in ("parameters", "absent")]
CASES += [("Radius, bfloat16", torch.float32, [elsewhere, gradients_turned, masks_forgotten])]
# with float32 masters
CASES += [("AdamS", torch.bfloat16, [elsewhere, parameters_elsewhere, parameters_turned_in_place, absent])]


MAIN = [CASES[3], CASES[4], CASES[6], CASES[8]]  # all events, and all classes


def name_case(x: object) -> str:
    return x[0].__name__ if isinstance(x, list) else str(x)


@pytest.mark.parametrize(("name", "dtype", "events"), slow_but(lambda *row: row in MAIN, CASES), ids=name_case)
def test_tables_in_the_cache_are_those_made_anew(name, dtype, events, comparisons):
    """Two steps as ever, then for each event one that it happens before, and one more."""
    job = Job(CLASSES[name], dtype)
    turns = [None, None, *(turn for each in events for turn in (each, None))]
    for t, event in enumerate(turns):
        job.gradients(t)
        if event is not None:
            event(job)
        job.step()
    assert comparisons[True] and comparisons[False]


@pytest.mark.parametrize("name", slow_but(lambda name: name in ("Radius", "SCAPE"), CLASSES))
def test_steady_steps_make_no_table(name, triton, monkeypatch):
    made: Counter[str] = Counter()
    called = TableCache.__call__

    def counted(tables: TableCache, use: tuple, key: object, make: Callable) -> kernels.Table:
        def noted() -> kernels.Table:
            made[use[0]] += 1
            return make()

        return called(tables, use, key, noted)

    monkeypatch.setattr(TableCache, "__call__", counted)
    job = Job(CLASSES[name])
    for t in range(4):
        if t == 3:
            made.clear()
        job.gradients(t)
        for optimizer in job.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.9
        job.step()
    # SCAPE's momenta that are held apart, what it selects of and its messages are in memory of their own
    local = {"scape", "selection", "encode", "decode"} if name.startswith("SCAPE") else set()
    assert not set(made) - local


def test_tables_keep_no_tensor(triton):
    job = Job(CLASSES["Radius"])
    for t in range(4):
        job.gradients(t)
        job.step()
    gone = [weakref.ref(p.grad) for params in job.params for p in params]
    for params in job.params:
        for p in params:
            p.grad = None
    gc.collect()
    assert not any(ref() is not None for ref in gone)


def test_tables_of_absent_gradients_are_of_one_device(triton, monkeypatch):
    """Two devices may have buckets of the same lengths, and then no address says which table is whose."""
    call, devices = TableCache.__call__, []

    def noted(tables: TableCache, use: tuple, key: tuple, make: Callable) -> object:
        devices.extend(any(isinstance(x, torch.device) for x in key) for _ in "." if use[0] in ("check", "flags"))
        return call(tables, use, key, make)

    monkeypatch.setattr(TableCache, "__call__", noted)
    job = Job(lambda params, comm: compopt.SeparateAdam(params, rank=3, dense_steps=0, process_group=comm))
    job.gradients(0)
    job.step()
    assert devices and all(devices)


def test_a_table_follows_its_head():
    table = kernels.Table([[1, None, torch.zeros(0)]], torch.device("cpu"))
    first = table.with_head([0.5])
    assert table.with_head([0.5]) is first and table.with_head([0.25]) is not first
    assert (
        table.with_head([0.25])[:1].view(torch.float64).item() == 0.25 and first[:1].view(torch.float64).item() == 0.5
    )
    mine = table.writable_copy([0.25])
    mine.zero_()
    assert table.with_head([0.25])[:1].view(torch.float64).item() == 0.25


def test_what_is_not_contiguous_is_not_known():
    x = torch.zeros(3, 4)
    assert addresses([x, None]) == [x.data_ptr(), -1] and addresses([x.t()]) is None
    assert make_key([1], None) is None and make_key([1], 2) == ([1], 2)


def test_offsets_of_several_masks_are_those_of_each(triton):
    """Computed once for each mask, and joined in the order in which they are asked for."""
    from compopt._backends.triton.tables import block_offsets_of_all
    from compopt._state.buckets import make_buckets

    params = [nn.Parameter(torch.zeros(70, 64)) for _ in range(3)]
    buckets = [make_buckets([{"params": [p], "step": 0}])[0] for p in params]
    draw, tables = torch.Generator().manual_seed(1), TableCache()
    results = [
        masks.Mask(b, bits=[torch.randint(0, 256, (560,), dtype=torch.uint8, generator=draw)]) for b in buckets
    ]  # fmt: skip
    for order in (slice(None), slice(None, None, -1), slice(2)):
        whole = block_offsets_of_all(tables, buckets[order], results[order])
        assert torch.equal(whole, torch.cat([mask.block_offsets for mask in results[order]]))
    blocks = kernels.make_blocks((4480,), torch.device("cpu"))
    assert all(torch.equal(mask.block_offsets, kernels.block_offsets(blocks, mask.bits)) for mask in results)


def with_clip(params, comm):
    return compopt.RadiusAdamW(params, density=0.3, dense_steps=1, interval=100, max_grad_norm=0.5, process_group=comm)


RUNS = {name: CLASSES[name] for name in ("AdamS", "Radius", "Radius, bfloat16", "SCAPE")} | {
    "Radius, clipped": with_clip
}
STEPS, ABSENT, BAD = 6, 3, 4  # a dense step, a resample (which sends residuals too), sparse ones


def run(make: Callable, backend: str, monkeypatch) -> list[list[float]]:
    """Norms after each step."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    job, norms = Job(make), []
    for t in range(STEPS):
        job.gradients(t)
        {ABSENT: absent, BAD: not_finite}.get(t, lambda job: None)(job)
        job.step()
        norms.append([optimizer.stats.grad_norm for optimizer in job.optimizers])
    return norms


@pytest.mark.parametrize("name", slow_but(lambda name: name in ("AdamS", "Radius, clipped", "SCAPE"), RUNS))
def test_kernels_report_the_norms_of_the_reference(name, monkeypatch):
    results = run(RUNS[name], "triton", monkeypatch)
    expected = run(RUNS[name], "torch", monkeypatch)
    for t, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True) and not theirs[0] < 1, t
        assert ours[0] == ours[1] or t == BAD


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_an_average_that_overflows_alone_is_not_applied(backend, monkeypatch):
    """Gradients whose squares float64 adds up, sent in float32, which does not hold the sum over ranks."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    world, params = World(RANKS), [torch.nn.Parameter(torch.ones(9, dtype=torch.float64)) for _ in range(RANKS)]
    optimizers = [
        compopt.RadiusAdamW([p], payload_dtype="float32", process_group=world.comms[rank])
        for rank, p in enumerate(params)
    ]
    for size, phase in ((1.0, "dense"), (3e38, "skipped"), (2.0, "dense")):
        before = params[0].detach().clone()
        for rank, p in enumerate(params):
            p.grad = torch.full_like(p, size - rank * size / 10)
        world.step(optimizers)
        assert [optimizer.stats.phase for optimizer in optimizers] == [phase] * RANKS
        assert torch.equal(params[0], before) == (phase == "skipped") and torch.equal(*params)
