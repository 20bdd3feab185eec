"""Projections: random ones alone, and tracked ones: what is conserved, warm starts, shards, backward's shadow.

The equations of tracked projections are tested in test_twins.py.
"""

from __future__ import annotations

import dataclasses

import conformance
import pytest
import test_conformance as steps
import test_conformance_faults as faults
import test_conformance_saving as saving
import torch
from problems import MATRICES, gradients, replicas, step, weights
from ranks import run_ranks
from sim import Ranks
from slow_rows import in_turn
from table import by_name, projecting
from torch import nn

import compopt
from compopt._state.bucket import Bucket
from compopt.separate.matrices import MatrixSource, gaussian_quantiles
from compopt.separate.projection_options import RESET_INTERVALS
from compopt.separate.projections import is_dtensor, orthonormalize, orthonormalize_by_cholesky, plan_projection


def bucket_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, index: int = 0) -> Bucket:
    params = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    return Bucket(index, {}, params, [str(shape) for shape in shapes])


def plan_of(bucket: Bucket, ratio: float, kind: str = "gaussian") -> list:
    return [plan_projection(p.shape, is_dtensor(p), ratio, kind, "auto") for p in bucket.params]


def draw(shape: tuple[int, ...], ratio: float, kind: str = "gaussian", seed: int = 0, step: int = 1, number: int = 0):
    """One tensor's projection and its matrix, in float64."""
    bucket = bucket_of(shape, dtype=torch.float64)
    (q,) = plan_of(bucket, ratio, kind)
    return q, MatrixSource().draw(bucket, [number], [q], seed, step)[0]


@pytest.mark.parametrize(
    ("shape", "sharded", "m", "d", "r"),
    [
        ((96, 320), False, 320, 96, 6),  # the smaller side is projected
        ((320, 96), False, 320, 96, 6),
        ((96, 320), True, 96, 320, 20),  # whole rows on every shard
        ((4, 128, 64), False, 512, 64, 4),  # a stack of matrices
        ((128, 64, 3, 3), False, 576, 128, 8),  # a convolution: its kernel is no matrix
        ((100, 50), False, 100, 50, 4),  # ceil(50 / 16)
        ((2000, 8), False, 2000, 8, 1),  # never less than one column
        ((40, 640), False, 40, 640, 40),  # few rows: what would be left of them carries too little
        ((40, 100_000), False, 100_000, 40, 3),  # but 600 million numbers for them are too many
    ],
)
def test_what_is_projected(shape, sharded, m, d, r):
    q = plan_projection(torch.Size(shape), sharded, 16, "gaussian", "auto")
    assert (q.m, q.d, q.r) == (m, d, r)
    x = torch.arange(m * d).view(shape)
    assert q.view_as_matrices(x)[0].shape == (m, d)
    assert torch.equal((q.view_as_matrices(x)[0].t() if q.transposes else q.view_as_matrices(x)[0]).reshape(shape), x)


def test_what_is_sent_dense():
    for shape in [(5000,), (), (0, 64), (64, 0), (5000, 1), (1, 100_000)]:
        for sharded in (False, True):
            assert plan_projection(torch.Size(shape), sharded, 16, "gaussian", "auto") is None, shape
    assert plan_projection(torch.Size((64, 64)), False, 1, "gaussian", "auto") is None


@pytest.mark.parametrize("shape", [(80, 64), pytest.param((64, 80), marks=pytest.mark.slow)], ids=["columns", "rows"])
def test_the_gaussian_reconstruction_is_unbiased_with_the_variance_it_should_have(shape):
    """Over 2000 seeds: the mean within its standard error, the variance within 5 % of w |g|^2."""
    torch.manual_seed(0)
    g = torch.randn(shape, dtype=torch.float64)
    q = plan_projection(g.shape, False, 8, "gaussian", "auto")
    errors = []
    for seed in range(2000):
        _, R = draw(shape, 8, seed=seed)
        ghat = q.view_as_matrices(torch.empty_like(g))[0].copy_(q.view_as_matrices(g)[0] @ R @ R.t() * q.scale)
        errors.append((ghat - q.view_as_matrices(g)[0]).flatten())
    errors = torch.stack(errors)
    w = (q.d + 1) / q.r
    assert float(errors.square().sum(1).mean() / g.square().sum()) == pytest.approx(w, rel=0.05)
    standard_error = errors.std(0) / 2000**0.5
    z = errors.mean(0) / standard_error
    assert z.abs().max() < 5 and float(z.square().mean()) == pytest.approx(1, abs=0.1)


def test_the_table_of_quantiles_is_gaussian():
    table = gaussian_quantiles()
    assert table.mean() == 0 and table.square().mean() == pytest.approx(1, abs=1e-5)
    assert table.pow(4).mean() == pytest.approx(3, abs=0.01) and table.max() > 4
    assert torch.equal(table * 2**16, (table * 2**16).round())  # the same in float32, and however ndtri rounds


def test_the_numbers_are_independent():
    """Within a matrix, and between steps, seeds and tensors."""
    _, R = draw((4096, 256), 2)
    n = R.numel()
    assert R.mean().abs() < 4 / n**0.5 and R.var() == pytest.approx(1, abs=6 / n**0.5)
    columns = R.t() @ R / len(R) - torch.eye(R.shape[1])
    assert columns.square().mean() * len(R) == pytest.approx(1, abs=0.1)
    flat = R.flatten()
    for other in [dict(step=2), dict(seed=1), dict(number=1)]:
        assert abs(float((flat * draw((4096, 256), 2, **other)[1].flatten()).mean())) < 4 / n**0.5, other
    for lag in range(1, 9):
        assert abs(float((flat[lag:] * flat[:-lag]).mean())) < 4 / n**0.5


def test_the_bits_depend_on_seed_step_and_number_and_on_nothing_else():
    single = bucket_of((128, 64))
    R = MatrixSource().draw(single, [5], plan_of(single, 8), 3, 7)[0].clone()
    double = bucket_of((128, 64), dtype=torch.float64)
    assert torch.equal(R.double(), MatrixSource().draw(double, [5], plan_of(double, 8), 3, 7)[0])
    crowd, held = bucket_of((70, 70), (128, 64), (10,), (90, 64)), MatrixSource()
    for t in (1, 7):
        drawn = held.draw(crowd, [2, 5, 9, 11], plan_of(crowd, 8), 3, t)
    assert torch.equal(drawn[1], R) and drawn[2] is None
    # what every machine must draw: a change here makes ranks of different versions disagree
    assert R[0, :4].mul(2**16).int().tolist() == [-44268, -1014, -63346, -57635]


def test_one_buffer_serves_all_buckets():
    held, small, large = MatrixSource(), bucket_of((64, 64)), bucket_of((128, 128))
    first = held.draw(large, [0], plan_of(large, 8), 0, 1)[0].data_ptr()
    assert held.draw(small, [1], plan_of(small, 8), 0, 1)[0].data_ptr() == first
    assert held.draw(large, [0], plan_of(large, 8), 0, 2)[0].data_ptr() == first


@pytest.mark.parametrize("kind", RESET_INTERVALS)
@pytest.mark.parametrize("ratio", [2, 8, 64])
def test_auto_is_the_most_stable_beta(kind, ratio):
    q = plan_projection(torch.Size((256, 256)), False, ratio, kind, "auto")
    w = (q.d + 1) / q.r if kind == "gaussian" else 1 - q.r / q.d

    def growth(beta: float) -> float:
        return beta**2 + (1 - beta) ** 2 * w

    assert q.least_beta <= q.beta
    if kind == "gaussian":
        assert growth(q.beta) < min(growth(q.beta - 0.01), growth(q.beta + 0.01)) and growth(q.beta) < 1
        assert growth(q.least_beta) == pytest.approx(1)


SHAPES = [(64, 80), (80,), (128, 64), (96, 3, 40), (10, 10)]
RANK = 3


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def make(ranks: int, **options):
    def tracked(params, **group):
        return compopt.Separate(sgd(params), **group, **projecting("tracked", rank=RANK, **options))

    return replicas(ranks, weights(SHAPES), tracked)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [None, torch.int8, "int4"], ids=str)
def test_what_came_is_what_was_applied_and_what_is_kept(ranks, dtype):
    """The mean of g + e is the averaged gradient plus the mean of the new e, to float32, codes included; also in the
    steps for which the rank was changed.
    """
    world, params, optimizers = make(ranks, payload_dtype=dtype)
    for local in (group for optimizer in optimizers for group in optimizer.base.param_groups):
        local.update(lr=1.0, momentum=0.0)

    def kept(i: int) -> torch.Tensor:
        states = [optimizer.state[local[i]] for optimizer, local in zip(optimizers, params, strict=True)]
        return torch.stack([state["residual"] for state in states]).mean(0)

    for t in range(6):
        if t in (2, 4):  # the second change adds no name to the group
            for optimizer in optimizers:
                optimizer.param_groups[0]["compopt_rank"] = RANK + t // 2
        grads = gradients(ranks, t, SHAPES)
        before = {i: (kept(i).clone(), params[0][i].detach().clone()) for i in MATRICES}
        step(world, params, optimizers, grads)
        for i, (e, w) in before.items():
            came = torch.stack([local[i] for local in grads]).mean(0) + e
            torch.testing.assert_close((w - params[0][i].detach()) + kept(i), came, rtol=1e-5, atol=1e-5)
            assert kept(i).any()
        basis = optimizers[0].state[params[0][2]]["basis"]
        assert basis.numel() == 64 * (RANK + t // 2) and basis.any()


def test_it_follows_a_gradient_of_low_rank():
    """At the third step all of a stationary gradient of rank 3 arrives; a random projection gets little of it."""
    g = torch.randn(96, 5, generator=torch.Generator().manual_seed(0))[:, :RANK] @ torch.randn(RANK, 64)
    caught = {}
    for kind in ("tracked", "gaussian"):
        p = nn.Parameter(torch.zeros(96, 64))
        optimizer = compopt.Separate(
            torch.optim.SGD([p], lr=1.0), **projecting(kind, 12, RANK), ef_beta=1.0, simulate=True
        )
        for _ in range(3):
            before, p.grad = p.detach().clone(), g.clone()
            optimizer.step()
        caught[kind] = float((before - p.detach() - g).norm() / g.norm())
    assert caught["tracked"] < 1e-4 and caught["gaussian"] > 0.5


@pytest.mark.parametrize("by", [orthonormalize, orthonormalize_by_cholesky])
def test_columns_are_orthonormal_whatever_comes(by):
    generator = torch.Generator().manual_seed(0)
    same = torch.randn(40, 1, generator=generator).expand(40, 3)
    matrices = [torch.randn(40, 3, generator=generator), torch.zeros(40, 3), same, torch.randn(7, 2)]
    small_and_large = torch.randn(40, 3, generator=generator) * torch.tensor([1e-30, 1.0, 1e18])
    nearly_same = same + 1e-5 * torch.randn(40, 3, generator=generator)
    matrices += [small_and_large, nearly_same, torch.eye(40)[:, :3], -torch.eye(40)[:, :3]]
    for matrix, (results,) in zip(matrices, by([matrix[None] for matrix in matrices]), strict=True):
        matrix = matrix / matrix.norm(dim=0).clamp_min(1e-35)
        torch.testing.assert_close(results.t() @ results, torch.eye(results.shape[1]), rtol=0, atol=1e-5)
        torch.testing.assert_close(results @ (results.t() @ matrix), matrix, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by", [orthonormalize, orthonormalize_by_cholesky])
def test_a_row_of_zeros_stays_one(by):
    """Beside full and dependent columns, above and below the first r rows; a matrix of zeros gives unit vectors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 40, 5, generator=generator) * torch.tensor([1e-3, 1.0, 1e20])[:, None, None]
    x[:, [0, 2, 4, 20, 39]] = 0
    x[1, :, 3] = x[1, :, 1]
    x[2, 6:] = 0  # fewer rows than columns are left
    x = torch.cat([x, torch.zeros(1, 40, 5)])
    (columns,) = by([x])
    for matrix, Q in zip(x[:3], columns, strict=False):
        is_zero = ~matrix.any(1)
        assert not Q[is_zero].any() and Q[~is_zero].any(1).all()
        left = matrix - Q @ (Q.mT @ matrix)
        assert float(left.norm()) < 1e-5 * float(matrix.norm()), "they span what they did"
    torch.testing.assert_close(columns[0].mT @ columns[0], torch.eye(5), rtol=0, atol=1e-5)
    torch.testing.assert_close(columns[3].abs(), torch.eye(40)[:, :5], rtol=0, atol=0)


def test_what_was_zero_for_a_while_moves_when_a_gradient_comes():
    """Bases hold nothing of it, nor of a matrix that was all zeros: the residual keeps it until they do."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(96, 80))
    optimizer = compopt.Separate(torch.optim.SGD([p], lr=1.0), **projecting("tracked", rank=4), simulate=True)
    sent = torch.zeros(96, 80)
    for t in range(60):
        p.grad = 0.1 * torch.randn(96, 4, generator=generator) @ torch.randn(4, 80, generator=generator)
        if t < 6:
            p.grad[:50], p.grad[:, :40] = 0, 0
        if t in (3, 8):
            p.grad.zero_()
        sent += p.grad
        optimizer.step()
        if t == 5:
            assert not p[:50].any() and not p[:, :40].any()
    assert p[:50, :40].count_nonzero() == 2000
    torch.testing.assert_close(-p.detach() + optimizer.state[p]["residual"], sent, rtol=0, atol=1e-4)
    assert float(optimizer.state[p]["residual"].norm()) < 0.9 * float(sent.norm())


def test_what_is_tracked():
    assert plan_projection(torch.Size((320, 960)), False, 16, "tracked", "auto", 16).r == 16
    conv = plan_projection(torch.Size((128, 64, 3, 3)), True, 16, "tracked", "auto", 16)
    assert (conv.d, conv.m, conv.r, conv.beta) == (128, 576, 16, 0.0)
    few_rows = plan_projection(torch.Size((2, 4096)), True, 16, "tracked", "auto", 16)
    assert few_rows is None or few_rows.r * (2 + 4096) < 2 * 4096
    for shape in [(64, 64), (5000,), (1, 4096), (0, 64)]:
        assert plan_projection(torch.Size(shape), False, 16, "tracked", "auto", 32) is None, shape


def test_bytes_are_rank_times_the_sides():
    p = nn.Parameter(torch.zeros(960, 320))
    for dtype, size in ((None, 4), (torch.int8, 1 + 4 / 128), ("int4", 1 / 2 + 4 / 128)):
        optimizer = compopt.SeparateAdam([p], **projecting("tracked", rank=16, payload_dtype=dtype), simulate=True)
        p.grad = torch.ones_like(p)
        optimizer.step()
        words = optimizer.stats.bytes_sent - size * 16 * (960 + 320)
        header = 1 + len(optimizer._buckets[0].control.numbers)
        assert 0 < words <= 2 * 4 * header + 128, "headers and control words, twice; the handshake"


TRACKED = projecting("tracked", dense_steps=2)
CASES = [
    dataclasses.replace(by_name[name], compressed={**TRACKED, **more})
    for name, more in (("SeparateAdam", {}), ("Separate", {"payload_dtype": torch.int8}))
]


HOLDS = dict(
    zip(
        ["replicas", "nan", "failure", "absent", "resumed", "consolidated", "fewer", "unfrozen", "shapes", "copies"],
        [
            lambda case: steps.test_replicas_are_equal_to_the_bit_after_every_step(case, 3),
            lambda case: faults.test_a_bad_gradient_on_one_rank_makes_all_skip_and_changes_nothing(
                case, (float("nan"), 4)
            ),
            lambda case: faults.test_a_collective_that_fails_changes_nothing(case, 5),
            lambda case: steps.test_no_gradient_on_one_rank_counts_as_zeros(case),
            lambda case: saving.test_resumed_on_the_same_ranks_it_continues_to_the_bit(case, 7),
            lambda case: saving.test_consolidated_it_resumes_on_any_number_of_ranks_with_the_mean_residual(case),
            lambda case: faults.test_survivors_go_on_over_a_smaller_group_from_memory(case, 4),
            lambda case: steps.test_a_layer_unfrozen_later_joins(case),
            lambda case: steps.test_strange_shapes_and_layouts(case),
            lambda case: saving.test_deepcopy_and_pickle_continue_alike(case),
        ],
        strict=True,
    )
)


@pytest.mark.filterwarnings("ignore:.* ranks are gone")
@pytest.mark.parametrize(("holds", "number"), in_turn(HOLDS, (0, 1)))
def test_conformance_holds(holds, number):
    """In float32, and around a base in int8."""
    HOLDS[holds](CASES[number])


def test_a_checkpoint_of_another_rank_begins_its_basis_anew():
    def make(rank: int) -> Ranks:
        def build(params, process_group):
            return compopt.SeparateAdam(params, **projecting("tracked", rank=rank), process_group=process_group)

        return Ranks(1, conformance.Small, build)

    saved, other = make(4), make(8)
    saved.train(conformance.loss, 3)
    other.optimizers[0].load_state_dict(saved.optimizers[0].state_dict())
    assert other.optimizers[0].param_groups[0]["rank"] == 4
    other.optimizers[0].param_groups[0]["rank"] = 8
    other.train(conformance.loss, 2)


def test_it_is_refused_where_it_makes_no_sense():
    p = nn.Parameter(torch.zeros(64, 64))
    for options in (dict(rank=0), dict(rank=1.5), dict(adaptive=True)):
        with pytest.raises(ValueError, match=next(iter(options))):
            compopt.SeparateAdam([p], projection="tracked", **options)


def early_and_late(rank: int) -> dict[str, list]:
    """The same run with buckets that start in backward and without; and local shards against plain tensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.nn.parallel import DistributedDataParallel as DDP

    from compopt._engine import exchange as exchange_module
    from compopt._state import buckets

    buckets.BUCKET_BYTES, buckets.JOINED_PART_ON_CPU = 40_000, 0
    complete_stage, completed = exchange_module.BucketExchange.complete_stage, []
    exchange_module.BucketExchange.complete_stage = lambda exchange: (
        completed.append(exchange.bucket.index) or complete_stage(exchange)
    )
    results: dict[str, list] = {}
    tracked = projecting("tracked", lr=1e-2, dense_steps=1)
    sparse = dict(lr=1e-2, density=0.3, interval=2, dense_steps=1, payload_dtype=torch.int8)
    makers = {
        "tracked": lambda params: compopt.SeparateAdam(params, **tracked),
        "tracked, int8": lambda params: compopt.SeparateAdam(params, **{**tracked, "payload_dtype": torch.int8}),
        "Radius, int8": lambda params: compopt.RadiusAdamW(params, **sparse),
    }
    for name, make in makers.items():
        ends, begun = [], []
        for overlap in (True, False):
            torch.manual_seed(0)
            net = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))
            model = DDP(net) if overlap else net
            optimizer = make(net.parameters())
            for t in range(5):
                x = torch.randn(8, 96, generator=torch.Generator().manual_seed(10 * t + rank))
                completed.clear()
                model(x).square().mean().backward()
                begun.append(len(completed) > 0)
                optimizer.step()
                optimizer.zero_grad()
            ends.append(torch.cat([p.detach().view(-1) for p in net.parameters()]))
        results[name] = [torch.equal(*ends), any(begun), float(ends[0].double().sum())]

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    local = nn.Parameter(torch.randn(65 - rank, 96, generator=torch.Generator().manual_seed(rank)))
    shard = nn.Parameter(
        DTensor.from_local(local.detach().clone(), mesh["shard"], [Shard(0)], shape=(129, 96), stride=(96, 1))
    )
    single = dist.new_group([rank], use_local_synchronization=True)
    options = projecting("tracked", lr=1e-2, payload_dtype=torch.int8, simulate=True)
    ours = compopt.SeparateAdam([shard], process_group=mesh.get_group("replicate"), **options)
    plain = compopt.SeparateAdam([local], process_group=single, **options)
    for t in range(4):
        local.grad = torch.randn(local.shape, generator=torch.Generator().manual_seed(10 * t + rank))
        shard.grad = DTensor.from_local(local.grad.clone(), mesh["shard"], [Shard(0)], shape=(129, 96), stride=(96, 1))
        ours.step()
        plain.step()
        if t == 1:  # on from its state dict, where all states are laid out as the parameter
            saved = ours.state_dict()
            ours = compopt.SeparateAdam([shard], process_group=mesh.get_group("replicate"), **options)
            ours.load_state_dict(saved)
            laid_out = [value.placements == shard.placements for value in saved["state"][0].values() if value.dim()]
    results["sharded"] = [torch.equal(shard.to_local(), local), ours.stats.phase, len(laid_out), all(laid_out)]
    return results


@pytest.mark.slow
def test_it_runs_in_backwards_shadow_and_on_sharded_rows():
    first, second = run_ranks(early_and_late, 2)
    for name in ("tracked", "tracked, int8", "Radius, int8"):
        same, completed, checksum = first[name]
        assert same and completed and checksum == second[name][2], name
    assert first["sharded"] == second["sharded"] == [True, "projected", 4, True]


def test_a_gradient_clipped_after_backward_on_one_rank_makes_all_send_again(monkeypatch):
    """Early payloads are stale on all ranks: both factors go out anew, of the gradients as they are."""
    from compopt._state import buckets

    monkeypatch.setattr(buckets, "BUCKET_BYTES", 20_000)
    monkeypatch.setattr(buckets, "JOINED_PART_ON_CPU", 0)
    options = projecting("tracked", lr=1e-2, payload_dtype=torch.int8)
    runs = [
        Ranks(
            2,
            conformance.Small,
            lambda ps, process_group: compopt.SeparateAdam(ps, process_group=process_group, **options),
        )
        for _ in range(2)
    ]
    for t in range(4):
        for overlapped, ranks in enumerate(runs):
            ranks.backward(conformance.loss)
            for _, model, optimizer in ranks if overlapped else ():
                optimizer.gradients_ready(reversed(list(model.parameters())))
                optimizer.backward_done()
            if t == 2:
                nn.utils.clip_grad_norm_(ranks.models[1].parameters(), 1e-3)
            ranks.world.step(ranks.optimizers)
            ranks.steps += 1
            ranks.assert_replicas_equal()
        assert runs[1].optimizers[0].stats.resent == (t == 2)
    for p, q in zip(runs[0].models[0].parameters(), runs[1].models[0].parameters(), strict=True):
        assert torch.equal(p, q)
