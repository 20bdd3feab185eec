"""Rounding errors of int8 and int4 payloads, by the values that share a scale; and the time of rounding.

    python bench/rounding.py            # both, one thread; a minute

The gradients are a small GPT's (0.9 M parameters) after 1 and after 100 steps of AdamW, and the factors that a tracked
projection of rank 16 sends of them. An error is the root mean square of what rounding takes off, expected over its
random numbers, relative to the values' own; ``price``: that error times 2 ** (bits a value), so that what is smaller
loses less for the same bytes. Times are the least of 15 in turns, of 10 M values: rounding and packing by PyTorch's
operators, and a mean over two ranks as one of them takes part in it, by these and by the C passes. Saves
results/rounding.csv.
"""

from __future__ import annotations

import csv
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from _model import GPT, Batches
from torch import Tensor

from compopt._ops.native import build
from compopt._ops.native.quantization import NativeCodec
from compopt._wire.codec import QuantizedCodec
from compopt._wire.payload import ROW, Payload, Scratch, packed_bytes
from compopt._wire.quantization import LARGEST, pack_int4, quantize_rows

FILE = Path(__file__).parent / "results" / "rounding.csv"
ROWS = (16, 32, 64, 128, 256, 512, 4096)
N, RANK = 10_000_000, 16


def sent() -> Iterator[tuple[str, list[Tensor]]]:
    """Return what crosses the network, and its name."""
    torch.manual_seed(0)
    model, batches = GPT(5, 128, 4), Batches(rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, 101):
        model.zero_grad()
        model(*batches.next()).backward()
        if step in (1, 100):
            grads = [p.grad.clone() for p in model.parameters() if p.dim() == 2 and p.numel() >= 4096]
            yield f"gradient, step {step}", grads
            yield f"factors, step {step}", [factor for g in grads for factor in factors(g)]
        optimizer.step()


def factors(g: Tensor) -> tuple[Tensor, Tensor]:
    """Of the second power iteration, by columns as they are sent."""
    P = g @ torch.linalg.qr(g.t() @ (g @ torch.randn(g.shape[1], RANK)))[0]
    return P.t(), (g.t() @ torch.linalg.qr(P)[0]).t()


def error(tensors: list[Tensor], row: int, bits: int) -> float:
    """Of floor(x / scale + u): scale^2 f (1 - f) is its mean square, f the fraction of x / scale."""
    off = whole = 0.0
    for x in tensors:
        flat = x.double().flatten()
        rows = torch.nn.functional.pad(flat, (0, -len(flat) % row)).view(-1, row)
        scale = rows.abs().amax(1, keepdim=True) / LARGEST[bits]
        fraction = torch.where(scale > 0, rows / scale, 0).frac().abs()
        off += float((scale.square() * fraction * (1 - fraction)).sum())
        whole += float(flat.square().sum())
    return (off / whole) ** 0.5


def least(works: list[Callable[[], object]]) -> list[float]:
    """Milliseconds of each, taken in turns: what else the machine does is then the same for all."""
    selected: list[list[float]] = [[] for _ in works]
    for _ in range(15):
        for work, times in zip(works, selected, strict=True):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return [1e3 * min(times) for times in selected]


def works(bits: int) -> list[Callable[[], None]]:
    """Rounding and packing 10 M values; one rank's part in the mean of two, by operators and by C passes."""
    scratch = Scratch()
    x = torch.randn(N // ROW, ROW)
    quantized, scales, dropped = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x)), torch.empty_like(x)
    out = torch.empty(packed_bytes(N, bits), dtype=torch.int8)

    def rounding() -> None:
        quantize_rows(x, (), quantized, scales, dropped, (1,), scratch, bits)
        if bits == 8:
            out.copy_(quantized.view(-1))
        else:
            pack_int4(quantized.view(-1), out)

    flat = torch.cat([torch.ones(5), x.view(-1)])

    def mean(codec: QuantizedCodec) -> None:
        payload = Payload(flat, 3, 2, [N], codec, dropped.view(-1), (1,), scratch)
        part = codec.make_mean(payload, 0, 2)
        received = part.encode_for_owners()
        mine = part.average_own_chunk(received)
        part.decode_mean(torch.stack([mine, mine]))

    passes = NativeCodec(build.load_library(), bits)
    return [rounding, functools.partial(mean, QuantizedCodec(bits)), functools.partial(mean, passes)]


def main() -> None:
    torch.set_num_threads(1)
    table = []
    for what, tensors in sent():
        for bits in LARGEST:
            for row in ROWS:
                wide, off = bits + 32 / row, error(tensors, row, bits)
                table.append({"what": what, "bits": bits, "row": row, "bits a value": wide, "error": f"{off:.5f}"})
                price = f"off by {off:.4f}, price {off * 2**wide:.2f}"
                print(f"{what:18} int{bits}, {row:4} a scale: {wide:5.2f} bits, {price}")
    isa = torch.backends.cpu.get_cpu_capability()
    kinds = [least(list(kind)) for kind in zip(*map(works, LARGEST), strict=True)]
    for bits, single, mean, passes in zip(LARGEST, *kinds, strict=True):
        times = {"rounding ms": f"{single:.1f}", "mean ms": f"{mean:.1f}", "by C passes": f"{passes:.1f}"}
        table.append({"what": f"10 M values, {isa}", "bits": bits, "row": ROW, **times})
        print(f"int{bits}, 10 M values, {isa}: rounded and packed in {single:.1f} ms,")
        used = build.isa_of_library(build.load_library())
        print(f"    a mean of two ranks {mean:.1f} ms, by C passes ({used}) {passes:.1f} ms")
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list({key: None for line in table for key in line}))
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
