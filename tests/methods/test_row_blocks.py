"""SEPARATE with a random matrix for each block of rows: how far the error spreads, and where blocks end."""

from __future__ import annotations

import pytest
import torch
from sim import World
from torch import nn

import compopt

ROWS, COLUMNS, RATIO = 16, 128, 16
R = COLUMNS // RATIO


def reconstructions(g: torch.Tensor, steps: int, **options) -> list[torch.Tensor]:
    """Return what SGD is given of one gradient in each of several steps, on one process."""
    p = nn.Parameter(torch.zeros_like(g))
    sgd = torch.optim.SGD([{"params": [p], "compopt_compress": True}], lr=1.0)
    optimizer = compopt.Separate(sgd, projection="gaussian", ratio=RATIO, ef_beta=1.0, simulate=True, **options)
    results = []
    for _ in range(steps):
        before = p.detach().clone()
        p.grad = g.clone()
        optimizer.step()
        results.append(before - p.detach())
    return results


@pytest.mark.parametrize("height", [None, 8, 2, 1])
def test_along_the_gradients_own_column_space_the_error_falls_with_the_number_of_blocks(height):
    """Of g = u v^T, along u x^T with x across v, each block adds |u_block|^4 / r: with even u 1 / (blocks r).

    One vector of the paper's, as long as g, has 1 / (rows r); its Lemma 4.2 allows 3 / COLUMNS.
    """
    draw = torch.Generator().manual_seed(1)
    u = torch.ones(ROWS) / ROWS**0.5
    Q = torch.linalg.qr(torch.randn(COLUMNS, COLUMNS, generator=draw)).Q
    v, across = Q[:, 0], Q[:, 1:]
    results = reconstructions(torch.outer(u, v), 100, block_rows=height)
    variance = torch.stack([(u @ ghat @ across).square().mean() for ghat in results]).mean()
    blocks = 1 if height is None else ROWS // height
    assert variance == pytest.approx(1 / (blocks * R), rel=0.15)
    assert (variance < 3 / COLUMNS) == (blocks >= 8)
    mean = torch.stack(results).mean(0)
    assert torch.sum(mean * torch.outer(u, v)) == pytest.approx(1, abs=0.15)  # unbiased


SHAPES = [(65, 96), (64, 96), (96, 65), (63, 96), (80, 64, 3, 3), (1, 4096), (130, 64)]  # rows beside 64, both ways


@pytest.mark.parametrize("height", [1, 32, 64, 65, "auto"])
@pytest.mark.parametrize("base", ["SeparateAdam", "Separate"])
def test_what_is_not_sent_is_owed_in_every_block(height, base):
    """e_t - e_(t-1) = (1 - beta) (g - ghat), in float32 on the default backend; heights beside numbers of rows."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    message = dict(projection="gaussian", ratio=8, ef_beta=0.9, reset_interval=None, block_rows=height, simulate=True)
    sgd = torch.optim.SGD([{"params": params, "compopt_compress": True}], lr=1.0)
    if base == "Separate":
        optimizer = compopt.Separate(sgd, **message)
    else:
        optimizer = compopt.SeparateAdam([{"params": params, "compress": True}], **message)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        before = [(p.detach().clone(), optimizer.state[p].get("residual", torch.zeros_like(p)).clone()) for p in params]
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw)
        optimizer.step()
        for p, (old, residuals) in zip(params, before, strict=True):
            change = optimizer.state[p]["residual"] - residuals
            assert change.norm() > 0.01 * p.grad.norm()
            if base == "Separate":
                torch.testing.assert_close(change, 0.1 * (p.grad - (old - p.detach())), rtol=1e-4, atol=1e-4)


def test_as_many_bytes_and_replicas_are_equal():
    sent, world = [], World(2)
    for height in (None, 48, 1):
        params = [[nn.Parameter(torch.ones(shape)) for shape in SHAPES] for _ in range(2)]
        optimizers = [
            compopt.SeparateAdam(local, projection="gaussian", block_rows=height, process_group=world.comms[rank])
            for rank, local in enumerate(params)
        ]
        for t in range(3):
            for rank, local in enumerate(params):
                for p in local:
                    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + rank))
            world.step(optimizers)
        assert all(torch.equal(*pair) for pair in zip(*params, strict=True))
        sent.append(optimizers[0].stats.bytes_sent)
    assert len({*sent}) == 1


def test_blocks_of_all_rows_are_one():
    draws = [reconstructions(torch.ones(ROWS, COLUMNS), 2, block_rows=height) for height in (None, ROWS, ROWS + 1)]
    for results in draws[1:]:
        assert all(map(torch.equal, draws[0], results))


@pytest.mark.parametrize(
    "options",
    [dict(projection="gaussian", block_rows=0), dict(projection="gaussian", block_rows="all"), dict(block_rows=8)],
)
def test_what_it_may_be(options):
    with pytest.raises(ValueError, match=r"block_rows must be None, 'auto' or, of a random projection, an integer"):
        compopt.SeparateAdam([nn.Parameter(torch.ones(64, 64))], **options)


def test_a_group_may_say_its_own_and_a_checkpoint_that_says_none_goes_on():
    params = [nn.Parameter(torch.ones(64, 96)) for _ in range(2)]
    groups = [{"params": params[:1], "block_rows": 8}, {"params": params[1:]}]
    optimizer = compopt.SeparateAdam(groups, projection="gaussian", simulate=True)
    assert [group["block_rows"] for group in optimizer.param_groups] == [8, None]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["block_rows"]  # as it was saved before there were blocks
    optimizer.load_state_dict(state)
    optimizer.step()
    assert {group["block_rows"] for group in optimizer.param_groups} <= {8, None}
