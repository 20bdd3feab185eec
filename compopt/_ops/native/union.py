"""TAGC's passes over the tensors of a bucket, in the order of the mask (kernels/native/tagc.c)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.masks import Tensors
from ..._state.residuals import Residuals
from ..._state.shards import Run
from ..update_helpers import Selected
from .passes import (
    PIECE,
    SHARD,
    Table,
    address,
    address_in_turn,
    addresses,
    as_float32,
    run_over_rows,
)
from .selection import NativeTopK
from .updates import residual_addresses


def select_largest(bucket: Bucket, ops: NativeTopK, grads: Tensors, ks: list[int]) -> Selected:
    """Do ``tagc.select_largest``; called by ``Ops.run`` for TAGC.

    Gradients and residuals are read once, if the threshold of the step before serves again.
    """
    lengths, wide, residuals = bucket.lengths, as_float32(grads), Residuals(bucket).read_all()
    dense = [Run(0, n, i, 0) for i, n in enumerate(lengths) if not bucket.compressed[i]]
    shards, ks = (
        [*bucket.shards.runs_by_shard, dense],
        [*ks, 0],
    )  # of dense tensors only the squares
    runs, counts = [*chain(*shards)], [len(of_shard) for of_shard in shards]
    squares = torch.empty(len(runs), dtype=torch.float32, device="cpu")
    columns = {
        "g": addresses("a gradient", wide, lengths),
        "e": addresses("a residual", residuals, lengths),
    }
    places = address_in_turn("sums of squares", squares, [1] * len(runs))
    pieces = _piece_table(runs, **columns, squares=places)
    positions = torch.empty(sum(ks), dtype=torch.int64, device="cpu")
    values = torch.empty(sum(ks), dtype=torch.float32, device="cpu")
    row = 8 * pieces.width
    first_pieces = [pieces.address + row * first for first in accumulate(counts, initial=0)]
    cuts = [8 * cut for cut in bucket.shards.mask_cuts]
    table = SHARD.table(
        len(ks),
        pieces=first_pieces[:-1],
        many=counts,
        begin=cuts,
        size=[*(b - a for a, b in pairwise(cuts)), 0],
        k=ks,
        guess=_guess_addresses(bucket, len(ks)),
        positions=address_in_turn("positions", positions, ks, torch.int64),
        values=address_in_turn("values", values, ks),
    )
    _run_selection(ops, table, values)
    selected = table.read_column("selected")
    if selected != ks:
        parts = zip(positions.split(ks), values.split(ks), selected, strict=True)
        kept = [(at[:n], of[:n]) for at, of, n in parts]
        positions, values = (torch.cat(column) for column in zip(*kept, strict=True))
    bits = torch.zeros(bucket.shards.mask_bytes, dtype=torch.uint8, device="cpu")
    at = address("positions", positions, len(positions), torch.int64)
    mask = address("a mask", bits, len(bits), torch.uint8)
    ops.library.set_bits(at, len(positions), mask)
    return Selected(positions, values, bits, _marks_of(grads, runs, squares))


def hold_back(
    bucket: Bucket, ops: NativeTopK, grads: Tensors, positions: Tensor, sent: Tensor
) -> None:
    """Do ``tagc.hold_back``; called by ``Ops.run`` for TAGC."""
    lengths, wide, many = bucket.lengths, as_float32(grads), len(positions)
    runs = [*chain(*bucket.shards.runs_by_shard)]
    at, values = address("positions", positions, many, torch.int64), address("values", sent, many)
    with Residuals(bucket).open() as opened:
        pieces = _piece_table(
            runs,
            g=addresses("a gradient", wide, lengths),
            e=residual_addresses(bucket, opened),
            squares=[0] * len(runs),
        )
        run_over_rows(
            [run.size for run in runs],
            lambda a, b, _: ops.library.hold_back(pieces, a, b, at, values, many),
        )


def _piece_table(
    runs: Sequence[Run], g: Sequence[int], e: Sequence[int], squares: Sequence[int]
) -> Table:
    """Return a table of these runs, from the addresses of gradients and residuals (0: none)."""
    columns = [
        [places[run.tensor] and places[run.tensor] + 4 * run.at for run in runs]
        for places in (g, e)
    ]
    return PIECE.table(
        len(runs),
        n=[run.size for run in runs],
        first=[run.first for run in runs],
        g=columns[0],
        e=columns[1],
        squares=squares,
    )


def _guess_addresses(bucket: Bucket, shards: int) -> list[int]:
    """Return where the thresholds are that shards of the last step have found, 0 at first. They are
    no state: they change no result.
    """
    guesses = bucket.cache.get("guesses")
    if guesses is None or len(guesses) != shards:
        guesses = bucket.cache["guesses"] = torch.zeros(shards, dtype=torch.float64, device="cpu")
    return address_in_turn("guesses", guesses, [1] * shards, torch.float64)


def _run_selection(ops: NativeTopK, table: Table, like: Tensor) -> None:
    """Run the pass over the shards of a table, each on one thread."""
    sizes, ks = table.read_column("size"), table.read_column("k")
    parts = [k for k, size in zip(ks, sizes, strict=True) if k < size]
    room, threads = (
        2 * ops.library.room_for(max(parts)) + max(parts) if parts else 0,
        torch.get_num_threads(),
    )
    longest = max(sizes)
    candidates = ops.scratch(like, threads * room, torch.int32, "candidates")
    sums = ops.scratch(like, threads * longest, use="x")
    scratch = address("candidates", candidates, threads * room, torch.int32)
    memory = address("sums", sums, threads * longest)

    def run(first: int, last: int, thread: int) -> int:
        own = scratch + 4 * room * thread, memory + 4 * longest * thread
        rejected: int = ops.library.select_sums(table, first, last, *own)
        return rejected

    run_over_rows(sizes, run)


def _marks_of(grads: Tensors, runs: Sequence[Run], squares: Tensor) -> Tensor:
    """Return the marks of all gradients, from the sums of squares of their parts."""
    tensors = torch.tensor([run.tensor for run in runs], dtype=torch.int64, device="cpu")
    sums = squares.new_zeros(len(grads)).index_add_(0, tensors, squares)
    given = torch.tensor([float(g is not None) for g in grads], dtype=torch.float32, device="cpu")
    return sums.mul_(0).add_(given)
