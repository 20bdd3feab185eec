"""Inner products from signs of random projections, whatever the vectors are like."""

from __future__ import annotations

import math

import pytest
import torch

from compopt._local.distances import BLOCK, count_signs, estimate_products, project_signs

CPU = torch.device("cpu")


def estimated(vectors: list[torch.Tensor], seed: int) -> float:
    """The mean cosine of two of these vectors, all of one length."""
    squared = torch.stack([v.double().square().sum() for v in vectors])
    signs = torch.stack([project_signs(v.split(7000), len(vectors), seed, CPU) for v in vectors])
    mean_square, product = estimate_products(squared, signs)
    assert mean_square == pytest.approx(float(squared.mean()))
    return product / mean_square


def at_an_angle(cosine: float, size: int, seed: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, size, generator=drawn).double()
    a, b = a / a.norm(), b - a * (a @ b) / (a @ a)
    return [a, cosine * a + math.sqrt(1 - cosine**2) * b / b.norm()]


@pytest.mark.parametrize("size", [2, 100, 30_000, 700_000])
@pytest.mark.parametrize("cosine", [-0.9, -0.12, 0.0, 0.4, 0.9])
def test_the_cosine_of_two_vectors(cosine, size):
    for seed in range(3):
        assert abs(estimated(at_an_angle(cosine, size, seed), seed) - cosine) < 0.02


@pytest.mark.parametrize("cosine", [0.0, 0.4])
def test_the_cosine_of_vectors_that_are_mostly_zeros(cosine):
    """As embeddings are, of which a round has seen few rows; and of a few large elements beside many small ones."""
    for seed in range(3):
        kept = torch.rand(30_000, generator=torch.Generator().manual_seed(seed)) < 0.02
        a, b = (v * kept for v in at_an_angle(cosine, 30_000, seed))
        true = float(a @ b / (a.norm() * b.norm()))
        b = b * (a.norm() / b.norm())
        assert abs(estimated([a, b], seed) - true) < 0.02


def test_more_vectors_send_fewer_signs():
    sizes = {ranks: len(project_signs([torch.ones(5)], ranks, 0, CPU)) for ranks in (1, 2, 3, 4, 64)}
    assert sizes == {ranks: count_signs(ranks) // 8 for ranks in sizes}
    assert sizes == {1: 0, 2: 8192, 3: 4096, 4: 4096, 64: 256}
    vectors = [sum(at_an_angle(0.0, 30_000, seed)[0] for seed in (99, rank)) for rank in range(8)]
    vectors = [v / v.norm() for v in vectors]
    true = sum(float(v @ w) for v in vectors for w in vectors if v is not w) / 56
    assert abs(estimated(vectors, 0) - true) < 0.02


def test_what_has_not_moved_is_at_no_angle():
    signs = torch.stack([project_signs([], 2, 0, CPU)] * 2)
    assert estimate_products(torch.zeros(2).double(), signs) == (0.0, 0.0)


@pytest.mark.parametrize("row", [64, 128, 768, 1000])
@pytest.mark.parametrize("cosine", [0.0, 0.4])
def test_the_cosine_of_matrices_whose_rows_are_alike(cosine, row):
    """As the gradient of a layer whose inputs have a common part: rows are multiples of one vector."""
    for seed in range(3):
        common = torch.randn(row, generator=torch.Generator().manual_seed(seed)).double() + 0.5
        a, b = at_an_angle(cosine, 5_000, seed)
        vectors = [torch.outer(v, common).view(-1) / common.norm() for v in (a, b)]
        assert abs(estimated(vectors, seed) - cosine) < 0.02


@pytest.mark.parametrize(("first", "second", "cosine"), [("vu", "uv", 0.0), ("vv", "vu", 0.5)])
def test_the_cosine_of_blocks_that_are_alike(first, second, cosine):
    """Blocks are projected one after another, by signs of their own."""
    drawn = dict(zip("vu", at_an_angle(0.0, BLOCK, 0), strict=True))
    signs = [project_signs([drawn[name] for name in names], 2, 0, CPU) for names in (first, second)]
    squared, product = estimate_products(torch.tensor([2.0, 2.0]).double(), torch.stack(signs))
    assert abs(product / squared - cosine) < 0.02
