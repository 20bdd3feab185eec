"""TAGC's passes over the tensors of a bucket, in the order of the mask (kernels/native/tagc.c)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.masks import Tensors
from ..._state.residuals import Residuals
from ..._state.shards import Run
from ..update_helpers import Selected
from .native_selection import NativeTopK
from .native_updates import residual_addresses
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


class Pieces(NamedTuple):
    """The runs of a bucket's mask, shard by shard, then its dense tensors, a run each."""

    counts: list[int]  # how many runs each shard has, and how many dense tensors there are
    tensors: Tensor  # of each run
    runs: list[Run]

    def table(self, g: Sequence[int], e: Sequence[int], squares: Sequence[int] | int) -> Table:
        """Return a table of the runs, from the addresses of gradients and residuals (0: none)."""
        columns = [
            [places[tensor] and places[tensor] + 4 * at for _, _, tensor, at in self.runs]
            for places in (g, e)
        ]
        first, n, *_ = zip(*self.runs, strict=True)
        return PIECE.table(len(n), n=n, first=first, g=columns[0], e=columns[1], squares=squares)


def list_pieces(bucket: Bucket) -> Pieces:
    """Return the pieces of a bucket, computed once."""
    if "pieces" not in bucket.cache:
        rows = enumerate(zip(bucket.lengths, bucket.compressed, strict=True))
        dense = [Run(0, n, i, 0) for i, (n, compressed) in rows if not compressed]
        shards = [*bucket.shards.runs_by_shard, dense]
        runs = [*chain(*shards)]
        tensors = torch.tensor([run.tensor for run in runs], dtype=torch.int64, device="cpu")
        bucket.cache["pieces"] = Pieces([*map(len, shards)], tensors, runs)
    pieces: Pieces = bucket.cache["pieces"]
    return pieces


def select_largest(bucket: Bucket, ops: NativeTopK, grads: Tensors, ks: list[int]) -> Selected:
    """Do ``tagc.select_largest``; called by ``Ops.run`` for TAGC.

    Gradients and residuals are read once, if the threshold of the step before serves again.
    """
    lengths, wide, residuals = bucket.lengths, as_float32(grads), Residuals(bucket).read_all()
    pieces, ks = list_pieces(bucket), [*ks, 0]  # of dense tensors only the squares
    squares = torch.empty(len(pieces.runs), dtype=torch.float32, device="cpu")
    rows = pieces.table(
        addresses("a gradient", wide, lengths),
        addresses("a residual", residuals, lengths),
        address_in_turn("sums of squares", squares, [1] * len(squares)),
    )
    positions = torch.empty(sum(ks), dtype=torch.int64, device="cpu")
    values = torch.empty(sum(ks), dtype=torch.float32, device="cpu")
    firsts = accumulate(pieces.counts, initial=0)
    bits = [*bucket.shards.bits, (0, 0)]
    table = SHARD.table(
        len(ks),
        pieces=[rows.address + 8 * rows.width * first for first in firsts][:-1],
        many=pieces.counts,
        begin=[begin for begin, _ in bits],
        size=[end - begin for begin, end in bits],
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
    packed = torch.zeros(bucket.shards.mask_bytes, dtype=torch.uint8, device="cpu")
    at = address("positions", positions, len(positions), torch.int64)
    ops.library.set_bits(at, len(positions), address("a mask", packed, len(packed), torch.uint8))
    gradient_flags = squares.new_zeros(len(grads)).index_add_(0, pieces.tensors, squares).mul_(0)
    given = torch.tensor([float(g is not None) for g in grads], dtype=torch.float32, device="cpu")
    return Selected(positions, values, packed, gradient_flags.add_(given))


def hold_back(
    bucket: Bucket, ops: NativeTopK, grads: Tensors, positions: Tensor, sent: Tensor
) -> None:
    """Do ``tagc.hold_back``; called by ``Ops.run`` for TAGC."""
    lengths, wide, many = bucket.lengths, as_float32(grads), len(positions)
    pieces, shards = list_pieces(bucket), bucket.shards.runs_by_shard
    at, values = address("positions", positions, many, torch.int64), address("values", sent, many)
    with Residuals(bucket).open() as opened:
        g = addresses("a gradient", wide, lengths)
        rows = pieces.table(g, residual_addresses(bucket, opened), 0)
        run_over_rows(
            [run.size for of_shard in shards for run in of_shard],  # dense tensors stay
            lambda a, b, _: ops.library.hold_back(rows, a, b, at, values, many),
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
