"""What a rank selects of a bucket, by Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.deal import Deal, Part, code_of
from ..._state.masks import Mask, Tensors, bits_by_tensor
from .tables import blocks_of, flattened, starts_of

if TYPE_CHECKING:
    from .ops import TritonOps


class TritonSelection:
    """What this rank selects of one bucket in one step: exactly as many as are wanted, so that all
    sizes are known.

    The counterpart of ``selection.Selection``, for all tensors at once.
    """

    def __init__(self, bucket: Bucket, ops: TritonOps, deal: Deal, rank: int):
        self.bucket, self.ops, self.deal = bucket, ops, deal
        self.part: Part = deal.parts[rank]
        self.bits = torch.empty(
            self.part.last - self.part.first, dtype=torch.uint8, device=bucket.device
        )

    def take(self, grads: Tensors, old: list[Tensor] | None = None) -> None:
        """Select, by line 10's x.

        ``old``: the momenta where they were held; None: they still are the optimizer's.
        """
        bucket, state, pieces = self.bucket, self.bucket.state, self.part.pieces
        held, momenta = bucket.cache["mask"], old or state["exp_avg"]
        sizes = [piece.stop - piece.start for piece in pieces]
        xs = self.ops.scratch(bucket.flat["residual"], sum(sizes), use="x").split(sizes)
        own = {p.tensor: (x, p.start, p.stop) for p, x in zip(pieces, xs, strict=True)}
        rows = [
            kernels.ScapeRow(
                n,
                None,
                held.bits[i],
                momenta[i],
                None,
                None,
                None,
                None,
                0,
                state["residual"][i],
                g,
                None,
                *own.get(i, (None, 0, 0)),
            )
            for i, (n, g) in enumerate(zip(bucket.lengths, flattened(grads), strict=True))
        ]
        h, starts = bucket.group, starts_of(bucket, held)
        kernels.moment(blocks_of(bucket), starts, rows, betas=h["betas"], maximize=h["maximize"])
        wanted = [
            kernels.TopKRow(x.numel(), piece.wanted, x, self.bits[piece.at // 8 :])
            for piece, x in zip(pieces, xs, strict=True)
        ]
        if wanted:
            kernels.top_k(kernels.cut(tuple(sizes), bucket.device), wanted)

    def settle(self) -> None:
        """There is nothing to keep: kernels look for no threshold."""

    def message(self) -> Tensor:
        """This rank's bits, coded where codes are smaller."""
        if self.deal.coded:
            code: Tensor = kernels.encode(self.bits, self.deal.length, *code_of(self.part))
            return code
        return torch.nn.functional.pad(self.bits, (0, self.deal.length - self.bits.numel()))

    def found(self, messages: Tensor) -> Mask:
        """All ranks' selections."""
        deal, bucket = self.deal, self.bucket
        size = deal.parts[-1].last
        words = torch.zeros((size + 3) // 4, dtype=torch.int32, device=bucket.device)
        flat = words.view(torch.uint8)[:size]
        rows = list(zip(messages, deal.parts, strict=True))
        if deal.coded:
            kernels.decode([_code_row(message, part) for message, part in rows], words)
        else:
            torch.cat([m[: p.last - p.first] for m, p in rows], out=flat)
        sizes = [0] * len(bucket.lengths)
        for piece in (piece for part in deal.parts for piece in part.pieces):
            sizes[piece.tensor] += piece.wanted
        bits = bits_by_tensor(bucket, flat)
        ours = [i for i, own in enumerate(bits) if own is not None]
        blocks = kernels.cut(tuple(bucket.lengths[i] for i in ours), bucket.device)
        own = [bits[i] for i in ours]
        found = kernels.positions(blocks, own, kernels.count(blocks, own), [sizes[i] for i in ours])
        positions: Tensors = [None] * len(bits)
        for i, one in zip(ours, found, strict=True):
            positions[i] = one
        return Mask(bucket, bits=bits, positions=positions)


def _code_row(message: Tensor, part: Part) -> kernels.CodeRow:
    upper, row_bits, low = code_of(part)
    return kernels.CodeRow(upper, message, 8 * part.first, row_bits, low)
