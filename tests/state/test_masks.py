"""Masks: dealing to ranks, thresholds, bits and the code on the wire."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import kernels as reference

from compopt._state import bits as _bits
from compopt._state import masks
from compopt._wire.payload import Scratch

select_above = _bits.select_above
LENGTHS = (4096, 0, 70 * 80 + 3, 100_003, 17)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def owned(shard: masks.SelectionRange, seed: int = 0) -> torch.Tensor:
    """Flags of a range, as many of each piece as are wanted."""
    flags = torch.zeros(8 * shard.nbytes, dtype=torch.bool)
    for piece in shard.slices:
        n = piece.stop - piece.start
        flags[piece.first_bit + torch.randperm(n, generator=generator(seed))[: piece.k]] = True
    return flags


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("density", [0.5, 0.1, 0.01, 1e-5])
def test_every_element_is_dealt_once_and_evenly_and_k_adds_up(ranks, density):
    shards = masks.partition_mask(LENGTHS, ranks, density).by_rank
    for i, n in enumerate(LENGTHS):
        pieces = [piece for shard in shards for piece in shard.slices if piece.tensor == i]
        assert sum(piece.stop - piece.start for piece in pieces) == n
        assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
        if n:
            assert sum(piece.k for piece in pieces) == max(1, round(density * n))
    assert all(shard.first_byte % 8 == 0 for shard in shards), "ranges begin at whole words of 64 elements"
    sizes = [shard.nbytes for shard in shards]
    assert sum(sizes) == sum(math.ceil(n / 8) for n in LENGTHS)
    assert max(sizes) - min(sizes) <= 2 * _bits.WORD


@pytest.mark.parametrize("n", [8, 64, 1000 * 8])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_bits_flags_and_positions(n, density):
    flags = torch.rand(n, generator=generator(n)) < density
    bits = reference.pack_bits(flags)
    assert torch.equal(_bits.pack_bits(flags.clone()), bits)
    assert torch.equal(_bits.unpack_bits(bits), flags)
    assert torch.equal(_bits.find_positions(bits), flags.nonzero().view(-1))
    again = torch.full_like(bits, 255)
    _bits.set_bits_(again, flags.nonzero().view(-1))
    assert torch.equal(again, bits)


def test_every_bit_of_a_word_is_found():
    for place in range(64):
        flags = torch.zeros(128, dtype=torch.bool)
        flags[[place, 127]] = True
        assert _bits.find_positions(reference.pack_bits(flags)).tolist() == sorted({place, 127})


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
@pytest.mark.parametrize("density", [0.5, 0.2, 0.1, 0.01, 1e-4])
def test_what_the_ranks_send_is_what_all_assemble(ranks, density):
    partition = masks.partition_mask(LENGTHS, ranks, density)
    flags = [owned(shard, rank) for rank, shard in enumerate(partition.by_rank)]
    owns = [f.nonzero().view(-1) for f in flags]
    messages = [masks.encode_mask(owns[r], _bits.pack_bits(f.clone()), partition, r) for r, f in enumerate(flags)]
    assert {len(message) for message in messages} == {partition.message_bytes}
    bits, positions = masks.assemble_mask(torch.stack(messages), partition, ranks - 1, owns[-1])
    whole = torch.cat(flags)
    assert torch.equal(bits, reference.pack_bits(whole)) and torch.equal(positions, whole.nonzero().view(-1))
    local = _bits.split_positions(positions, LENGTHS)
    start = 0
    for n, index in zip(LENGTHS, local, strict=True):
        if n:
            assert index.dtype == torch.int32 and torch.equal(index.long(), whole[start : start + n].nonzero().view(-1))
        else:
            assert index is None
        start += n + -n % 8


@pytest.mark.parametrize("density", [0.3, 0.1, 0.03, 0.01, 0.001])
def test_the_code_is_the_smaller_and_near_the_entropy(density):
    size = 2 * masks.partition_mask((10_000_000,), 2, density).message_bytes
    entropy = -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) * 10_000_000 / 8
    assert entropy < size <= 10_000_064 / 8
    if density < 0.2:
        assert size < 1.12 * entropy


def test_as_many_as_may_ever_be_selected_fit():
    partition = masks.partition_mask((200_000,), 2, 0.01)
    shard = partition.by_rank[1]
    flags = torch.zeros(8 * shard.nbytes, dtype=torch.bool)
    most = sum(piece.k for piece in shard.slices)
    assert shard.k == most
    flags[-most:] = True  # the highest positions have the longest code
    message = masks.encode_mask(flags.nonzero().view(-1), _bits.pack_bits(flags.clone()), partition, 1)
    assert torch.equal(masks.decode_positions(message, shard), flags.nonzero().view(-1))


DISTRIBUTIONS = {
    "normal": lambda g: torch.randn(100_000, generator=g),
    "heavy tails": lambda g: torch.randn(100_000, generator=g) / torch.rand(100_000, generator=g),
    "scales of 20 orders": lambda g: 10 ** (20 * torch.rand(100_000, generator=g) - 10),
    "two lumps": lambda g: torch.cat([torch.ones(90_000), 1e6 + torch.rand(10_000, generator=g)]),
    "all equal": lambda g: torch.full((100_000,), -2.0),
    "mostly 0": lambda g: torch.randn(100_000, generator=g) * (torch.rand(100_000, generator=g) < 0.15),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("density", [0.3, 0.1, 0.01])
def test_the_largest_are_selected_and_none_of_the_zeros_where_fewer_are_nonzero(name, density):
    x = DISTRIBUTIONS[name](generator(3))
    k, nonzero = round(density * len(x)), int(x.count_nonzero())
    chosen = _bits.select_top_k(x, k, Scratch())
    assert len(chosen) == k or (len(chosen) == nonzero < k and density < 0.25) or density > 0.25
    assert torch.equal(chosen, chosen.unique())
    rest = torch.ones(len(x), dtype=torch.bool).index_fill_(0, chosen, False)
    assert x[chosen].abs().min() >= x[rest].abs().max()


def test_small_tensors_and_large_ones_give_k():
    for n in (5000, 16_384, 16_385, 100_000):
        x = torch.randn(n, generator=generator(1))
        for k in (77, 1001, 2500, 4 * n // 5):  # of many a sample would tell the threshold well enough
            assert _bits.select_top_k(x, k, Scratch()).tolist() == sorted(x.abs().topk(k).indices.tolist())


def only_where_sampled(g: torch.Generator) -> torch.Tensor:
    """Large where a sample looks, small elsewhere: the first threshold lets too few through."""
    x = torch.rand(100_000, generator=g)
    x[:: 100_000 // 4096] += 100
    return x


SEARCHED = {name: DISTRIBUTIONS[name] for name in ("normal", "heavy tails", "mostly 0")} | {
    "negative": lambda g: -torch.rand(100_000, generator=g),
    "only where sampled": only_where_sampled,
}


@pytest.mark.parametrize("name", SEARCHED)
def test_few_looks_are_enough(name, monkeypatch):
    x, looks, topk = SEARCHED[name](generator(5)), [], torch.Tensor.topk

    def of_few(self: torch.Tensor, *rest: int, **options: bool) -> tuple:
        assert len(self) < len(x), "no threshold told, and topk decided over all elements"
        return topk(self, *rest, **options)

    monkeypatch.setattr(_bits, "select_above", lambda x, *rest: looks.append(len(x)) or select_above(x, *rest))
    monkeypatch.setattr(torch.Tensor, "topk", of_few)  # of a sample it finds the threshold to look at
    for k in (300, 3000, 10_000):
        looks.clear()
        assert len(_bits.select_top_k(x, k, Scratch())) == k
        assert looks.count(len(x)) <= (10 if name == "only where sampled" else 3)


def test_a_share_of_nothing_is_nothing_and_of_anything_at_least_one():
    assert [masks.selection_size(0.4, n) for n in (0, 1, 2, 10)] == [0, 1, 1, 4]
    assert masks.selection_size(1e-6, 10) == 1 and masks.selection_size(1.0, 10) == 10


def test_shared_elements_are_counted_one_by_one():
    flags = torch.rand(1000, generator=generator(6)) < 0.3
    others = torch.rand(1000, generator=generator(7)) < 0.3
    bits, positions = reference.pack_bits(flags), others.nonzero().view(-1)
    for dtype in (torch.int32, torch.int64):
        assert int(_bits.count_set_bits(bits, positions.to(dtype))) == int((flags & others).sum())


def test_gradients_that_are_not_finite_select_something_all_the_same():
    for bad in (math.nan, math.inf):
        x = torch.randn(50_000, generator=generator(2))
        x[:40_000] = bad
        assert len(_bits.select_top_k(x, 500, Scratch())) == 500
