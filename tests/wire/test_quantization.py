"""int8, int4 and int2 payloads: codes by their definition, rounding alone and at its edges, means, what is owed."""

from __future__ import annotations

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import conformance
import pytest
import test_conformance as steps
import test_conformance_faults as faults
import test_conformance_saving as saving
import torch
from pairs import pairs
from problems import replicas, step
from ranks import run_ranks
from sim import Ranks, World
from slow_rows import slow_but
from table import CASES, Case, by_name
from torch import nn

import compopt
from compopt._wire import quantization
from compopt._wire.codec import QuantizedCodec, QuantizedMean
from compopt._wire.collectives import count_bytes
from compopt._wire.payload import Payload, Scratch
from compopt._wire.quantization import (
    BLOCK_ROWS,
    ROW,
    RowSpan,
    count_rows,
    dequantize_rows,
    pack_int2,
    pack_int4,
    packed_bytes,
    quantize_rows,
    row_layout,
    rows_to_values,
    unpack_int2,
    unpack_int4,
    values_to_rows,
)
from compopt._wire.requests import AllReduceMean

CASES_OF = {
    payload: [
        dataclasses.replace(case, compressed={**case.compressed, "payload_dtype": payload})
        for case in CASES
        if case.cls is not compopt.TagcAdamW  # what it sends has to be exact
        if "payload_dtype" in case.bad or case.build
    ]
    for payload in ("int8", "int4")
}
INT2 = [  # where all is owed
    dataclasses.replace(case, compressed={**case.compressed, "payload_dtype": "int2"})
    for case in CASES_OF["int8"]
    if case.cls in (compopt.Average, compopt.LocalSteps)
]
# every second class with each payload
of_half = pytest.mark.parametrize(
    "case",
    [*CASES_OF["int8"][::2], *CASES_OF["int4"][1::2], INT2[0]],
    ids=lambda case: f"{case.name}, {case.compressed['payload_dtype']}",
)
MAIN = "RadiusAdamW", "SeparateAdam"
of_some = pytest.mark.parametrize(
    "case",
    slow_but(
        lambda case: case.name in ("RadiusAdamW", "SeparateAdam"), [*CASES_OF["int8"][::2], *CASES_OF["int4"][1::2]]
    )
    + [INT2[0]],
    ids=lambda case: f"{case.name}, {case.compressed['payload_dtype']}",
)
of_bits = pytest.mark.parametrize("bits", [8, 4])


def rounded(x: torch.Tensor, *seed: int, bits: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows of x as they arrive, their scales, and the rounding errors."""
    quantized, scales, rounding_errors = (
        torch.empty(x.shape, dtype=torch.int8),
        torch.empty(len(x)),
        torch.empty_like(x),
    )
    quantize_rows(x, (), quantized, scales, rounding_errors, seed, Scratch(), bits)
    assert int(quantized.abs().max()) == 2 ** (bits - 1) - 1, "the largest of a row is the largest code"
    return dequantize_rows(quantized, scales, torch.empty_like(x), bits), scales, rounding_errors


@of_bits
def test_rounding_is_unbiased_and_misses_by_less_than_a_unit(bits):
    x = torch.randn(6, ROW, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 6).unsqueeze(1)
    errors = []
    for seed in range(800):
        got, scales, rounding_errors = rounded(x, seed, bits=bits)
        errors.append((got - x) / scales.unsqueeze(1))
        assert ((got + rounding_errors - x).abs() <= 2e-7 * x.abs().amax(1, keepdim=True)).all()
    errors = torch.stack(errors)
    assert errors.abs().max() < 1.001
    shifting = errors.std(0) > 1e-2  # the largest of a row is exact
    z = (errors.mean(0) / errors.std(0) * 800**0.5)[shifting]
    assert z.abs().max() < 5 and float(z.square().mean()) == pytest.approx(1, abs=0.2)
    assert errors.mean(0)[~shifting].abs().max() < 1e-3


@of_bits
def test_rows_out_of_the_ordinary(bits):
    tiny = torch.finfo(torch.float32).tiny
    x = torch.zeros(6, ROW)
    x[1, 5], x[1, 6] = 3e38, 1.0  # one huge value
    x[2], x[3] = tiny / 4, 0.8 * 2 ** (bits - 1) * tiny  # denormals; normal, but too small for a scale
    x[4] = torch.linspace(-1, 1, ROW)
    x[4, 7] = float("inf")
    x[5, 9] = float("nan")
    got, scales, rounding_errors = rounded(x, 0, bits=bits)
    assert not got[0].any() and not rounding_errors[0].any()
    assert got[1, 5] == pytest.approx(3e38, rel=1e-5) and got[1].isfinite().all() and scales[1] > 2e36
    for row in (2, 3):
        assert not got[row].any() and torch.equal(rounding_errors[row], x[row])
    assert got[4].isnan().all() and got[5].isnan().all()
    wide, *_ = rounded(x.double() * 1e30, 0, bits=bits)
    assert wide[1].isnan().all(), "beyond float32 it is not finite"


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("lengths", [(), (0, 1), (128, 256), (5, 300, 0, 1, 127, 1000), (100_000,)], ids=str)
def test_chunks_hold_every_value_once_in_rows_of_one_tensor(lengths, ranks):
    whole = row_layout(lengths, ranks)
    n, flat = sum(lengths), torch.arange(float(sum(lengths)))
    assert whole.rows == sum(map(count_rows, lengths)) == sum(chunk.rows for chunk in whole.chunks)
    assert [chunk.start for chunk in whole.chunks[1:]] + [n] == [chunk.stop for chunk in whole.chunks]
    assert whole.max_values <= n / ranks + ROW
    rows = values_to_rows(flat, whole.spans, whole.rows, "test", Scratch()).clone()
    back = torch.empty(n)
    for chunk in whole.chunks:
        local = rows[chunk.first_row : chunk.first_row + chunk.rows].clone()
        again = values_to_rows(flat[chunk.start : chunk.stop], chunk.spans, chunk.rows, "other", Scratch())
        assert torch.equal(local, again)
        rows_to_values(local, chunk.spans, back[chunk.start : chunk.stop])
    assert torch.equal(back, flat)


def payloads(ranks: int, lengths: list[int], dtype: torch.dtype = torch.float32, bits: int = 8) -> list[Payload]:
    made = []
    for rank in range(ranks):
        flat = torch.randn(5 + sum(lengths), generator=torch.Generator().manual_seed(rank), dtype=dtype)
        rounding_errors = torch.empty(sum(lengths), dtype=dtype)
        made.append(Payload(flat, 3, 2, lengths, QuantizedCodec(bits), rounding_errors, (4, 0)))
    return made


def answer(sent: list[Payload]) -> None:
    """As the simulator does."""
    world = World(len(sent))
    for comm, payload in zip(world.comms, sent, strict=True):
        comm.start(AllReduceMean(payload))


@pytest.mark.parametrize(
    ("bits", "n", "dtype", "ranks"),
    pairs([8, 4], [0, 1, 127, 129, 1000, 65537], [torch.float32, torch.float64], [1, 2, 3, 5]),
)
def test_the_mean_and_what_was_dropped_are_what_was_sent(ranks, dtype, n, bits):
    lengths = [n, 3, 0, 640]
    sent = payloads(ranks, lengths, dtype, bits)
    meant = torch.stack([payload.flat.clone() for payload in sent]).mean(0)
    answer(sent)
    assert all(torch.equal(payload.flat, sent[0].flat) for payload in sent)
    torch.testing.assert_close(sent[0].flat[:5], meant[:5].float().to(dtype))
    lost = torch.stack([payload.rounding_errors for payload in sent]).mean(0)
    torch.testing.assert_close(sent[0].body + lost, meant[5:], rtol=1e-6, atol=1e-6)
    assert 0 < lost.abs().max() < 12.7 / 2 ** (bits - 1)


def test_words_travel_in_float32_and_are_averaged_in_the_payloads_dtype():
    sent = payloads(3, [256], torch.float64)
    message = torch.tensor([[1.0, 0.1], [0.0, 0.1], [0.0, 1e8]], dtype=torch.float64)
    for payload, words in zip(sent, message, strict=True):
        payload.control.copy_(words)
    answer(sent)
    wanted = message.float().double().sum(0) / 3
    assert all(torch.equal(payload.control, wanted) for payload in sent)


@of_bits
def test_bytes(bits):
    (payload,) = payloads(1, [100_000, 301], bits=bits)
    scales, quantized = 4 * (count_rows(100_000) + count_rows(301)), {8: 100_301, 4: 50_151}
    assert (
        count_bytes(AllReduceMean(payload)) == quantized[bits] + scales + 4 * 5
    )  # header and control words are float32


def real_mean(rank: int, bits: int) -> list[list[float]]:
    from compopt._wire.collectives import Communicator

    payload = payloads(3, [1000, 3, 0, 640], bits=bits)[rank]
    pending = Communicator().start(AllReduceMean(payload))
    pending.wait().wait()
    return [payload.flat.tolist(), payload.rounding_errors.tolist()]


@of_bits
def test_real_ranks_give_the_simulators_bits(bits):
    sent = payloads(3, [1000, 3, 0, 640], bits=bits)
    answer(sent)
    assert run_ranks(real_mean, 3, bits) == [
        [payload.flat.tolist(), payload.rounding_errors.tolist()] for payload in sent
    ]


HOLDS = {
    "replicas": lambda case: steps.test_replicas_are_equal_to_the_bit_after_every_step(case, 3),
    "inf": lambda case: faults.test_a_bad_gradient_on_one_rank_makes_all_skip_and_changes_nothing(
        case, (float("inf"), 4)
    ),
    "failure": lambda case: faults.test_a_collective_that_fails_changes_nothing(case, 5),
    "absent": steps.test_no_gradient_on_one_rank_counts_as_zeros,
    "resumed": lambda case: saving.test_resumed_on_the_same_ranks_it_continues_to_the_bit(case, 7),
    "consolidated": saving.test_consolidated_it_resumes_on_any_number_of_ranks_with_the_mean_residual,
    "shapes": steps.test_strange_shapes_and_layouts,
    "copies": saving.test_deepcopy_and_pickle_continue_alike,
}


@pytest.mark.parametrize("holds", HOLDS)
@pytest.mark.parametrize(("bits", "name"), [("int8", "RadiusAdamW"), ("int4", "SeparateAdam")])
def test_conformance_holds(bits, name, holds):
    """Of one class that keeps what is rounded off by masks and one that projects; Average's line has int8 anyway."""
    HOLDS[holds](next(case for case in CASES_OF[bits] if case.name == name))


def losses_and_bytes(case: Case, **options) -> tuple[list[float], int, Ranks]:
    ranks = conformance.make_ranks(case, 2, **options)
    losses, stats = ranks.train(conformance.loss, 39), ranks.optimizers[0].stats
    return losses, getattr(stats, "payload_bytes", stats.bytes_sent), ranks


@functools.cache
def full_losses_and_bytes(name: str) -> tuple[list[float], int]:
    """One run for all payloads that are compared with it."""
    return losses_and_bytes(by_name[name], payload_dtype=None)[:2]


@of_some
def test_a_quarter_or_an_eighth_of_the_bytes_and_nearly_the_same_run(case):
    wanted, before = full_losses_and_bytes(case.name)
    got, sent, small = losses_and_bytes(case)
    words = sum(len(bucket.params) + len(bucket.control.numbers) for bucket in small.optimizers[0]._buckets)
    share, off = {"int8": (0.27, 0.02), "int4": (0.145, 0.02), "int2": (0.09, 0.1)}[case.compressed["payload_dtype"]]
    assert sent <= share * before + 4 * words, "header and control words stay float32"
    assert sum(got[-10:]) == pytest.approx(sum(wanted[-10:]), rel=off)


def test_the_dtype_may_change_between_steps():
    for case in CASES_OF["int8"]:
        ranks = conformance.make_ranks(case, 3, payload_dtype=None)
        for dtype in (torch.int8, None, "int4", torch.int8, "int4"):
            for optimizer in ranks.optimizers:
                optimizer.option_groups[0]["payload_dtype"] = dtype
            ranks.train(conformance.loss, 5)
            ranks.assert_replicas_equal()


def test_two_optimizers_in_two_threads_do_not_share_memory():
    def train(seed: int) -> torch.Tensor:
        p = nn.Parameter(torch.zeros(300, 1001))
        optimizer = compopt.SeparateAdam([p], lr=1e-2, projection="gaussian", ratio=1, payload_dtype=torch.int8)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(6):
            p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        return p.detach()

    single = [train(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(train, range(2)))
    for a, b in zip(single, together, strict=True):
        assert torch.equal(a, b), f"off by up to {float((a - b).abs().max())}"


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


@pytest.mark.parametrize(("ranks", "bits"), slow_but(lambda *row: row == (3, 4), [(2, 8), (1, 4), (3, 4)]))
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
    monkeypatch.setattr(quantization, "choose_block_size", lambda x, on_cpu: len(x))
    assert all(torch.equal(a, b) for a, b in zip(blocked, rounded(), strict=True))


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


def by_definition(x: torch.Tensor) -> torch.Tensor:
    """Return one row of x as it arrives."""
    x = x.double()
    level = torch.where(x.abs() >= x.square().mean().sqrt(), 3.0, 1.0).double() * torch.where(x < 0, -1.0, 1.0)
    return (x @ level) / (level @ level) * level


def rounded_of_int2(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows of x as they arrive, the quantized values, and the rounding errors."""
    quantized, scales, rounding_errors = (
        torch.empty(x.shape, dtype=torch.int8),
        torch.empty(len(x)),
        torch.empty_like(x),
    )
    quantize_rows(x, (RowSpan(0, 0, x.numel()),), quantized, scales, rounding_errors, (), Scratch(), 2)
    return dequantize_rows(quantized, scales, torch.empty_like(x), 2), quantized, rounding_errors


def gaussian(rows: int) -> torch.Tensor:
    return torch.randn(rows, ROW, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("rows", [1, 511, 512, 513])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_levels_and_scales_are_those_of_the_definition(rows, dtype):
    x = (gaussian(rows) * torch.logspace(-20, 20, rows).unsqueeze(1)).to(dtype)
    got, quantized, rounding_errors = rounded_of_int2(x)
    wanted = torch.stack([by_definition(row) for row in x])
    assert set(quantized.unique().tolist()) == {-3, -1, 1, 3}
    near = x.abs() - x.double().square().mean(1, keepdim=True).sqrt()  # a last bit may decide which level it is
    clear = (near.abs() > 1e-5 * x.abs()).all(1)
    assert clear.float().mean() > 0.9
    torch.testing.assert_close(got[clear].double(), wanted[clear], rtol=1e-5, atol=0)
    assert ((got + rounding_errors - x).abs() <= 2e-7 * x.abs().amax(1, keepdim=True)).all()


def test_little_of_a_normal_row_is_taken_off_and_never_more_than_there_is():
    x = gaussian(1000)
    _, _, rounding_errors = rounded_of_int2(x)
    assert float(rounding_errors.square().sum() / x.square().sum()) == pytest.approx(0.1175, abs=0.003)
    odd = torch.zeros(5, ROW)
    odd[0, 3], odd[1, :64], odd[2], odd[3, ::2] = 7.0, 1.0, torch.logspace(-30, 30, ROW), -1.0
    odd[4] = 5.0
    _, _, rounding_errors = rounded_of_int2(odd)
    assert (rounding_errors.double().norm(dim=1) <= odd.double().norm(dim=1)).all()
    assert rounding_errors[4].abs().max() < 1e-5, "equal values are exact"


def test_rows_out_of_the_ordinary_in_int2():
    tiny = torch.finfo(torch.float32).tiny
    x = torch.zeros(6, ROW)
    x[1, 5], x[1, 6] = 3e38, 1.0
    x[2], x[3] = tiny / 4, 0.1 * tiny * torch.arange(ROW)
    x[4, 7], x[5, 9] = float("inf"), float("nan")
    got, _, rounding_errors = rounded_of_int2(x)
    assert not got[0].any() and not rounding_errors[0].any()
    assert got[1].isfinite().all() and got[1, 5] > 1e36
    assert not got[2].any() and torch.equal(rounding_errors[2], x[2])
    torch.testing.assert_close(got[3] + rounding_errors[3], x[3], rtol=1e-3, atol=0)
    assert got[4].isnan().all() and got[5].isnan().all()
    wide, *_ = rounded_of_int2(x.double() * 1e30)
    assert wide[1].isnan().all(), "beyond float32 it is not finite"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_whose_scale_is_too_small_becomes_zeros(dtype):
    """Its values are normal numbers; the scale, a third of the largest, would not be one."""
    tiny = torch.finfo(torch.float32).tiny
    x = torch.tensor([[2 * tiny], [4 * tiny]], dtype=dtype) * torch.tensor([1, -1] * (ROW // 2), dtype=dtype)
    got, _, rounding_errors = rounded_of_int2(x)
    assert not got[0].any() and torch.equal(rounding_errors[0], x[0])
    assert got[1].any() and not torch.equal(rounding_errors[1], x[1])


def test_zeros_stay_zeros_in_int2():
    """Whatever else their row holds: what has no gradient must not move. Such a row has three levels."""
    x = gaussian(8)
    for row, zeros in enumerate([1, 2, 32, 64, 100, 126, 127]):
        x[row, ROW - zeros :] = torch.tensor([0.0, -0.0]).repeat(64)[:zeros]
    got, _, rounding_errors = rounded_of_int2(x)
    for row in range(7):
        assert not got[row, x[row] == 0].any()
        assert len(got[row].abs().unique()) == 2, "0, and one magnitude"
    assert len(got[7].abs().unique()) == 2 and got[7].all(), "a row without a zero is rounded as ever"
    assert torch.equal(rounding_errors, x - got)
    error, square = (y[:5].square().sum() for y in (rounding_errors, x))
    assert float(error / square) == pytest.approx(0.18, abs=0.03), "that of the best three levels is 0.19"
    exact = torch.tensor([[5.0, -5.0, 0.0, -0.0] * (ROW // 4)])
    assert torch.equal(rounded_of_int2(exact)[0], exact)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_what_is_zero_on_all_ranks_arrives_as_zero(bits, ranks):
    """Beside values that are not, in rows that end early and in full ones; what one rank has arrives."""
    sent, zero = payloads(ranks, [1000, 7, 300], bits=bits), torch.arange(1307) % 3 == 0
    for rank, payload in enumerate(sent):
        payload.body[zero] = 0
        payload.body[1::3] = 0 if rank else 5.0
    answer(sent)
    for payload in sent:
        assert not payload.body[zero].any() and not payload.rounding_errors[zero].any()
        assert payload.body[1::3].all()


@every_length
def test_four_codes_lie_in_a_byte(n):
    quantized = 2 * torch.randint(-2, 2, (n,), dtype=torch.int8, generator=torch.Generator().manual_seed(n)) + 1
    packed = torch.full((packed_bytes(n, 2),), 99, dtype=torch.int8)
    assert len(packed) == -(-n // 4)
    pack_int2(quantized, packed)
    byte, quarter = packed.view(torch.uint8).tolist(), len(packed)
    assert quantized.tolist() == [2 * (byte[i % quarter] // 4 ** (i // quarter) % 4) - 3 for i in range(n)]
    assert torch.equal(unpack_int2(packed, torch.full((n,), 99, dtype=torch.int8)), quantized)


def test_every_byte():
    packed = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)
    quantized = unpack_int2(packed, torch.empty(1024, dtype=torch.int8))
    back = torch.empty_like(packed)
    pack_int2(quantized, back)
    assert torch.equal(back, packed)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@every_length
def test_the_mean_beside_every_length(n, ranks):
    """Rows that end early are rounded as if what is behind them were not there."""
    lengths = [n, 3]
    sent = payloads(ranks, lengths, bits=2)
    meant = [payload.body.clone() for payload in sent]
    rows = [row for part in meant[0].split(lengths) for row in part.split(ROW) if len(row)]
    if ranks > 1:
        QuantizedMean(sent[0], 0, ranks).encode_for_owners()
        wanted = torch.cat([by_definition(row) for row in rows]).float()
        share = ((meant[0] - sent[0].rounding_errors - wanted).abs() <= 1e-5).float().mean()
        assert share > 0.999, "but for values a last bit from a level's edge"
        sent = payloads(ranks, lengths, bits=2)
    answer(sent)
    assert all(torch.equal(payload.flat, sent[0].flat) for payload in sent)
    lost = torch.stack([payload.rounding_errors for payload in sent]).mean(0)
    torch.testing.assert_close(sent[0].body + lost, torch.stack(meant).mean(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_what_is_owed_stays_bounded(ranks):
    """The same message sent again and again arrives whole, on average, though one has 2 bits."""
    lengths, residuals, arrived = [1000, 7], None, torch.zeros(1007)
    meant = [payload.body.clone() for payload in payloads(ranks, lengths, bits=2)]
    for _ in range(60):
        sent = payloads(ranks, lengths, bits=2)
        for rank, payload in enumerate(sent):
            payload.body.copy_(meant[rank] if residuals is None else meant[rank] + residuals[rank])
        answer(sent)
        residuals = [payload.rounding_errors.clone() for payload in sent]
        arrived += sent[0].body
    mean = torch.stack(meant).mean(0)
    assert float((arrived / 60 - mean).norm() / mean.norm()) < 0.05
    assert float(torch.stack(residuals).mean(0).norm()) < 3 * float(mean.norm())


@pytest.mark.parametrize("cls", [compopt.RadiusAdamW, compopt.SeparateAdam, compopt.ScapeAdamS, compopt.TagcAdamW])
def test_refused_where_not_all_is_owed(cls):
    with pytest.raises(ValueError, match=r"payload_dtype='int2' is for Average, AdamS and LocalSteps|not for Tagc"):
        cls([torch.nn.Parameter(torch.ones(3))], payload_dtype="int2")


@pytest.mark.parametrize(("payload", "other", "bound"), [("int2", 3, 0.1), ("bfloat16", 0, 1e-4)])
def test_biases_are_owed_as_well(payload, other, bound):
    """Ranks without a compressed tensor: a bias's mean comes whole in the end. bfloat16 is summed in bfloat16; here
    the sum is exact."""

    def make(params, process_group):
        sgd = torch.optim.SGD(params, lr=1.0)
        return compopt.Average(sgd, payload_dtype=payload, process_group=process_group)

    bias = torch.linspace(-1, 1, 10)
    world, params, optimizers = replicas(2, [torch.zeros(10)], make)
    for _ in range(50):
        step(world, params, optimizers, [[bias], [other * bias]])
    torch.testing.assert_close(-params[0][0].detach() / 50, (1 + other) / 2 * bias, rtol=bound, atol=bound)
