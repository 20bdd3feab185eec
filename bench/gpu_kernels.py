"""Speed of the Triton kernels on a CUDA device: bytes a second, beside a copy's.

    python bench/gpu_kernels.py                    # a minute
    python bench/gpu_kernels.py --elements 1e8

A kernel's bytes are those it cannot do without: each input read once, each output written once, whole cache lines not
counted. The copy is measured in the same run, on as many elements. Columns: ms, GB/s, times the copy's GB/s. Saves
results/gpu-kernels.csv. Without a CUDA device it says "no GPU" and ends well. Steps are bench/gpu.py's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compopt._state.bits import pack_bits
from compopt._state.masks import code_layout, partition_mask

REPEATS, SETTLE = 20, 5
HYPER = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


class Operation(NamedTuple):
    """Something to time, and the bytes it reads and writes."""

    run: Callable[[], object]
    nbytes: float


def operations(n: int, device: torch.device) -> dict[str, Operation]:
    """Every kernel on n float32 elements in four tensors, and a copy of as many. ``n`` is a multiple of 32."""
    import compopt_kernels as kernels

    flags = torch.rand(n, device=device) < 0.4
    whole, other = (torch.randn(n, device=device) for _ in range(2))
    results = {
        "copy": Operation(lambda: other.copy_(whole), 8 * n),
        "pack_bits": Operation(lambda: kernels.pack_bits(flags), n + n / 8),
    }
    lengths = (n // 8, n // 8, n // 4, n // 2)
    for density in (0.4, 0.01):
        results |= masked(lengths, density, device)
    return results | codes(n, device) | products(n, device)


def masked(lengths: tuple[int, ...], density: float, device: torch.device) -> dict[str, Operation]:
    """The kernels of Radius and SCAPE on four tensors, of which a mask of this density chooses elements."""
    import compopt_kernels as kernels

    n, blocks = sum(lengths), kernels.make_blocks(lengths, device)

    def draw(sizes: Sequence[int] = lengths) -> list[Tensor]:
        return [torch.randn(size, device=device) for size in sizes]

    def draw_masks() -> tuple[list[Tensor], Tensor, list[int]]:
        flags = [torch.rand(size, device=device) < density for size in lengths]
        bits = [kernels.pack_bits(f) for f in flags]
        return bits, kernels.block_offsets(blocks, bits), [int(f.sum()) for f in flags]

    (bits, starts, sizes), (held, held_starts, held_sizes) = draw_masks(), draw_masks()
    w, g, m, e = draw(), draw(), draw(), draw()
    v, values, k, marks = [x.square() for x in draw()], draw(sizes), sum(sizes), torch.empty(4, device=device)
    common = [torch.ones((), device=device)] * 4, [1] * 4, e, g
    radius = [kernels.AdamWRow(*row) for row in zip(lengths, bits, values, w, m, v, *common, strict=True)]
    scape = [
        kernels.ScapeRow(*row)
        for row in zip(lengths, bits, held, draw(held_sizes), values, w, draw(sizes), *common, strict=True)
    ]
    top = [kernels.TopKRow(*row) for row in zip(lengths, sizes, e, map(torch.empty_like, bits), strict=True)]
    runs: dict[str, tuple[Callable[[], object], float]] = {
        "block_offsets": (lambda: kernels.block_offsets(blocks, bits), n / 8),
        "compact": (
            lambda: kernels.compact(blocks, bits, starts, g, values, marks, e, 1.0, 1.0),
            4 * n + n / 8 + 8 * k,
        ),
        "adamw (Radius)": (lambda: kernels.adamw(blocks, starts, radius, **HYPER), 36 * n + n / 8 + 4 * k),
        "scape": (lambda: kernels.scape(blocks, starts, held_starts, scape, **HYPER), 20 * n + n / 4 + 12 * k),
        "top_k": (lambda: kernels.top_k(blocks, top), 12 * n + 5 * n / 8),
    }
    return {f"{name} {density}": Operation(*run) for name, run in runs.items()}


def products(n: int, device: torch.device) -> dict[str, Operation]:
    """AdamW on averages of rank 16, and the residual, of a square matrix of about n elements."""
    import compopt_kernels as kernels

    side = 128 * max(1, round(n**0.5 / 128))
    R, p, own = (torch.randn(16 * side, device=device) for _ in range(3))
    w, m, v, e, g = (torch.rand(side * side, device=device) for _ in range(5))
    step = torch.ones((), device=device)
    row = kernels.FactoredRow(side, side, 16, R.view(16, side).t(), 1, side, p, own, w, m, v, step, e, g)
    table = kernels.factored_table([row], kernels.FactoredTypes(), device)
    hyper = {**HYPER, "of_average": 1.0, "of_sent": 1.0, "of_grad": 1.0}
    narrow, out = torch.randn(side, 16, device=device), torch.empty(16, side, device=device)
    stack = narrow.view(1, side, 16)
    result = torch.empty_like(stack)
    prepared = kernels.prepare_orthonormalize([stack], [result])
    results = {  # tables keep no tensor alive
        "factored 16": Operation(lambda row=row: kernels.factored(((side, side),), table, **hyper), 36 * side * side),
        "orthonormalize 16": Operation(lambda of=(stack, result): kernels.orthonormalize(prepared), 256 * side),
    }
    types = kernels.ProjectTypes(narrow.dtype, out.dtype)
    for transposed in (False, True):
        product = kernels.ProjectRow(side, side, 16, *narrow.stride(), 0, narrow, out, e, g)
        tiles = kernels.project_tiles(((side, side, 16),), transposed, device)
        narrow_table = kernels.project_table([product], tiles, types, transposed)
        results["project 16, transposed" if transposed else "project 16"] = Operation(
            lambda row=product, made=(narrow_table, tiles): kernels.project(*made, None), 8 * side * side
        )
    return results


def codes(n: int, device: torch.device) -> dict[str, Operation]:
    """Coding one rank's range of a mask of n elements at 1 %, and decoding both ranks'."""
    import compopt_kernels as kernels

    shard, other = (partition := partition_mask((n,), 2, 0.01)).by_rank
    coded = code_layout(shard)
    flags = torch.rand(8 * shard.nbytes, device=device) < 0.01
    flags[flags.nonzero()[shard.k :]] = False
    bits = pack_bits(flags.clone())
    code = torch.zeros((partition.message_bytes + 3) // 4, dtype=torch.int32, device=device)
    encoded = [kernels.EncodeRow(8 * len(bits), bits, 0, *coded)]
    blocks = kernels.make_blocks((8 * len(bits),), device)
    kernels.encode_masks(blocks, encoded, code)
    message = code.view(torch.uint8)[: partition.message_bytes]
    upper, row_bits, low = coded
    rows = [kernels.DecodeRow(upper, message, 8 * p.first_byte, row_bits, low) for p in (shard, other)]
    words = torch.zeros((other.last_byte + 3) // 4, dtype=torch.int32, device=device)
    uppers = kernels.make_blocks((upper, upper), device)
    size = partition.message_bytes
    return {
        "encode_masks 0.01": Operation(
            lambda: kernels.encode_masks(blocks, encoded, code), len(bits) + partition.message_bytes
        ),
        "decode_masks 0.01": Operation(lambda: kernels.decode_masks(uppers, rows, words), 2 * size + 4 * len(words)),
    }


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of a few runs on the device, after some that do not count; of a CPU's, one."""
    times: list[float] = []
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    for i in range(SETTLE + REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= SETTLE:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def kernel_table(elements: int, device: torch.device) -> list[dict]:
    rows, copied = [], 0.0
    for name, operation in operations(elements, device).items():
        ms = milliseconds(operation.run, device)
        rate = operation.nbytes / ms / 1e6
        copied = copied or rate
        rows.append({"kernel": name, "ms": round(ms, 3), "gb_s": round(rate), "to_copy": round(rate / copied, 2)})
        print(f"{name:<24}{ms:>9.3f} ms{rate:>8.0f} GB/s{rate / copied:>7.2f} x copy", flush=True)
    return rows


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--elements", type=float, default=2**26, help="of a kernel's tensors")
    cli.add_argument("--dry", action="store_true", help="each kernel once, in Triton's interpreter; saves nothing")
    args = cli.parse_args()
    if args.dry:
        for row in kernel_table(1 << 13, torch.device("cpu")):
            print(json.dumps({"row": row.pop("kernel"), **row}))
        return
    if not torch.cuda.is_available():
        print("no GPU")
        return
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {args.elements:.0f} elements\n")
    table = kernel_table(int(args.elements) // 32 * 32, device)
    for row in table:
        print(json.dumps({"row": row["kernel"], **row}))
    from _table import RESULTS, write_rows

    machine = {"machine": torch.cuda.get_device_name(device), "torch": torch.__version__}
    write_rows(RESULTS / "gpu-kernels.csv", [row | machine for row in table])


if __name__ == "__main__":
    main()
