"""int8 and int4 payloads: rounding alone, the mean made of it, and what every optimizer keeps of what is taken off."""

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
from ranks import run_ranks
from sim import Ranks, World
from slow_rows import slow_but
from table import CASES, Case, by_name
from torch import nn

import compopt
from compopt._wire.codec import QuantizedCodec
from compopt._wire.collectives import count_bytes
from compopt._wire.payload import Payload, Scratch
from compopt._wire.quantization import (
    ROW,
    count_rows,
    dequantize_rows,
    quantize_rows,
    row_layout,
    rows_to_values,
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
    return dequantize_rows(quantized, scales, torch.empty_like(x)), scales, rounding_errors


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
                optimizer._option_groups[0]["payload_dtype"] = dtype
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
