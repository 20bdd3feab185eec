"""Masks: dealing to ranks, thresholds, bits and the code on the wire."""

from __future__ import annotations

import math

import pytest
import torch

from compopt import _masks, _math, _selection

LENGTHS = (4096, 0, 70 * 80 + 3, 100_003, 17)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def owned(part: _masks.Part, seed: int = 0) -> torch.Tensor:
    """Flags of a range, as many of each piece as are wanted."""
    flags = torch.zeros(8 * (part.last - part.first), dtype=torch.bool)
    for piece in part.pieces:
        n = piece.stop - piece.start
        flags[piece.at + torch.randperm(n, generator=generator(seed))[: piece.wanted]] = True
    return flags


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("density", [0.5, 0.1, 0.01, 1e-5])
def test_every_element_is_dealt_once_and_evenly_and_k_adds_up(ranks, density):
    parts = _selection.deal(LENGTHS, ranks, density).parts
    for i, n in enumerate(LENGTHS):
        pieces = [piece for part in parts for piece in part.pieces if piece.tensor == i]
        assert sum(piece.stop - piece.start for piece in pieces) == n
        assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
        if n:
            assert sum(piece.wanted for piece in pieces) == max(1, round(density * n))
    sizes = [part.last - part.first for part in parts]
    assert sum(sizes) == sum(math.ceil(n / 8) for n in LENGTHS)
    assert max(sizes) - min(sizes) <= 2 * _masks.WORD


@pytest.mark.parametrize("n", [8, 64, 1000 * 8])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_bits_flags_and_positions(n, density):
    flags = torch.rand(n, generator=generator(n)) < density
    bits = _math.pack_bits(flags)
    assert torch.equal(_masks.bits_of(flags.clone()), bits)
    assert torch.equal(_masks.flags_of(bits), flags)
    assert torch.equal(_masks.positions_of(bits), flags.nonzero().view(-1))
    again = torch.full_like(bits, 255)
    _masks.set_bits_(again, flags.nonzero().view(-1))
    assert torch.equal(again, bits)


def test_every_bit_of_a_word_is_found():
    for place in range(64):
        flags = torch.zeros(128, dtype=torch.bool)
        flags[[place, 127]] = True
        assert _masks.positions_of(_math.pack_bits(flags)).tolist() == sorted({place, 127})


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
@pytest.mark.parametrize("density", [0.5, 0.2, 0.1, 0.01, 1e-4])
def test_what_the_ranks_send_is_what_all_assemble(ranks, density):
    deal = _selection.deal(LENGTHS, ranks, density)
    flags = [owned(part, rank) for rank, part in enumerate(deal.parts)]
    messages = [_masks.encode(_masks.bits_of(f.clone()), deal, rank) for rank, f in enumerate(flags)]
    assert {len(message) for message in messages} == {deal.length}
    bits, positions = _masks.assemble(torch.stack(messages), deal)
    whole = torch.cat(flags)
    assert torch.equal(bits, _math.pack_bits(whole)) and torch.equal(positions, whole.nonzero().view(-1))
    local = _masks.per_tensor(positions, LENGTHS)
    start = 0
    for n, index in zip(LENGTHS, local, strict=True):
        if n:
            assert index.dtype == torch.int32 and torch.equal(index.long(), whole[start : start + n].nonzero().view(-1))
        else:
            assert index is None
        start += n + -n % 8


@pytest.mark.parametrize("density", [0.3, 0.1, 0.03, 0.01, 0.001])
def test_the_code_is_the_smaller_and_near_the_entropy(density):
    size = 2 * _selection.deal((10_000_000,), 2, density).length
    entropy = -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) * 10_000_000 / 8
    assert entropy < size <= 10_000_064 / 8
    if density < 0.2:
        assert size < 1.05 * 1.12 * entropy  # room for 5 % more elements, and 12 % for the code


def test_as_many_as_may_ever_be_selected_fit():
    deal = _selection.deal((200_000,), 2, 0.01)
    part = deal.parts[1]
    flags = torch.zeros(8 * (part.last - part.first), dtype=torch.bool)
    flags[-part.most :] = True  # the highest positions have the longest code
    message = _masks.encode(_masks.bits_of(flags.clone()), deal, 1)
    assert torch.equal(_masks.decode(message, part), flags.nonzero().view(-1))


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
@pytest.mark.parametrize("guess", [0.0, 1e-9, 2.0, 1e9])
def test_a_sampled_threshold_selects_the_largest_within_5_percent(name, density, guess):
    x = DISTRIBUTIONS[name](generator(3))
    k, flags = round(density * len(x)), torch.empty(len(x), dtype=torch.bool)
    t = _selection.select(x, k, "sampled", guess, flags, torch.empty_like(x))
    count = int(flags.sum())
    nonzero = int(x.count_nonzero())
    assert abs(count - k) <= 0.05 * k or (count == nonzero < k)
    assert x[flags].abs().min() >= x[~flags].abs().max()
    again = torch.empty_like(flags)
    _selection.select(x, k, "sampled", t, again, torch.empty_like(x))  # what it returns is a guess for the next step
    assert abs(int(again.sum()) - k) <= 0.05 * k or int(again.sum()) == nonzero < k


def test_exact_takes_k_and_small_tensors_are_always_exact():
    x = torch.randn(5000, generator=generator(1))
    for how in ("exact", "sampled"):
        flags = torch.empty(5000, dtype=torch.bool)
        _selection.select(x, 77, how, 0.0, flags, torch.empty_like(x))
        assert set(flags.nonzero().view(-1).tolist()) == set(x.abs().topk(77).indices.tolist())


def test_gradients_that_are_not_finite_select_something_all_the_same():
    for bad in (math.nan, math.inf):
        x = torch.randn(50_000, generator=generator(2))
        x[:40_000] = bad
        flags = torch.empty(50_000, dtype=torch.bool)
        _selection.select(x, 500, "sampled", 0.0, flags, torch.empty_like(x))
        assert 475 <= int(flags.sum()) <= 525
