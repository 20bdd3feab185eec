"""New state until all ranks have agreed: it is committed for tensors with a gradient, and dropped with its step."""

from __future__ import annotations

import pytest
import torch
from support.sim import Ranks
from torch import nn

import compopt
from compopt._state.next_state import NextValues, commit_next, read_next


def make_bucket():
    params = [nn.Parameter(torch.zeros(64, 64)) for _ in range(3)]
    (bucket,) = compopt.SeparateAdam(params, rank=2, simulate=True)._buckets
    return bucket


@pytest.mark.parametrize("given", [[True, True, True], [True, False, True], [False, False, False]])
def test_stacks_and_vectors_are_committed_where_any_rank_has_a_gradient(given):
    bucket = make_bucket()
    stack, vector = torch.randn(3, 64, 2), torch.randn(3 * 64 * 64)
    bucket.next["basis"] = [NextValues(range(3), stack)]
    bucket.next["exp_avg"] = [NextValues([0, 1, 2], vector)]
    assert torch.equal(read_next(bucket, 1)["basis"], stack[1])
    assert torch.equal(read_next(bucket, 2)["exp_avg"], vector[2 * 64 * 64 :])
    commit_next(bucket, given)
    for i, has_gradient in enumerate(given):
        expected = (
            [stack[i].flatten(), vector.view(3, 64, 64)[i]] if has_gradient else [torch.zeros(128), torch.zeros(64, 64)]
        )
        assert torch.equal(bucket.state["basis"][i], expected[0])
        assert torch.equal(bucket.state["exp_avg"][i], expected[1])
    assert bucket.next == {}


def test_memory_of_the_step_changes_places_with_that_of_the_state():
    bucket = make_bucket()
    new = bucket.get_memory("new exp_avg", 3 * 64 * 64, torch.float32).fill_(7.0)
    before = bucket.flat["exp_avg"]
    bucket.next["exp_avg"] = [NextValues([0, 1, 2], new, may_swap=True)]
    commit_next(bucket, [True] * 3)
    assert bucket.flat["exp_avg"].data_ptr() == new.data_ptr() and bucket.state["exp_avg"][2].eq(7).all()
    assert bucket.get_memory("new exp_avg", 3 * 64 * 64, torch.float32).data_ptr() == before.data_ptr()


@pytest.mark.parametrize(
    "name, make, ends",
    [("basis", compopt.SeparateAdam, "skipped"), ("exp_avg", compopt.TagcAdamW, "failed")],
)
def test_a_step_that_is_not_applied_leaves_none(name, make, ends):
    """A gradient is not finite, or the gather of updated parameters fails."""
    ranks = Ranks(2, lambda: nn.Linear(128, 64), lambda params, **options: make(params, dense_steps=0, **options))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = float("nan") if step and rank and ends == "skipped" else 1.0 + rank
        return model(torch.full((4, 128), x)).square().mean()

    ranks.train(loss, 1)
    buckets = [bucket for optimizer in ranks.optimizers for bucket in optimizer._buckets]
    before = [bucket.flat[name].clone() for bucket in buckets]
    if ends == "skipped":
        ranks.train(loss, 1)
    else:
        ranks.world.failing_everywhere = {ranks.world.comms[0].started + 3}  # after index, payload, norm
        with pytest.raises(compopt.CommunicationError):
            ranks.train(loss, 1)
    for bucket, stored in zip(buckets, before, strict=True):
        assert bucket.next == {} and torch.equal(bucket.flat[name], stored) and stored.any()
