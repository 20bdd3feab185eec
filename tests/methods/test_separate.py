"""SEPARATE with random projections against Algorithm 1 on dense tensors, step by step, its options, blocks of rows."""

from __future__ import annotations

import functools
import math
import warnings

import pytest
import torch
from oracles import SeparateOracle
from problems import COMPRESSED, MATRICES, SHAPES, gradients, replicas, step, weights
from ranks import run_ranks
from slow_rows import slow_but
from table import projecting
from torch import Tensor, nn

import compopt
from compopt.separate.matrices import MatrixSource
from compopt.separate.projections import plan_projection

ADAM = dict(lr=3e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
BASES = {
    "AdamW": lambda params: torch.optim.AdamW(params, **ADAM),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
}


def make(ranks: int, base: str = "SeparateAdam", **options):
    options = {"projection": "gaussian", **options}

    def separate(params, **group):
        if base == "SeparateAdam":
            return compopt.SeparateAdam(params, **ADAM, **group, **options)
        return compopt.Separate(BASES[base](params), **group, **options)

    return replicas(ranks, weights(), separate)


@functools.cache
def plan_of(ratio: float, kind: str) -> tuple:
    """Return the projection of every tensor."""
    return tuple(
        plan_projection(torch.Size(s), False, ratio, kind, 0.9) if c else None
        for s, c in zip(SHAPES, COMPRESSED, strict=True)
    )


@functools.cache
def drawn(ratio: float, kind: str, t: int) -> list[torch.Tensor | None]:
    """For every tensor the matrices that the package draws at step t, scaled for the oracle, which divides by r.

    Whatever the base and the number of ranks, they are the same: a QR of 1920 x 240 numbers is worth keeping.
    """
    plan = plan_of(ratio, kind)
    order = list(reversed(range(len(SHAPES))))  # a bucket holds its tensors in reverse
    bucket = make(1, ratio=ratio, projection=kind)[2][0]._buckets[0]
    matrices = MatrixSource().draw(bucket, order, [plan[i] for i in order], 0, t)
    scaled: list[torch.Tensor | None] = [None] * len(SHAPES)
    for i, matrix in zip(order, matrices, strict=True):
        if matrix is not None:
            scaled[i] = matrix * (1.0 if kind == "gaussian" else plan[i].r ** 0.5)
    return scaled


def as_drawn(ratio: float, kind: str):
    """Return the oracle's form: every tensor with its projected dimension last, and the matrices the package draws."""

    def turned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(plan_of(ratio, kind), tensors, strict=True)
        return [t if q is None else q.view_as_matrices(t.contiguous())[0] for q, t in pairs]

    return turned, lambda t, i: drawn(ratio, kind, t)[i]


OPTIONS = {
    "auto": dict(ratio=8, reset_interval=4),
    "clipped": dict(ratio=4, ef_beta=0.95, reset_interval=None, dense_steps=3, max_grad_norm=20.0),
    "no error feedback": dict(ratio=16, ef_beta=1.0, max_grad_norm=20.0),
}
# Every base with every number of ranks once; of the other options each meets every base, and every number of ranks.
RUNS = [
    *(("auto", base, ranks) for base in ("SeparateAdam", *BASES) for ranks in (1, 2, 4)),
    *(("clipped", base, ranks) for base, ranks in (("SeparateAdam", 2), ("AdamW", 4), ("SGD", 1))),
    *(("no error feedback", base, ranks) for base, ranks in (("SeparateAdam", 2), ("AdamW", 1), ("SGD", 4))),
]


def is_fast(options: str, base: str, ranks: int) -> bool:
    """Every base, every number of ranks and every option at least once."""
    return base == "SeparateAdam" or (options, base, ranks) in (("auto", "AdamW", 4), ("clipped", "SGD", 1))


@pytest.mark.parametrize(("options", "base", "ranks"), slow_but(is_fast, RUNS))
def test_equals_the_oracle(ranks, base, options):
    options = OPTIONS[options]
    world, params, optimizers = make(ranks, base, **options)
    turned, random = as_drawn(options["ratio"], "gaussian")
    message = {k: v for k, v in options.items() if k != "ratio"}
    inner = BASES["AdamW" if base == "SeparateAdam" else base]
    compress = [random(1, i) is not None for i in range(len(turned(weights())))]
    oracle = SeparateOracle(turned(weights()), ranks, inner, random, compress=compress, **message)
    phases = set()
    for t in range(10 if options.get("reset_interval") else 8):
        grads = gradients(ranks, t)
        step(world, params, optimizers, grads)
        oracle.step([turned(local) for local in grads])
        phases.add(oracle.phase)
        assert optimizers[0].stats.phase == oracle.phase
        assert optimizers[0].stats.grad_norm == pytest.approx(oracle.norm)
        for p, wanted in zip(turned(params[-1]), oracle.params, strict=True):
            torch.testing.assert_close(p.detach(), wanted.detach(), rtol=1e-10, atol=1e-11)
    assert "projected" in phases
    for rank, optimizer in enumerate(optimizers):
        residuals = turned([optimizer.state[p].get("residual", p) for p in params[rank]])
        for residual, error, compressed in zip(residuals, oracle.error[rank], compress, strict=True):
            if compressed:
                torch.testing.assert_close(residual, error, rtol=1e-10, atol=1e-11)


def errors_over(steps: int, **options) -> list[float]:
    """The error's norm over the gradient's, under stationary gradients; weights stand still."""
    p = nn.Parameter(torch.zeros(128, 160))
    optimizer = compopt.SeparateAdam(
        [p], lr=0.0, reset_interval=None, **{"projection": "gaussian", **options}, simulate=True
    )
    generator = torch.Generator().manual_seed(0)
    mean, norms = torch.randn(128, 160, generator=generator), []
    p.grad = torch.empty_like(p)
    for _ in range(steps):
        p.grad.normal_(generator=generator).add_(mean)
        optimizer.step()
        norms.append(float(optimizer.state[p]["residual"].norm() / p.grad.norm()))
        if not norms[-1] < 1e6:
            break
    return norms


@pytest.mark.parametrize("ratio", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_the_error_stays_bounded_with_auto_and_diverges_in_the_printed_direction(ratio):
    steps = max(500, 16 * ratio)  # an error is forgotten over about as many steps as the ratio
    norms = errors_over(steps, ratio=ratio)
    first, second = norms[: steps // 2], norms[steps // 2 :]
    assert len(norms) == steps and max(second) < 1.5 * max(first) and max(norms) < 3 * ratio**0.5
    auto = plan_projection(torch.Size((128, 160)), False, ratio, "gaussian", "auto").beta
    with pytest.warns(UserWarning, match="grow without end"):
        printed = errors_over(2000, ratio=ratio, ef_beta=1 - auto)  # the new error weighs what the old one should
    assert len(printed) < 300


def test_a_stable_number_is_taken_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = nn.Parameter(torch.zeros(128, 160))
        compopt.SeparateAdam([p], projection="gaussian", ratio=16, ef_beta=0.95)


def test_bytes_at_ratio_16_are_a_fourteenth_of_dense():
    block = [(960, 320), (320, 320), (1280, 320), (320, 1280), (320,), (320,)]
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(256, 320), (64, 320), *block * 2, (256, 320)]]
    optimizer = compopt.SeparateAdam(params, projection="gaussian", simulate=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.stats.bytes_sent * 14 <= optimizer.stats.bytes_dense == 4 * sum(p.numel() for p in params)


def sharded_run(rank: int) -> list[float]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape)) for shape in [(129, 64), (64, 64), (1, 80), (7,)]]
    parts = [nn.Parameter(distribute_tensor(p.detach(), mesh["shard"], [Shard(0)])) for p in whole]
    single = dist.new_group([rank], use_local_synchronization=True)
    options = dict(projection="gaussian", ratio=8, simulate=True)
    makers = [
        lambda ps, group: compopt.Separate(torch.optim.SGD(ps, lr=0.1, momentum=0.9), process_group=group, **options),
        lambda ps, group: compopt.SeparateAdam(ps, process_group=group, **options),
    ]
    optimizers = [(make(whole, single), make(parts, mesh.get_group("replicate"))) for make in makers]
    for t in range(6):
        for i, (p, q) in enumerate(zip(whole, parts, strict=True)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + i))
            q.grad = distribute_tensor(p.grad, mesh["shard"], [Shard(0)])
        for optimizer in optimizers[t % 2]:
            optimizer.step()
            assert optimizer.stats.phase == "projected"
    return [float((p - q.full_tensor()).abs().max()) for p, q in zip(whole, parts, strict=True)]


def test_rows_sharded_over_ranks_train_as_the_whole_does():
    for differences in run_ranks(sharded_run, 2):
        assert max(differences) < 1e-5


OPTIONS_SHAPES = [(64, 80), (96, 64)]


def run(steps: int = 3, ranks: int = 2, first: int = 0, **options):
    """A few steps on the same gradients, whatever the options; counted from ``first``."""
    start = weights(OPTIONS_SHAPES, torch.float32)
    world, params, optimizers = replicas(
        ranks, start, lambda ps, process_group: compopt.SeparateAdam(ps, process_group=process_group, **options)
    )
    residuals = []
    for optimizer in optimizers:
        optimizer.param_groups[0]["step"] = first
    for t in range(steps):
        step(world, params, optimizers, gradients(ranks, t, OPTIONS_SHAPES, torch.float32))
        residuals.append([optimizers[0].state[p]["residual"].clone() for p in params[0]])
    return params[0], residuals


def test_the_seed_decides_about_the_matrices_and_nothing_else_does():
    for projection in ("gaussian", "tracked"):
        one, same, other = (run(**projecting(projection), seed=seed)[0] for seed in (5, 5, 6))
        for a, b, c in zip(one, same, other, strict=True):
            assert torch.equal(a, b) and not torch.allclose(a, c)


def test_matrices_are_other_ones_in_every_step_and_for_every_tensor():
    from compopt.separate.matrices import MatrixSource
    from compopt.separate.projections import plan_projection as plan_of

    q = plan_of((64, 80), False, 16, "gaussian", "auto", 4)
    bucket = compopt.SeparateAdam(
        [nn.Parameter(torch.zeros(64, 80)) for _ in range(2)], projection="gaussian"
    )._buckets[0]
    drawn = [
        [R.clone() for R in MatrixSource().draw(bucket, [0, 1], [q, q], seed, t)]
        for seed, t in ((0, 1), (0, 2), (1, 1))
    ]
    matrices = [R for pair in drawn for R in pair]
    assert all(not torch.allclose(a, b) for n, a in enumerate(matrices) for b in matrices[:n])


@pytest.mark.parametrize(
    ("options", "forgets"),
    [
        (dict(projection="gaussian"), [128]),
        (dict(projection="tracked", rank=4), []),
        (dict(projection="tracked", rank=4, reset_interval=64), [64, 128]),
        (dict(projection="gaussian", reset_interval=63), [63]),
        (dict(projection="gaussian", reset_interval=None), []),
    ],
    ids=str,
)
def test_the_error_is_forgotten_every_128_steps_and_a_tracked_one_never(options, forgets):
    results = []
    for first in (62, 126):
        _, residuals = run(3, 1, first, **options)
        results += [first + 1 + n for n, each in enumerate(residuals) if not any(r.any() for r in each)]
    assert results == forgets


def columns_of(p: torch.Tensor, moved: torch.Tensor) -> int:
    """The rank of what a step of plain SGD has changed: as many as were sent."""
    return int(torch.linalg.matrix_rank((p - moved).double(), rtol=1e-4))


@pytest.mark.parametrize("named", [False, True])
def test_a_group_of_the_base_says_how_its_tensors_are_compressed(named):
    """And groups that say nothing take what the wrapper says."""
    local = [{}, {"compopt_ratio": 4}, {"compopt_ratio": 32}, {"compopt_compress": False}]
    params = [nn.Parameter(w) for w in weights([(64, 96)] * len(local), torch.float32)]
    groups = [
        {"params": [(f"layer{n}.weight", p)] if named else [p], **message}
        for n, (p, message) in enumerate(zip(params, local, strict=True))
    ]
    optimizer = compopt.Separate(torch.optim.SGD(groups, lr=1.0), projection="gaussian", ratio=16, simulate=True)
    before = [p.detach().clone() for p in params]
    for p, g in zip(params, gradients(1, 0, [(64, 96)] * len(local), torch.float32)[0], strict=True):
        p.grad = g
    optimizer.step()
    assert [columns_of(*pair) for pair in zip(before, params, strict=True)] == [4, 16, 2, 64]
    floats = 4 * (96 * (4 + 16 + 2) + 64 * 96)
    assert floats <= optimizer.stats.bytes_sent <= floats + 1024
    assert [group["ratio"] for group in optimizer.option_groups] == [16, 4, 32, 16]


def test_a_group_of_the_base_says_its_rank_and_its_weight_of_old_errors():
    params = [nn.Parameter(w) for w in weights([(64, 96)] * 3, torch.float32)]
    own = [{}, {"compopt_rank": 3}, {"compopt_ef_beta": 1.0}]
    groups = [{"params": [p], **options} for p, options in zip(params, own, strict=True)]
    optimizer = compopt.Separate(torch.optim.SGD(groups, lr=1.0), **projecting("tracked", rank=7), simulate=True)
    before = [p.detach().clone() for p in params]
    for p, g in zip(params, gradients(1, 0, [(64, 96)] * 3, torch.float32)[0], strict=True):
        p.grad = g
    optimizer.step()
    assert [columns_of(*pair) for pair in zip(before, params, strict=True)] == [7, 3, 7]
    assert [bool(optimizer.state[p]["residual"].any()) for p in params] == [True, True, False]


def test_a_checkpoint_of_the_base_alone_begins_compression_anew():
    """Also in an optimizer that has trained: what it held back belongs to other parameters."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(80, 64))
    optimizer = compopt.Separate(torch.optim.AdamW([p], lr=1e-2), projection="gaussian", ratio=8, simulate=True)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        optimizer.step()
    assert optimizer.stats.residual_norm() > 0
    optimizer.load_state_dict(optimizer.base.state_dict())
    assert optimizer.stats.residual_norm() == 0 and optimizer.state_dict()["param_groups"][0]["step"] == 0
    assert optimizer.base.state[p]["step"] == 3


STEPS_SHAPES = [(64, 80), (80,), (150, 140), (96, 64)]


class Run:
    """Two ranks of SeparateAdam, and what went in, was applied and is owed."""

    def __init__(self, **options):
        make = functools.partial(compopt.SeparateAdam, lr=1e-2, **projecting(**{"projection": "gaussian", **options}))
        self.world, self.params, self.optimizers = replicas(2, weights(STEPS_SHAPES, torch.float32), make)
        self.t = 0

    def options(self, **changed) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0].update(changed)

    def state(self, name: str, i: int) -> list[Tensor]:
        pairs = zip(self.optimizers, self.params, strict=True)
        return [optimizer.state[local[i]][name].clone() for optimizer, local in pairs]

    def residual(self, i: int) -> Tensor:
        return torch.stack(self.state("residual", i)).mean(0)

    def step(self, absent: int | None = None) -> dict[int, tuple[Tensor, Tensor]]:
        """One step; of each compressed tensor what was applied, and what came: gradients and what was owed."""
        grads = gradients(2, self.t, STEPS_SHAPES, torch.float32)
        for local in grads:
            if absent is not None:
                local[absent] = None
        before = {i: (self.state("exp_avg", i)[0], self.residual(i)) for i in MATRICES}
        step(self.world, self.params, self.optimizers, grads)
        self.t += 1
        books = {}
        for i, (m, residual) in before.items():
            if i == absent:
                assert torch.equal(self.state("exp_avg", i)[0], m) and torch.equal(self.residual(i), residual)
                continue
            applied = (self.state("exp_avg", i)[0] - 0.9 * m) / (1 - 0.9)
            books[i] = applied, torch.stack([local[i] for local in grads]).mean(0) + residual
        return books


@pytest.mark.parametrize("projection, beta", [("gaussian", "auto"), ("tracked", 0.5), ("tracked", "auto")])
def test_dense_steps_in_between_leave_to_absent_tensors_what_they_owe(projection, beta):
    """A contraction's residual is sent. An unbiased projection's error is noise: a dense step drops it."""
    run = Run(projection=projection, ef_beta=beta, reset_interval=None)
    for _ in range(3):
        run.step()
    assert run.optimizers[0].stats.phase == "projected" and run.residual(2).any()
    run.options(dense_steps=100)
    for absent in (2, None):
        residual = {i: run.residual(i) for i in MATRICES}
        for i, (applied, came) in run.step(absent).items():
            wanted = came - residual[i] if projection == "gaussian" else came
            torch.testing.assert_close(applied, wanted, rtol=1e-4, atol=1e-4)
            assert not run.residual(i).any()
        assert run.residual(2).any() == (absent == 2)
    assert run.optimizers[0].stats.phase == "dense"


@pytest.mark.parametrize("beta, kept", [("auto", 0.0), (0.9, 0.9)])
def test_of_a_tracked_tensor_as_much_of_the_old_error_is_kept_as_ef_beta_says(beta, kept):
    run = Run(projection="tracked", ef_beta=beta)
    for _ in range(4):
        old = {i: run.residual(i) for i in MATRICES}
        for i, (applied, came) in run.step().items():
            wanted = kept * old[i] + (1 - kept) * (came - applied)
            torch.testing.assert_close(run.residual(i), wanted, rtol=1e-3, atol=1e-4)


def test_a_base_of_tracked_tensors_goes_on_after_they_were_absent_and_from_a_checkpoint():
    run, other = Run(projection="tracked"), Run(projection="tracked")
    run.step()
    basis = run.state("basis", 2)
    run.step(absent=2)
    assert all(map(torch.equal, run.state("basis", 2), basis))
    for mine, theirs, local, reached in zip(other.optimizers, run.optimizers, other.params, run.params, strict=True):
        mine.load_state_dict(theirs.state_dict())
        for p, q in zip(local, reached, strict=True):
            p.data.copy_(q)
    other.t = run.t
    for one in (run, other):
        one.step()
    for p, q in zip(run.params[0], other.params[0], strict=True):
        assert torch.equal(p, q)


def test_a_basis_is_orthonormal():
    """So that int8 keeps what belongs to small singular values."""
    run = Run(projection="tracked")
    for _ in range(2):
        run.step()
    for i, (rows, columns) in ((0, (64, 80)), (2, (150, 140))):
        basis = run.state("basis", i)[0]
        basis = basis.view(columns, 4) if basis.numel() == 4 * columns else basis.view(rows, 4)
        torch.testing.assert_close(basis.t() @ basis, torch.eye(4), rtol=0, atol=1e-5)


def test_what_int8_takes_off_a_tensor_sent_dense_beside_tracked_ones_goes_out_with_the_next_step():
    run = Run(projection="tracked", rank=40, payload_dtype=torch.int8)  # more columns than pay for the first
    for _ in range(4):
        for i, (applied, came) in run.step().items():
            torch.testing.assert_close(applied + run.residual(i), came, rtol=1e-3, atol=1e-3)
    assert run.optimizers[0].stats.phase == "projected"


def test_the_rank_of_a_tracked_tensor_is_what_is_asked_for():
    sent = {}
    for rank in (1, 5):
        p = nn.Parameter(torch.zeros(64, 80))
        optimizer = compopt.SeparateAdam([p], **projecting("tracked", rank=rank), simulate=True)
        p.grad = torch.randn(64, 80)
        optimizer.step()
        assert optimizer.state[p]["basis"].numel() == rank * 80
        sent[rank] = optimizer.stats.bytes_sent
    assert sent[5] - sent[1] == 4 * (5 - 1) * (64 + 80)


def test_tracked_tensors_of_one_shape_follow_each_its_own_gradient():
    """Each gradient is of rank 2: in the third step all of it arrives."""
    random = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(96, 64)) for _ in range(3)]
    grads = [torch.randn(96, 2, generator=random) @ torch.randn(2, 64, generator=random) for _ in params]
    optimizer = compopt.Separate(
        torch.optim.SGD(params, lr=1.0), **projecting("tracked", rank=2), ef_beta=1.0, simulate=True
    )
    for _ in range(3):
        before = [p.detach().clone() for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    for p, w, g in zip(params, before, grads, strict=True):
        torch.testing.assert_close(w - p.detach(), g, rtol=1e-3, atol=1e-3)


def test_columns_of_a_stack_are_those_of_each_tensor():
    """Their random numbers begin at a multiple of four: 67 x 5 are not one."""
    params = [nn.Parameter(torch.zeros(67, 81)) for _ in range(3)]
    optimizer = compopt.SeparateAdam(params, projection="gaussian", ratio=16, simulate=True)
    (bucket,) = optimizer._buckets
    reducer = optimizer.make_reducer(bucket)
    reducer.draw_random_columns()
    (stack,) = reducer.stacks
    columns = stack.R.clone()
    drawn = optimizer._make_draw(bucket, optimizer._plan_next_step(bucket))()
    assert columns.shape == (3, 67, 5) and all(map(torch.equal, columns, drawn))


def test_what_is_adapted_is_each_tensors_own():
    run = Run(adaptive=True, adapt_interval=2, reset_interval=None)
    for optimizer, local in zip(run.optimizers, run.params, strict=True):
        optimizer.state[local[0]]["residual"].normal_(std=30.0, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        run.step()
    (optimizer, _), local = run.optimizers, run.params[0]
    ratios = [ratio for ratio, _ in optimizer.param_groups[0]["adapted"]]
    assert ratios[0] != ratios[2]
    (bucket,) = optimizer._buckets
    plan = dict(zip(bucket.params, optimizer._plan_next_step(bucket), strict=True))
    for i in MATRICES:
        assert plan[local[i]].r == math.ceil(min(STEPS_SHAPES[i]) / ratios[i])


ROWS, COLUMNS, RATIO = 16, 128, 16
R = COLUMNS // RATIO


def reconstructions(g: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Return what SGD is given of one gradient in each of several steps, on one process."""
    p = nn.Parameter(torch.zeros_like(g))
    sgd = torch.optim.SGD([{"params": [p], "compopt_compress": True}], lr=1.0)
    optimizer = compopt.Separate(sgd, projection="gaussian", ratio=RATIO, ef_beta=1.0, simulate=True)
    results = []
    for _ in range(steps):
        before = p.detach().clone()
        p.grad = g.clone()
        optimizer.step()
        results.append(before - p.detach())
    return results


def test_along_the_gradients_own_column_space_the_error_is_larger_than_the_papers():
    """Of g = u v^T, along u x^T with x across v, it is 1 / r. One vector of the paper's, as long as g, has
    1 / (rows r); its Lemma 4.2 allows 3 / COLUMNS.
    """
    draw = torch.Generator().manual_seed(1)
    u = torch.ones(ROWS) / ROWS**0.5
    Q = torch.linalg.qr(torch.randn(COLUMNS, COLUMNS, generator=draw)).Q
    v, across = Q[:, 0], Q[:, 1:]
    results = reconstructions(torch.outer(u, v), 100)
    variance = torch.stack([(u @ ghat @ across).square().mean() for ghat in results]).mean()
    assert variance == pytest.approx(1 / R, rel=0.15)
    assert variance > 3 / COLUMNS
    mean = torch.stack(results).mean(0)
    assert torch.sum(mean * torch.outer(u, v)) == pytest.approx(1, abs=0.15)  # unbiased
