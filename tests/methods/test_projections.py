"""The random projections alone: their shapes, their bits, their moments."""

from __future__ import annotations

import pytest
import torch

from compopt._lowrank.matrices import MatrixSource, gaussian_quantiles
from compopt._lowrank.projection_options import RESET_INTERVALS
from compopt._lowrank.projections import is_dtensor, plan_projection
from compopt._state.bucket import Bucket


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
    assert q.view_as_matrix(x).shape == (m, d)
    assert torch.equal((q.view_as_matrix(x).t() if q.transposes else q.view_as_matrix(x)).reshape(shape), x)


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
        ghat = q.view_as_matrix(torch.empty_like(g)).copy_(q.view_as_matrix(g) @ R @ R.t() * q.scale)
        errors.append((ghat - q.view_as_matrix(g)).flatten())
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
    for step in (1, 7):
        drawn = held.draw(crowd, [2, 5, 9, 11], plan_of(crowd, 8), 3, step)
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
