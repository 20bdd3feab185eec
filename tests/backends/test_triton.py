"""Every Triton kernel against its reference, and commits of all buckets at once: on a GPU or in the interpreter."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from oracles import kernels as reference
from ranks import HANG_GUARD
from sim import World
from slow_rows import slow_but

import compopt
from compopt._state import buckets
from compopt._state.masks import code_layout, encode_mask, partition_mask
from compopt.separate.projections import orthonormalize_by_cholesky

kernels = pytest.importorskip("compopt_kernels", reason="needs triton")

LENGTHS = [8 * 40, 0, 1, 999, 1024 + 7]
COARSE = 1e-2  # of what is stored in 16 bits: the interpreter cuts off where a GPU rounds
HYPER = dict(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


class Draw:
    """Random tensors, a list for all tensors of a bucket."""

    def __init__(self, device: torch.device, seed: int = 0):
        self.device, self.random = device, torch.Generator().manual_seed(seed)

    def one(self, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(n, generator=self.random).to(self.device, dtype)

    def some(self, dtype: torch.dtype = torch.float32, lengths=LENGTHS) -> list[torch.Tensor]:
        return [self.one(n, dtype) for n in lengths]

    def masks(self, density: float, dense: int | None = None) -> tuple[list, list, list]:
        """Packed masks, positions, and their numbers; none for tensor ``dense``."""
        flags = [torch.rand(n, generator=self.random) < density for n in LENGTHS]
        bits = [reference.pack_bits(f).to(self.device) for f in flags]
        index = [f.nonzero().view(-1).to(self.device) for f in flags]
        if dense is not None:
            bits[dense], index[dense] = None, torch.arange(LENGTHS[dense], device=self.device)
        return bits, index, [len(i) for i in index]


def close(ours: list, theirs: list, tolerance: float = 2e-6) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [0, 1, 8, 1000, 4096 + 7])
def test_bits(device, n):
    mask = torch.rand(n, generator=torch.Generator().manual_seed(n)).to(device) < 0.3
    bits = kernels.pack_bits(mask, block=256)
    assert torch.equal(bits, reference.pack_bits(mask))


@pytest.mark.parametrize("size, dtype", [(256, torch.float32), (1024, torch.bfloat16), (1024, torch.float16)])
def test_compact(device, dtype, size):
    draw = Draw(device)
    bits, index, sizes = draw.masks(0.3, dense=3)
    grads, add, blocks = draw.some(dtype), draw.some(), kernels.Blocks(LENGTHS, device, size)
    add[4] = None
    parts = [torch.empty(k, device=device, dtype=dtype) for k in sizes]
    marks = torch.ones(len(LENGTHS), device=device, dtype=dtype)
    expected = [torch.empty_like(part) for part in parts]
    for g, i, out, extra in zip(grads, index, expected, add, strict=True):
        reference.compact(g, i, out, extra, 2.0, -1.0)
    kernels.compact(blocks, bits, kernels.block_offsets(blocks, bits), grads, parts, marks, add, 2.0, -1.0)
    close(parts, expected, 1e-6 if dtype == torch.float32 else COARSE)
    assert [float(mark) for mark in marks] == [1.0] * 5


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_compact_marks_what_is_not_finite_sent_or_not(device, bad):
    draw = Draw(device)
    bits, _, sizes = draw.masks(0.0)
    grads, blocks = draw.some(), kernels.Blocks(LENGTHS, device, 256)
    grads[4][-1], grads[2] = bad, None
    parts = [torch.empty(k, device=device) for k in sizes]
    marks = torch.ones(5, device=device)
    marks[2] = 0
    kernels.compact(blocks, bits, kernels.block_offsets(blocks, bits), grads, parts, marks, [None] * 5, 1.0, 1.0)
    assert marks.tolist()[:4] == [1, 1, 0, 1] and not marks[4].isfinite()


@pytest.mark.parametrize("over", [False, True])
def test_compact_marks_a_norm_that_is_too_large_beside_one_that_is_not(device, over):
    """No block's squares overflow, only all together; and only of that tensor."""
    lengths, limit = [1024, 1024], torch.finfo(torch.float32).max
    grads = [torch.full((n,), (limit / 1024) ** 0.5 * (1.01 if over else 0.99), device=device) for n in lengths]
    grads[0] *= 0.9
    blocks, marks = kernels.Blocks(lengths, device, 256), torch.ones(2, device=device)
    parts = [torch.empty(n, device=device) for n in lengths]
    kernels.compact(blocks, [None] * 2, blocks.firsts, grads, parts, marks, [None] * 2, 1.0, 1.0)
    assert marks[0] == 1 and bool(marks[1].isfinite()) != over


@pytest.mark.parametrize("size, grad", [(256, torch.float32), (1024, torch.bfloat16), (1024, torch.float16)])
def test_adamw(device, size, grad):
    """A sparse step of Radius, of one tensor rounded; a dense tensor and one without a gradient beside it."""
    draw = Draw(device)
    bits, index, sizes = draw.masks(0.3, dense=3)
    w, m, v, residual = draw.some(), draw.some(), [x.square() for x in draw.some()], draw.some()
    grads, values = draw.some(grad), draw.some(torch.bfloat16, sizes)
    rounding_errors = [draw.one(sizes[0]), *[None] * 4]
    steps = [torch.tensor(float(s), device=device) for s in (1, 2, 3, 4, 5)]
    public = [x.bfloat16() for x in w]
    ours = [[x.clone() for x in state] for state in (w, m, v, residual, public)]
    for i in (0, 1, 3):
        reference.radius_(w[i], m[i], v[i], residual[i], grads[i], values[i], index[i], float(steps[i]), **HYPER)
    reference.radius_(w[4], m[4], v[4], residual[4], grads[4], values[4], index[4], 5.0, **HYPER)
    residual[0].view(-1)[index[0].long()] = rounding_errors[0]
    rows = [
        kernels.AdamWRow(
            n, bits[i], values[i], ours[0][i], ours[1][i], ours[2][i], steps[i], int(i != 2), ours[3][i], grads[i],
            ours[4][i], rounding_errors[i],
        )
        for i, n in enumerate(LENGTHS)
    ]  # fmt: skip
    blocks = kernels.Blocks(LENGTHS, device, size)
    kernels.adamw(blocks, kernels.block_offsets(blocks, bits), rows, **HYPER)
    for mine, theirs in zip(ours, (w, m, v, residual), strict=False):
        close(mine, theirs)
    close([x.float() for x in ours[4]], ours[0], COARSE)


def test_adamw_maximizes(device):
    draw, n = Draw(device), 1000
    w, g, m, v = draw.one(n), draw.one(n), draw.one(n), draw.one(n).square()
    blocks = kernels.Blocks([n], device, 256)
    row = kernels.AdamWRow(n, None, g, w, m, v, torch.tensor(3.0, device=device), 1)
    kernels.adamw(blocks, kernels.block_offsets(blocks, [None]), [row], **HYPER, maximize=True)
    assert float(m.sub(g).norm()) > float(m.add(g).norm())


@pytest.mark.parametrize(
    "clip, maximize, grad",
    [(0.5, True, torch.float32), (1.0, False, torch.bfloat16), (1.0, False, torch.float16)],
)
def test_scape(device, grad, clip, maximize):
    draw = Draw(device)
    bits, index, sizes = draw.masks(0.2, dense=3)
    held_bits, held, held_sizes = draw.masks(0.1, dense=0)
    w, residual, grads = draw.some(), draw.some(), draw.some(grad)
    old, values = draw.some(lengths=held_sizes), draw.some(torch.bfloat16, sizes)
    steps = [torch.tensor(float(s), device=device) for s in (1, 2, 3, 4, 5)]
    options = dict(clip=clip, maximize=maximize)
    ours_w, ours_e = [x.clone() for x in w], [x.clone() for x in residual]
    new = [torch.zeros(k, device=device) for k in sizes]
    rounding_errors = [draw.one(k) * 1e-3 for k in sizes] if clip == 0.5 else [None] * len(sizes)
    part = [(n // 4 // 8 * 8, n // 2) for n in LENGTHS]
    x = [torch.zeros(b - a, device=device) for a, b in part]
    rows = [
        kernels.ScapeRow(
            n, bits[i], held_bits[i], old[i], values[i], ours_w[i], new[i], steps[i], int(i != 3), ours_e[i], grads[i],
            None, x[i], *part[i], rounding_errors[i],
        )
        for i, n in enumerate(LENGTHS)
    ]  # fmt: skip
    blocks = kernels.Blocks(LENGTHS, device, 1024)
    starts, held_starts = kernels.block_offsets(blocks, bits), kernels.block_offsets(blocks, held_bits)
    kernels.moment(blocks, held_starts, rows, betas=HYPER["betas"], maximize=maximize)
    kernels.scape(blocks, starts, held_starts, rows, **HYPER, **options)
    for i, n in enumerate(LENGTHS):
        full = reference.moment(residual[i], grads[i], old[i], held[i], betas=HYPER["betas"], maximize=maximize)
        close([x[i]], [full[slice(*part[i])]])
        expected = new[i].zero_() if i == 3 else None  # left as it was
        if i != 3 and n:
            expected = reference.scape_(
                w[i], residual[i], grads[i], old[i], held[i], values[i], index[i], float(steps[i]), **HYPER, **options
            )
            close([new[i]], [expected], 1e-5)
            if rounding_errors[i] is not None:
                residual[i][index[i].long()] = rounding_errors[i] * (1 - HYPER["betas"][0])
    close(ours_w, w, 1e-5)
    close(ours_e, residual)


@pytest.mark.parametrize("tile, grad", [((16, 32), torch.float32), ((64, 16), torch.bfloat16)])
def test_factored(device, tile, grad):
    """AdamW on R p^T and what is held back; one tensor is smaller than a tile, one has no gradient."""
    draw, rows, r = Draw(device), [], 5
    betas, shares = HYPER["betas"], dict(of_average=-0.5, of_sent=0.7, of_grad=0.3)
    expected = []
    for n, (height, width) in enumerate([(40, 48), (7, 19), (64, 33)]):
        R, p, local = (draw.one(size * r).view(r, size).t() for size in (height, width, width))
        R = R.contiguous() if n == 1 else R
        w, m, e = (draw.one(height * width) for _ in range(3))
        v, g = draw.one(height * width).square(), None if n == 2 else draw.one(height * width, grad)
        public, step = w.bfloat16(), torch.tensor(3.0, device=device)
        state = [x.clone() for x in (w, m, v, e)]
        rows.append(
            kernels.FactoredRow(
                height, width, r, R, *R.stride(), p.t().contiguous().view(-1), local.t().contiguous().view(-1),
                w, m, v, step, e, 0 if g is None else g, public,
            )
        )  # fmt: skip
        average = -0.5 * (R @ p.t()).reshape(-1)
        was = 0 if g is None else g.float()
        reference.adamw_(state[0], average, state[1], state[2], 3.0, **HYPER)
        state[3] += 0.3 * was - 0.7 * (R @ local.t()).reshape(-1)
        expected.append(state)
    shapes = tuple((row.rows, row.columns) for row in rows)
    table = kernels.factored_table(rows, kernels.FactoredTypes(grad=grad, public=torch.bfloat16), device)
    kernels.factored(shapes, table, **{**HYPER, "betas": betas}, **shares, tile=tile)
    for row, (w, m, v, e) in zip(rows, expected, strict=True):
        close([row.w, row.m, row.v, row.residual], [w, m, v, e], 2e-5)
        close([row.public.float()], [row.w], COARSE)


@pytest.mark.parametrize(
    "grad, sent, transposed",
    [
        pytest.param(torch.float32, torch.float32, False, marks=pytest.mark.slow),
        (torch.bfloat16, torch.float16, True),
    ],
)
def test_project(device, transposed, grad, sent):
    """Also of more rows and columns than a program adds up; one tensor has no gradient, one an infinite one."""
    draw, rows, expected, marks = Draw(device), [], [], torch.ones(6, device=device)
    for n, (height, width, r) in enumerate([(70, 130, 3), (2100, 48, 16), (48, 2100, 17), (5, 9, 2), (8, 16, 1)]):
        depth, outputs = (height, width) if transposed else (width, height)
        e, g = draw.one(height * width), None if n == 3 else draw.one(height * width, grad)
        narrow = draw.one(depth * r).view(depth, r) if n % 2 else draw.one(depth * r).view(r, depth).t()
        if n == 4:
            g[-1] = torch.inf
        h = (g.double() if g is not None else 0) + e.double()
        h = h.view(height, width).t() if transposed else h.view(height, width)
        expected.append((h @ narrow.double()).t().to(sent))
        out = torch.full((r, outputs), torch.nan, dtype=sent, device=device)
        rows.append(kernels.ProjectRow(height, width, r, *narrow.stride(), n + 1, narrow, out, e, g))
    shapes = tuple((row.rows, row.columns, row.r) for row in rows)
    tiles = kernels.project_tiles(shapes, transposed, device)
    for header in (None, marks):
        table = kernels.project_table(rows, tiles, kernels.ProjectTypes(torch.float32, sent, g=grad), transposed)
        for _ in range(2):  # a table serves again
            kernels.project(table, tiles, header)
    close([row.out.float() for row in rows[:-1]], [x.float() for x in expected[:-1]], 2e-3 if sent != grad else 1e-4)
    assert marks[:5].tolist() == [1.0] * 5
    assert marks[5].isnan()


def test_orthonormalize(device):
    """Of many rows, of dependent columns and of zeros, in the reference's layouts."""
    draw = Draw(device)
    stacks = [draw.one(2 * 40 * 5).view(2, 40, 5), draw.one(3 * 700 * 5).view(3, 5, 700).mT]
    stacks += [
        torch.zeros(1, 20, 5, device=device),
        draw.one(1030 * 3).view(1, 1030, 3),
        draw.one(12 * 12).view(1, 12, 12),
    ]
    stacks[1][0][:, 3] = 2 * stacks[1][0][:, 2]
    stacks += [draw.one(40 * 5).view(1, 40, 5), draw.one(40 * 3).view(1, 40, 3)]
    for stack in stacks[-2:]:
        stack[:, [0, 2, 4, 39]] = 0
    results = [torch.full(stack.shape, torch.nan, device=device) for stack in stacks]
    prepared = kernels.prepare_orthonormalize(stacks, results)
    for _ in range(2):
        kernels.orthonormalize(prepared)
    close(results, orthonormalize_by_cholesky(stacks), 1e-5)
    for stack, Q in zip(stacks[-2:], results[-2:], strict=True):
        assert torch.equal(Q.any(-1), stack.any(-1)), "rows of zeros, and no others, stay zeros"
    for Q in results:
        identity = torch.eye(Q.shape[-1], dtype=torch.float64, device=device).expand(len(Q), -1, -1)
        close([Q.double().mT @ Q.double()], [identity], 1e-6)


# elements of a block: several programs a tensor, and one
@pytest.mark.parametrize(
    ("case", "size"),
    [
        pytest.param("normal", 64, marks=pytest.mark.slow),
        ("ties", 64),
        ("zeros", 1024),
        ("huge and tiny", 1024),
        ("alike in 16 bits", 64),
    ],
)
def test_top_k(device, case, size):
    """Exactly k, none left out is larger than one taken, and of equal ones the first are taken."""
    lengths = [8 * 40, 0, 1, 999, 5003]
    draw = Draw(device)
    xs = draw.some(lengths=lengths)
    if case == "alike in 16 bits":  # that differ in the last, half of them equal
        xs = [1 + (x * (x > 0)).round().clamp(max=2) * 2.0**-23 for x in xs]
    if case == "ties":
        xs = [x.round() for x in xs]
    if case == "zeros":
        xs = [x * (x > 1.5) for x in xs]
    if case == "huge and tiny":
        xs = [x * torch.logspace(-42, 36, max(1, len(x)), dtype=torch.float64)[: len(x)].to(device).float() for x in xs]
    for ks in ([100, 0, 1, 999, 1300], [0, 0, 0, 1, 5002], [320, 0, 0, 500, 40]):
        bits = [torch.full(((n + 7) // 8,), 255, dtype=torch.uint8, device=device) for n in lengths]
        rows = [kernels.TopKRow(n, k, x, b) for n, k, x, b in zip(lengths, ks, xs, bits, strict=True)]
        kernels.top_k(kernels.Blocks(lengths, device, size), rows)
        for n, k, x, b in zip(lengths, ks, xs, bits, strict=True):
            largest = x.abs().sort(descending=True, stable=True).indices[:k]
            assert torch.equal(b, reference.pack_bits(torch.zeros(n, device=device).index_fill_(0, largest, 1) > 0))


READS = {  # of x, by top_k, in elements of it: all, and those that share the 16 bits of the k-th largest
    "normal": (3.0, 3.02),
    "zeros": (3.8, 3.9),  # .84 of x, the k-th one of them: the last pass finds them equal, and nothing loads them again
    "one value": (4.0, 4.0),
}


@pytest.mark.parametrize("case", READS)
def test_top_k_reads_x_at_most_four_times(case, monkeypatch):
    if not kernels.INTERPRETED:
        pytest.skip("loads are counted in the interpreter")
    loaded = []
    module = sys.modules["compopt_kernels.top_k"]

    def count(row, field, i, in_range, kind, *align):
        if field is module.X:
            loaded.append(int(in_range.handle.data.sum()))
        return load(row, field, i, in_range, kind, *align)

    load = module.load_field
    monkeypatch.setattr(module, "load_field", count)
    n, k = 40_000, 16_000
    x = Draw(torch.device("cpu")).one(n)
    x = {"normal": x, "zeros": x * (x > 1), "one value": x.sign()}[case]
    bits = torch.empty(n // 8, dtype=torch.uint8)
    kernels.top_k(kernels.Blocks([n], x.device, 1024), [kernels.TopKRow(n, k, x, bits)])
    assert int(reference.unpack_bits(bits, n).sum()) == k
    fewest, most = READS[case]
    assert fewest <= sum(loaded) / n <= most, sum(loaded) / n


@pytest.mark.parametrize("density", [0.2, 0.01, 1e-3])
def test_elias_fano_code(device, density):
    """The bytes are the reference's, and both ranges come back into one mask."""
    lengths, random = (20_000, 4096), torch.Generator().manual_seed(1)
    partition = partition_mask(lengths, 2, density)
    assert partition.is_elias_fano
    words = torch.zeros((partition.by_rank[-1].last_byte + 3) // 4, dtype=torch.int32, device=device)
    code = torch.zeros((2 * partition.message_bytes + 3) // 4, dtype=torch.int32, device=device)
    messages = code.view(torch.uint8)
    whole, encoded, expected, rows = [], [], [], []
    for rank, shard in enumerate(partition.by_rank):
        n = 8 * (shard.nbytes)
        flags = torch.zeros(n, dtype=torch.bool)
        flags[torch.randperm(n, generator=random)[: shard.k]] = True
        bits, whole = reference.pack_bits(flags), [*whole, flags]
        upper, row_bits, low = code_layout(shard)
        message = messages[rank * partition.message_bytes : (rank + 1) * partition.message_bytes]
        encoded.append(kernels.EncodeRow(n, bits.to(device), 8 * rank * partition.message_bytes, upper, row_bits, low))
        expected.append(encode_mask(flags.nonzero().view(-1), bits, partition, rank))
        rows.append(kernels.DecodeRow(upper, message, 8 * shard.first_byte, row_bits, low))
    kernels.encode_masks(kernels.Blocks([row.n for row in encoded], device, 1024), encoded, code)
    assert torch.equal(messages[: 2 * partition.message_bytes].cpu(), torch.cat(expected))
    kernels.decode_masks(kernels.Blocks([row.upper for row in rows], device, 1024), rows, words)
    assert torch.equal(
        words.view(torch.uint8)[: partition.by_rank[-1].last_byte].cpu(), reference.pack_bits(torch.cat(whole))
    )


def test_offsets_beyond_two_to_the_31(device):
    """Only the last block of a tensor that nobody can count with 32 bits; its memory is never touched elsewhere."""
    n = 2**31 + 1000
    g, bits = torch.empty(n, dtype=torch.bfloat16, device=device), torch.empty(n // 8, dtype=torch.uint8, device=device)
    blocks = kernels.Blocks([n], device, 1 << 20)
    blocks.where, blocks.count, blocks.per_tensor = blocks.where[-1:], 1, [1]
    blocks.bounds = torch.tensor([0, 1], device=device)
    tail = 1000
    g[-tail:] = torch.arange(tail, device=device)
    bits[-tail // 8 :] = 0b10000001
    part, mark = torch.empty(2 * tail // 8, device=device), torch.ones(1, device=device)
    starts = kernels.block_offsets(blocks, [bits])
    kernels.compact(blocks, [bits], starts, [g], [part], mark, [None], 1.0, 1.0)
    index = torch.arange(tail, device=device).view(-1, 8)[:, [0, 7]].reshape(-1)
    assert torch.equal(part, g[-tail:].index_select(0, index).float()) and mark.item() == 1


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "check_kernels.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=HANG_GUARD)
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr[-3000:]


def test_the_benchmark_runs_every_kernel(device, capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_kernels", Path(__file__).parents[2] / "bench/gpu_kernels.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    results = bench.operations(1 << 13, device)
    for operation in results.values():
        operation.run()
    kinds = {name.split()[0] for name in results}
    assert kinds == {"copy", "pack_bits", "block_offsets", "compact", "adamw", "scape",
                     "top_k", "encode_masks", "decode_masks", "factored", "orthonormalize", "project"}  # fmt: skip
    assert all(operation.nbytes > 0 for operation in results.values())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_kernels.py"])
    bench.main()
    assert capsys.readouterr().out == "no GPU\n"


SCAPE = {"dense_steps": 1, "density_steps": 2, "density": 0.05}
OPTIONS = {
    "AdamS": {},
    "RadiusAdamW": {"dense_steps": 2, "interval": 4, "density": 0.3},
    "ScapeAdamS": SCAPE,
    "ScapeAdamS, bits": SCAPE | {"density": 0.4},
    "ScapeAdamS, rounded": SCAPE | {"payload_dtype": "bfloat16", "max_grad_norm": 3.0},
    "SeparateAdam": {"rank": 5, "dense_steps": 2, "payload_dtype": None, "maximize": True},
    # one step: where a number differs in its last bit int8 may take the next level
    "SeparateAdam, rounded": {"rank": 5, "dense_steps": 5, "max_grad_norm": 20.0},
    "SeparateAdam, clipped": {
        "rank": 5,
        "dense_steps": 3,
        "payload_dtype": None,
        "max_grad_norm": 20.0,
        "ef_beta": 0.3,
    },
}

SLOW = ["ScapeAdamS", "ScapeAdamS, rounded", "SeparateAdam", "SeparateAdam, rounded"]


SHAPES = [*((64, 70 + k) for k in range(4)), (37,)]  # a bucket a matrix
IN_PAIRS = [(96, 64)] * 4  # two matrices a bucket, of which each of two ranks selects of one; of 2 blocks each


def train(case: str, backend: str, ranks: int = 1, steps: int = 5, shapes: list = SHAPES) -> list[torch.Tensor]:
    """Parameters of rank 0 after some steps of several buckets in two groups."""
    size = 20_000 if shapes is SHAPES else 50_000
    small = mock.patch.multiple(buckets, BUCKET_BYTES=size, JOINED_PART_ON_CPU=0)
    with mock.patch.dict("os.environ", COMPOPT_BACKEND=backend), small:
        return train_buckets(case, ranks, steps, shapes)


trained = functools.cache(train)


def train_buckets(case: str, ranks: int, steps: int, shapes: list) -> list[torch.Tensor]:
    world, random = World(ranks), torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=random) for shape in shapes]
    models = [[torch.nn.Parameter(x.clone()) for x in start] for _ in range(ranks)]
    optimizers = [make(case, params, comm) for params, comm in zip(models, world.comms, strict=True)]
    assert all(len(optimizer._buckets) > 1 for optimizer in optimizers)
    for step in range(steps):
        for params in models:
            for p in params:
                p.grad = torch.randn(p.shape, generator=random)
            if step == 3:
                params[2].grad = None  # on all ranks: it stays as it is
        world.step(optimizers)
    return [p.detach() for p in models[0]]


def make(case: str, params: list[torch.nn.Parameter], comm: object) -> torch.optim.Optimizer:
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:]}] if len(params) == len(SHAPES) else params
    name, simulate = case.split(",")[0], {} if case == "AdamS" else {"simulate": True}
    return getattr(compopt, name)(groups, lr=0.01, process_group=comm, **simulate, **OPTIONS[case])


@pytest.fixture
def interpreted() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU then")


@pytest.mark.parametrize("case", slow_but(lambda case: case not in SLOW, OPTIONS))
def test_buckets_and_groups_step_as_one_after_the_other(interpreted, case):
    ours, theirs = (trained(case, backend) for backend in ("triton", "torch"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", [pytest.param("ScapeAdamS", marks=pytest.mark.slow), "ScapeAdamS, bits"])
def test_what_other_ranks_select_is_read_for_all_buckets_together(interpreted, case):
    ours, theirs = (train(case, backend, ranks=2, steps=4) for backend in ("triton", "torch"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_a_rank_selects_of_the_last_tensors_of_several_buckets(interpreted):
    ours, theirs = (train("ScapeAdamS", backend, 2, 6, IN_PAIRS) for backend in ("triton", "torch"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
