"""int4 payloads by their definition: how codes lie in bytes and in messages, beside every length that matters."""

from __future__ import annotations

import pytest
import torch
from test_quantized import answer, payloads

from compopt._wire.codec import QuantizedMean
from compopt._wire.quantization import ROW, count_rows, pack_int4, packed_bytes, unpack_int4

LENGTHS = [0, 1, 2, 3, 127, 128, 129, 255, 65535, 65536, 65537]
every_length = pytest.mark.parametrize("n", LENGTHS)


def decoded(packed: torch.Tensor, n: int) -> torch.Tensor:
    """A byte is a code of the first half + 16 times one of the second, each in -7 to 7."""
    first, second = [], []
    for byte in packed.tolist():
        low = (byte + 7) % 16 - 7
        first.append(low)
        second.append((byte - low) // 16)
    return torch.tensor([*first, *second][:n], dtype=torch.int8)


@every_length
def test_two_codes_lie_in_a_byte(n):
    quantized = torch.randint(-7, 8, (n,), dtype=torch.int8, generator=torch.Generator().manual_seed(n))
    packed = torch.full((packed_bytes(n, 4),), 99, dtype=torch.int8)
    assert len(packed) == (n + 1) // 2
    pack_int4(quantized, packed)
    assert torch.equal(decoded(packed, n), quantized)
    assert torch.equal(unpack_int4(packed, torch.full((n,), 99, dtype=torch.int8)), quantized)


def test_every_pair_of_codes():
    first, second = torch.cartesian_prod(*2 * [torch.arange(-7, 8, dtype=torch.int8)]).t()
    quantized, packed = torch.cat([first, second]), torch.empty(225, dtype=torch.int8)
    pack_int4(quantized, packed)
    assert len(packed.unique()) == 225 and torch.equal(unpack_int4(packed, torch.empty_like(quantized)), quantized)


def arrived(message: torch.Tensor, mean: QuantizedMean, number: int) -> torch.Tensor:
    """The values of one chunk in a first message, read by its definition: words, scales, bytes."""
    chunk, words = mean.layout.chunks[number], mean.fields
    numbers = message[: 4 * (words + mean.layout.max_rows)].view(torch.float32)
    n = chunk.stop - chunk.start
    quantized = decoded(message[4 * (words + mean.layout.max_rows) :].view(torch.int8)[: packed_bytes(n, 4)], n)
    values = torch.empty(n)
    for at, row, length in chunk.spans:
        scales = numbers[words + row : words + row + count_rows(length)].repeat_interleave(ROW)[:length]
        values[at : at + length] = quantized[at : at + length] * scales
    return values


@pytest.mark.parametrize("ranks", [2, 3, 4])
@every_length
def test_what_a_message_says_and_what_was_dropped_are_what_was_meant(n, ranks):
    lengths = [n, 5, 130]
    payload = payloads(1, lengths, bits=4)[0]
    meant = payload.body.clone()
    mean = QuantizedMean(payload, ranks - 1, ranks)
    sent = mean.encode_for_owners()
    got = torch.cat([arrived(message, mean, number) for number, message in enumerate(sent)])
    torch.testing.assert_close(got + payload.rounding_errors, meant)
    largest = torch.cat(
        [row.abs().max().repeat(len(row)) for part in meant.split(lengths) for row in part.split(ROW) if len(row)]
    )
    assert bool((payload.rounding_errors.abs() <= 1.001 * largest / 7).all()), "less than one step of the scale"


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_not_finite_spoils_its_row_and_no_other(ranks, bad):
    """Though its codes share bytes with those of other rows."""
    sent, clean = payloads(ranks, [1000], bits=4), payloads(ranks, [1000], bits=4)
    sent[0].body[300] = bad
    answer(sent)
    answer(clean)
    row = torch.zeros(1000, dtype=torch.bool)
    row[256:384] = True
    for a, b in zip(sent, clean, strict=True):
        assert a.body[row].isnan().all()
        assert torch.equal(a.body[~row], b.body[~row])


def test_the_same_seed_gives_the_same_bits_whatever_the_threads_and_defaults(monkeypatch):
    def mean() -> torch.Tensor:
        sent = payloads(3, [70_001, 300], bits=4)
        answer(sent)
        return torch.cat([sent[0].flat, *(payload.rounding_errors for payload in sent)])

    before, threads = mean(), torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 3)
        torch.set_default_dtype(torch.float64)
        assert torch.equal(mean().float(), before)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
