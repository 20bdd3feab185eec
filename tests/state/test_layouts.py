"""Layouts: how much each keeps of a tensor, and that the way into a state dict and back loses nothing."""

from __future__ import annotations

import pytest
import torch

from compopt._state.layouts import Bits, Layout, LocalShape, OnMask, PaddedVector, Sharded, TensorInfo

SHAPE, N = (3, 7), 21  # bits that are no whole bytes
MASK = torch.arange(N) % 3 == 1
PARAM = torch.zeros(SHAPE)
LAYOUTS: dict[str, tuple[Layout, int]] = {
    "dense": (LocalShape(torch.float32), N),
    "bits": (Bits(), 3),
    "on a mask": (OnMask(torch.float32, "mask"), int(MASK.sum())),
    "sharded": (Sharded(torch.float32), 9),
    "prefix": (PaddedVector(torch.float32, lambda p: p.shape[0] + 2), 5),
}
every = pytest.mark.parametrize("name", LAYOUTS)


def packed(mask: torch.Tensor) -> torch.Tensor:
    return Bits().compact(mask, TensorInfo(PARAM, True), {})


def kept(name: str, member: TensorInfo) -> torch.Tensor:
    """Some state, as it is kept."""
    layout, n = LAYOUTS[name]
    state = packed(MASK) if name == "bits" else torch.arange(1, n + 1).to(layout.dtype)
    return state.view(layout.stored_shape(member, state))


@every
def test_so_many_elements_are_kept(name):
    layout, n = LAYOUTS[name]
    held = torch.zeros(n) if name == "on a mask" else None
    assert layout.numel(TensorInfo(PARAM, True, (4, 13)), held) == n


@every
def test_into_a_state_dict_and_back_nothing_is_lost(name):
    layout, _ = LAYOUTS[name]
    member = TensorInfo(PARAM, True, (4, 13))
    state = kept(name, member)
    whole = layout.expand(state, member, {"mask": packed(MASK)})
    assert whole.shape == (() if name == "scalar" else SHAPE)
    compact = layout.compact(whole, member, {"mask": MASK.view(SHAPE)})
    assert compact.numel() == layout.expected_numel(compact, TensorInfo(PARAM, True), {"mask": packed(MASK)})
    assert torch.equal(layout.cut_shard(compact, member), state)
    again = layout.cut_shard(layout.compact(state, member, {"mask": packed(MASK)}), member)
    assert torch.equal(again, state)  # what is kept already stays as it is


def test_what_is_whole_lies_where_it_belongs():
    member = TensorInfo(PARAM, True, (4, 13))
    shard = LAYOUTS["sharded"][0].expand(kept("sharded", member), member, {}).view(-1)
    assert shard[:4].eq(0).all() and shard[13:].eq(0).all() and shard[4] == 1 and shard[12] == 9
    prefix = LAYOUTS["prefix"][0].expand(kept("prefix", member), member, {}).view(-1)
    assert prefix[:5].tolist() == [1, 2, 3, 4, 5] and prefix[5:].eq(0).all()
    momentum = LAYOUTS["on a mask"][0]
    whole = momentum.expand(kept("on a mask", member), member, {"mask": packed(MASK)}).view(-1)
    assert torch.equal(whole.ne(0), MASK) and whole[1] == 1
    assert torch.equal(Bits().expand(packed(MASK), member, {}).view(-1), MASK)


def test_a_momentum_of_what_is_not_compressed_and_a_shard_of_what_is_frozen_are_whole():
    momentum, plain = OnMask(torch.float32, "mask"), TensorInfo(PARAM, False)
    state = torch.rand(SHAPE)
    assert momentum.stored_shape(plain) == SHAPE and momentum.numel(plain, torch.zeros(99)) == N
    assert momentum.expand(state, plain, {}) is state and momentum.compact(state, plain, {}) is state
    shard = Sharded(torch.float32)
    assert shard.numel(plain) == N and shard.expand(state.view(-1), plain, {}).shape == SHAPE


def test_a_prefix_of_another_length_begins_anew():
    layout, n = LAYOUTS["prefix"]
    assert layout.cut_shard(torch.ones(n + 1), TensorInfo(PARAM, True)).tolist() == [0.0] * n
