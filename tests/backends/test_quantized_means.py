"""int8 and int4 means by Triton kernels and C passes, against PyTorch's operators: the same bits."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from pairs import name_of, pairs
from torch.utils._python_dispatch import TorchDispatchMode

from compopt._backends.native import library
from compopt._backends.native import native_quantization as native
from compopt._wire.codec import QuantizedCodec, QuantizedMean
from compopt._wire.payload import ROW, Payload, Scratch, packed_bytes
from compopt._wire.quantization import BLOCK_ROWS, row_layout

LENGTHS = [(), (0,), (1,), (5, 0, 3), (ROW,), (ROW - 1, ROW + 1), (300, 0, 128, 4000, 1), (BLOCK_ROWS * ROW + 129, 70)]
WORDS = 3, 2  # of header and control
NATIVE = ("native", "portable")  # all that this processor has, and none; what is between, test_native.py has
MEANS = ("triton", *NATIVE)


@pytest.fixture(params=MEANS)
def codec(request, device) -> Callable:
    """Return what makes the codec to hold against ``QuantizedCodec``: on a GPU Triton's alone."""
    if request.param == "triton":
        pytest.importorskip("compopt_kernels", reason="needs triton")
        from compopt._backends.triton.triton_ops import TritonCodec

        return functools.partial(TritonCodec, device.type)
    if device.type != "cpu":
        pytest.skip("C passes are for CPUs")
    return functools.partial(native.NativeCodec, library_of(request.param))


def library_of(name: str):
    if not library.find_objects():
        pytest.skip("needs the compiled passes")
    return library.load_library("" if name == "native" else name)


def exchanged(make: Callable, device: torch.device, lengths: tuple, ranks: int, bits: int, odd: bool = False) -> tuple:
    """Return what ranks end with: the averaged payloads, and what was dropped. And the messages of both stages."""
    random, payloads, codec = torch.Generator().manual_seed(ranks), [], make(bits)
    for rank in range(ranks):
        flat = torch.randn(sum(WORDS) + sum(lengths), generator=random) * 10.0 ** (rank - 1)
        if odd:
            body = flat[sum(WORDS) :]
            body[:ROW], body[3 * ROW], body[5 * ROW + 1] = 0, torch.inf, torch.nan
            body[7 * ROW : 8 * ROW] *= 1e-41
            body[8 * ROW :] *= 1e-37  # the scale, and not the values, has no inverse
        rounding_errors = torch.empty(sum(lengths), device=device)
        payloads.append(Payload(flat.to(device), *WORDS, list(lengths), codec, rounding_errors, (5, 1)))
        if rank and not odd:  # rank 0 adds nothing
            payloads[-1].round(torch.randn(sum(lengths), generator=random).to(device))
    parts = [codec.make_mean(payload, rank, ranks) for rank, payload in enumerate(payloads)]
    sent = torch.stack([part.encode_for_owners() for part in parts])
    gathered = torch.stack([part.average_own_chunk(sent[:, rank]) for rank, part in enumerate(parts)])
    for part in parts:
        part.decode_mean(gathered)
    return [payload.flat for payload in payloads], [payload.rounding_errors for payload in payloads], (sent, gathered)


def rows_of_means() -> list[tuple]:
    """Return rows in which every codec meets all lengths in 8 bits and in 4: a chunk may be odd."""
    rows = pairs(itertools.product(MEANS, [8, 4]), LENGTHS, [2, 3, 8])
    return [(name, lengths, ranks, bits) for (name, bits), lengths, ranks in rows]


@pytest.mark.parametrize(("codec", "lengths", "ranks", "bits"), rows_of_means(), indirect=["codec"], ids=name_of)
def test_the_mean_has_the_references_bits(codec, device, lengths, ranks, bits):
    (ours, rest, _), (theirs, rounding_errors, _) = (
        exchanged(c, device, lengths, ranks, bits) for c in (codec, QuantizedCodec)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(rest, rounding_errors, strict=True):  # the reference adds 3 x in one rounding
        assert torch.equal(a, b) if ranks != 3 else torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@contextlib.contextmanager
def full_memory() -> Iterator[None]:
    """Fill new memory with ones, which it often has as zeros, so that a test sees what was not written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("isa", "lengths", "bits"), pairs(NATIVE, LENGTHS, [8, 4]), ids=name_of)
def test_messages_have_the_references_bytes(isa, lengths, bits):
    """Also where a rank has less to send than another: what is left over of its message is zero."""
    make, cpu = functools.partial(native.NativeCodec, library_of(isa)), torch.device("cpu")
    theirs = exchanged(QuantizedCodec, cpu, lengths, 3, bits)[2]
    with full_memory():
        ours = exchanged(make, cpu, lengths, 3, bits)[2]
    assert all(map(torch.equal, ours, theirs))


class CudasOperators(TorchDispatchMode):
    """CUDA's operators round otherwise than a CPU's: they multiply by the inverse of a number that the host holds,
    and a + alpha * b may be rounded once.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        divisions = torch.ops.aten.div.Tensor, torch.ops.aten.div_.Tensor
        if function in divisions and not isinstance(args[1], torch.Tensor):
            result = args[0] * (1 / args[0].new_full((), args[1])).item()
            return args[0].copy_(result) if function is divisions[1] else result
        if kwargs and kwargs.get("alpha", 1) != 1 and args[0].is_floating_point():
            return args[0].copy_(args[0].double() + kwargs["alpha"] * args[1].double())
        return function(*args, **(kwargs or {}))


def test_the_emulated_operators_round_otherwise():
    x = torch.rand(1000)
    with CudasOperators():
        assert not torch.equal(x / 127.0, x / x.new_full((), 127.0))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_and_means_have_the_same_bits_by_cudas_operators(ranks, bits):
    """So all ranks agree, whether kernels, C passes or operators compute them, and on whichever device."""
    lengths, cpu = (300, 0, 128, 4000, 1), torch.device("cpu")
    payloads, rest, messages = exchanged(QuantizedCodec, cpu, lengths, ranks, bits)
    with CudasOperators():
        others, their_rest, their_messages = exchanged(QuantizedCodec, cpu, lengths, ranks, bits)
    assert all(map(torch.equal, (*payloads, *messages), (*others, *their_messages)))
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(rest, their_rest, strict=True))


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_out_of_the_ordinary(codec, device, bits):
    makes = codec, QuantizedCodec
    (ours, rest, _), (theirs, rounding_errors, _) = (
        exchanged(make, device, (9 * ROW,), 2, bits, True) for make in makes
    )
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)) and a.isnan().any() and (a[sum(WORDS) :][:ROW] == 0).all()
    for a, b in zip(rest, rounding_errors, strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        assert not a[:ROW].any() and a[3 * ROW : 4 * ROW].isnan().all() and (a[8 * ROW :] != 0).any()


@pytest.mark.parametrize("bits", [8, 4])
def test_threads_change_nothing(codec, device, bits):
    lengths = (3 * ROW + 5, 70, 40 * ROW)
    single = exchanged(codec, device, lengths, 2, bits)
    torch.set_num_threads(3)
    try:
        many = exchanged(codec, device, lengths, 2, bits)
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, (*single[0], *single[1]), (*many[0], *many[1])))


def test_what_they_cannot_take_is_left_to_the_reference(codec, device):
    flat, rounding_errors = torch.zeros(8, dtype=torch.float64, device=device), torch.zeros(7, device=device)

    def is_references(flat: torch.Tensor, bits: int) -> bool:
        payload = Payload(flat, 1, 0, [7], codec(bits), rounding_errors, (1,))
        return type(payload.codec.make_mean(payload, 0, 2)) is QuantizedMean

    assert is_references(flat, 8) and is_references(flat.float(), 2) and not is_references(flat.float(), 8)


@pytest.mark.parametrize(
    ("isa", "lengths", "dtype", "bits"),
    pairs(NATIVE, LENGTHS, [torch.float32, torch.float64], [8, 4, 2]),
    ids=name_of,
)
def test_a_chunk_alone_has_the_references_codes(isa, lengths, dtype, bits):
    """The rounding errors are written over the values."""
    passes = library_of(isa)
    (chunk,) = row_layout(lengths, 1).chunks
    values = torch.randn(chunk.stop, generator=torch.Generator().manual_seed(2)).to(dtype)
    results = []
    for codec in (QuantizedCodec(bits), native.NativeCodec(passes, bits)):
        x, out, scratch = values.clone(), torch.empty_like(values), Scratch()
        scales, quantized = torch.zeros(chunk.rows), torch.zeros(packed_bytes(chunk.stop, bits), dtype=torch.int8)
        codec.quantize(x, [chunk], [scales], [quantized], x, (3, 1), scratch)
        codec.dequantize([scales], [quantized], [chunk], out, scratch)
        results.append((x, scales, quantized, out))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("lengths", [(300, 0, 70), (ROW,)], ids=str)
def test_a_single_process_reads_what_others_would(codec, device, lengths, bits):
    """With ``simulate=True``: the values, and what is added to them, are rounded as if they had been sent."""
    random = torch.Generator().manual_seed(1)
    flat, addend = (torch.randn(sum(n) + sum(lengths), generator=random).to(device) for n in (WORDS, ()))
    results = []
    for make, is_added in ((codec, False), (QuantizedCodec, False), (QuantizedCodec, True)):
        errors = torch.empty(sum(lengths), device=device)
        payload = Payload(flat.clone(), *WORDS, list(lengths), make(bits), errors, (5, 1))
        if is_added:
            payload.body.add_(addend)
        payload.round(None if is_added else addend)
        payload.codec.make_mean(payload, 0, 1).round_payload()
        results.append((payload.flat, errors))
    ours, theirs, added_first = results
    assert all(map(torch.equal, ours, theirs)) and all(map(torch.equal, theirs, added_first))
    assert not torch.equal(ours[0], flat)
