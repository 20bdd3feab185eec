"""Rounding at its edges: every random number, many blocks; and the mean of ranks that send the same."""

from __future__ import annotations

import pytest
import torch
from test_quantized import answer, rounded

from compopt._wire import quantization
from compopt._wire.codec import QuantizedCodec
from compopt._wire.payload import Payload, Scratch
from compopt._wire.quantization import BLOCK_ROWS, ROW


def test_the_largest_of_a_row_is_exact_whatever_number_it_is_rounded_with():
    """c / (c / 127) may be a little above 127: with the largest of the random numbers it would round to 128."""
    for n in range(1, 60):
        c = torch.tensor(n / 7).exp()
        x = c.expand(BLOCK_ROWS, ROW).contiguous()
        got, _, _ = rounded(x, n)
        torch.testing.assert_close(got, x, rtol=1e-5, atol=0)


def test_blocks_and_steps_are_rounded_with_other_numbers():
    x = torch.full((2 * BLOCK_ROWS, ROW), 0.5)
    x[:, 0] = 100.0
    first, again, other = (rounded(x, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[:BLOCK_ROWS], first[BLOCK_ROWS:])


def same_on_all(x: torch.Tensor, ranks: int, seed: int, bits: int = 8) -> list[Payload]:
    made = []
    for _ in range(ranks):
        flat = torch.cat([torch.ones(5), x])
        made.append(Payload(flat, 3, 2, [len(x)], QuantizedCodec(bits), torch.empty(len(x)), (seed, 0)))
    answer(made)
    return made


def test_ranks_round_with_numbers_of_their_own():
    """Else what they drop would not cancel in the mean."""
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    first, second, third, _ = same_on_all(x, 4, 0)
    local = slice(768, 1024)  # the last rank's: the first three hold there what their own rounding took off
    assert not torch.equal(first.rounding_errors[local], second.rounding_errors[local])
    assert not torch.equal(second.rounding_errors[local], third.rounding_errors[local])


@pytest.mark.parametrize(("ranks", "bits"), [(2, 8), pytest.param(1, 4, marks=pytest.mark.slow), (3, 4)])
def test_the_mean_is_unbiased(ranks, bits):
    """Rounding twice with the same numbers would not be."""
    x = torch.randn(256, generator=torch.Generator().manual_seed(1))
    errors = torch.stack([same_on_all(x, ranks, seed, bits)[0].body - x for seed in range(600)])
    shifting = errors.std(0) > 0.3 * errors.std(0).max()  # what is hardly ever rounded is not normal after 600 times
    z = (errors.mean(0) / errors.std(0) * 600**0.5)[shifting]
    assert z.abs().max() < 5 and float(z.square().mean()) == pytest.approx(1, abs=0.35)


def test_scratch_memory_has_as_many_elements_as_are_asked_for():
    scratch, cpu = Scratch(), torch.device("cpu")
    sizes = [len(scratch("codes", n, torch.int8, cpu)) for n in (4, 9, 2, 9)]
    assert sizes == [4, 9, 2, 9]
    assert scratch("codes", 9, torch.int8, cpu).data_ptr() == scratch("codes", 2, torch.int8, cpu).data_ptr()
    assert scratch("codes", 9, torch.float32, cpu).dtype == torch.float32


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_device_rounds_all_rows_at_once_as_a_cpu_does_in_blocks(monkeypatch, blocks, more, bits):
    rows = blocks * BLOCK_ROWS + more
    x = torch.randn(rows, ROW, generator=torch.Generator().manual_seed(rows))

    def rounded() -> list[torch.Tensor]:
        quantized, scales, rest = torch.empty_like(x, dtype=torch.int8), torch.empty(rows), torch.empty_like(x)
        quantization.quantize_rows(x.clone(), (), quantized, scales, rest, (7, 1), Scratch(), bits)
        return [quantized, scales, rest]

    blocked = rounded()
    monkeypatch.setattr(quantization, "block_size", lambda block, x: len(x))
    assert all(torch.equal(a, b) for a, b in zip(blocked, rounded(), strict=True))
