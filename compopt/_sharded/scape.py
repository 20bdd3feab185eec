"""SCAPE with sharded state: Algorithm 2 in a form that needs no whole momentum and no all-reduce.

Each rank n keeps a residual e_n of its own; the owner of a shard keeps its momentum m, and a
residual c that is common to all ranks. M is the mask found one step before, the same on all ranks::

        x_n <- (1 - b1) g_n + e_n
        X <- reduce-scatter of the mean of x_n on M                 # to the owner of each element
        e_n <- x_n off M, 0 on M
        owner: b <- X + b1 m + c on M;  G <- (X + c) / (1 - b1)     # line 14; the averaged gradient
        owner: next M <- the largest |x_n + b1 m + c| of its shard  # line 9, gathered meanwhile
        owner: c <- b1 m + c off M, 0 on M;  m <- b on M, 0 off M
        owner: AdamS on M, with G                                   # line 15
        w on M <- gathered from the owners                          # line 4
        w <- (1 - lr weight_decay) w off M                    # line 5, by everyone, in float32

The sum of e_n and c is what the replicated form calls the residual: b1 m, which it adds to every
rank's, goes to the common one here. So both forms are the same to rounding, and the masks of owners
and replicas are of the same step (the paper's are one step apart, and its line 12, a dense
reduce-scatter, is not needed).

What is sent is x_n / (1 - b1) on M, as in the replicated form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from .._ops.clipping import clip_factor
from .._ops.moment import own_share
from .._ops.norms import squared_norm
from .._ops.ops import Ops
from .._sparse.dealing import deal_now, mask_now
from .._sparse.selection import Selection, keep_masks
from .._state.buckets import Bucket
from .._state.masks import Mask
from .._wire.requests import Agree, AllGather, Asking, Commit, Payload, ReduceScatterMean


def sharded_scape(bucket: Bucket, ops: Ops) -> Asking[None]:
    """Algorithm 2, one bucket, one step."""
    shards = bucket.shards
    grads = bucket.grads()
    delayed = bucket.group["mask_delay"] == 1
    deal = deal_now(bucket, shards.ranks)  # its parts are the shards
    selection = Selection(bucket, ops, deal, shards.rank) if deal else None
    mask = mask_now(bucket)
    if selection and not delayed:
        for i in selection.pieces:
            selection.choose(i, own_x(bucket, i, grads[i]))
        rows = yield AllGather(selection.message())
        mask = selection.found(rows)

    exchanged = Exchanged(bucket, mask)
    messages = exchanged.messages(ops, grads)
    row = yield exchanged.request
    mean = messages[shards.rank].over(row)
    average = exchanged.average(mean)
    squared = reduce(torch.add, map(squared_norm, average))
    norm = yield Agree(mean, mask.phase, squared, sharded=True)

    present = bucket.present(mean)
    new, momenta = exchanged.updated(
        ops,
        average,
        present,
        norm,
    )
    gathered = new.unsqueeze(0)
    bucket.parameter_bytes = 0
    if shards.ranks > 1:
        gathered = yield AllGather(new)
        bucket.parameter_bytes = new.nbytes
    yield Commit()  # from here on state changes
    behind = selection if delayed else None
    exchanged.commit(gathered, momenta, behind)
    yield from keep_masks(bucket, ops, mask, mean, selection)


def fold_common(bucket: Bucket) -> None:
    """Add what is common to all ranks to each one's own residual; where state is not sharded there
    is none.
    """
    for i, common in enumerate(bucket.gathered.get("common", [])):
        if common is not None:
            residual = bucket.state["residual"][i].view(-1)  # in host memory, where it is offloaded
            residual.add_(common.to(residual.device))
            common.zero_()
    if "common" in bucket.flat:
        bucket.flat["common"].zero_()


def own_x(bucket: Bucket, i: int, g: Tensor | None) -> Tensor:
    """x_n + b1 m + c on this rank's part of tensor i, in memory of its own."""
    state, (start, stop), beta1 = bucket.state, bucket.shards.own[i], bucket.group["betas"][0]
    x = bucket.fetch("residual", i, slice(start, stop)).add_(state["common"][i])
    if g is not None:
        x.add_(g.reshape(-1)[start:stop], alpha=own_share(bucket.group))
    return x.add_(state["exp_avg"][i], alpha=beta1)


@dataclass
class Exchanged:
    """What one step exchanges of a bucket: what is on a mask."""

    bucket: Bucket
    mask: Mask

    def __post_init__(self) -> None:
        ranges = self.bucket.shards.ranges
        self.sent: list[Payload] = []  # this rank's messages to the owners
        # Where each rank's elements begin among those exchanged of a tensor.
        self.bounds: list[list[int]] = []
        for i, index in enumerate(self.mask.positions):
            starts = [own[i] for own in ranges]
            if index is None:
                self.bounds.append([start for start, _ in starts])
            else:
                edges = torch.tensor(
                    [start for start, _ in starts], dtype=index.dtype, device=index.device
                )
                self.bounds.append(torch.searchsorted(index, edges).tolist())
            last = len(index) if index is not None else self.bucket.lengths[i]
            self.bounds[-1].append(last)

    def sizes(self, rank: int) -> list[int]:
        """How many elements of each tensor are exchanged with ``rank``, which owns them."""
        return [bounds[rank + 1] - bounds[rank] for bounds in self.bounds]

    def at(self, i: int, rank: int) -> Tensor | slice:
        """Which elements of flattened tensor i these are."""
        part, index = slice(*self.bounds[i][rank : rank + 2]), self.mask.positions[i]
        return part if index is None else index[part].long()

    def own(self, i: int) -> Tensor | slice:
        """Which elements of this rank's part of tensor i these are, counted from where the part
        begins.
        """
        at, (start, stop) = self.at(i, self.bucket.shards.rank), self.bucket.shards.own[i]
        return slice(0, stop - start) if isinstance(at, slice) else at - start

    def messages(self, ops: Ops, grads: list[Tensor | None]) -> list[Payload]:
        """A row for every owner: the header, and x_n / (1 - b1) at what it owns."""
        bucket, h = self.bucket, self.bucket.group
        ranks = range(bucket.shards.ranks)
        rows, flat = bucket.payloads([self.sizes(rank) for rank in ranks], h["payload_dtype"])
        ops.mark(rows[0], grads)
        for row in rows[1:]:
            row.header.copy_(rows[0].header)
        for i, (g, e) in enumerate(zip(grads, bucket.each("residual"), strict=True)):
            for rank, row in enumerate(rows):
                at, part = self.at(i, rank), row.exact[i]
                part.zero_() if g is None else part.copy_(g.reshape(-1)[at])
                if h["maximize"]:
                    part.neg_()
                if e is not None:
                    part.add_(e.view(-1)[at], alpha=1 / (1 - h["betas"][0]))
        self.sent = [row.round() for row in rows]
        self.request = ReduceScatterMean(flat, [row.flat.numel() for row in rows])
        return rows

    def average(self, mean: Payload) -> list[Tensor]:
        """G, of what this rank owns of each tensor."""
        common, scale = self.bucket.state["common"], 1 / (1 - self.bucket.group["betas"][0])
        wide = torch.promote_types(self.bucket.dtype, torch.float32)
        return [
            part.to(wide)
            if common[i] is None
            else part.to(wide).add(common[i][self.own(i)], alpha=scale)
            for i, part in enumerate(mean.parts)
        ]

    def updated(
        self, ops: Ops, average: list[Tensor], present: list[bool], norm: float
    ) -> tuple[Tensor, list[Tensor | None]]:
        """What the weights and momenta that this rank owns will be; nothing that outlives the step
        is written.
        """
        bucket, h = self.bucket, self.bucket.group
        consistent, factor = h["clip"] == "consistent", clip_factor(norm, h["max_grad_norm"])
        weights: list[Tensor] = []
        momenta: list[Tensor | None] = []
        for i, g in enumerate(average):
            own = self.at(i, bucket.shards.rank)
            w = bucket.fetch_weight(i, own)
            weights.append(w)
            if not present[i]:
                momenta.append(None)
                continue
            m = bucket.state["exp_avg"][i][self.own(i)].clone()
            momenta.append(m)
            if w.numel():
                g = g * factor if consistent else g
                ops.adams(h, w, g, m, bucket.state["step"][i] + 1, 1.0 if consistent else factor)
        most = max(sum(self.sizes(rank)) for rank in range(bucket.shards.ranks))
        new = torch.cat(weights)
        return torch.nn.functional.pad(new, (0, most - new.numel())), momenta

    def commit(
        self,
        gathered: Tensor,
        momenta: list[Tensor | None],
        selection: Selection | None,
    ) -> None:
        """Weights, momenta and residuals of every tensor that has a gradient on any rank."""
        bucket, h = self.bucket, self.bucket.group
        rows = [
            row.split([*sizes, len(row) - sum(sizes)])
            for row, sizes in zip(
                gathered, map(self.sizes, range(bucket.shards.ranks)), strict=True
            )
        ]
        grads, decay = bucket.grads(), 1 - float(h["lr"]) * h["weight_decay"]
        residuals, weights = bucket.each("residual", write=True), bucket.each_weight()
        for i, (m, e, w) in enumerate(zip(momenta, residuals, weights, strict=True)):
            selecting = selection if selection and i in selection.pieces else None
            if m is None:
                if selecting:
                    selecting.choose(i, own_x(bucket, i, None))
                continue
            bucket.state["step"][i] += 1
            if bucket.compressed[i]:
                self._hold_back(i, e.view(-1), grads[i], selecting)
            bucket.state["exp_avg"][i].zero_()[self.own(i)] = m
            values, index = torch.cat([row[i] for row in rows]), self.mask.positions[i]
            if index is None:
                w.copy_(values.view(w.shape))
            else:
                # A copy where w is not contiguous.
                flat = w.mul_(decay).reshape(-1)
                flat.scatter_(0, index.long(), values)
                if not w.is_contiguous():
                    w.copy_(flat.view(w.shape))
            bucket.publish(i, w)

    def _hold_back(self, i: int, e: Tensor, g: Tensor | None, selection: Selection | None) -> None:
        """e and c of a compressed tensor; the next mask's part is selected in between."""
        state, h, (start, stop) = self.bucket.state, self.bucket.group, self.bucket.shards.own[i]
        c = state["common"][i]
        c.add_(state["exp_avg"][i], alpha=h["betas"][0])
        if g is not None and (selection or self.mask.positions[i] is not None):
            e.view(g.shape).add_(g, alpha=own_share(h))
        if selection:
            selection.choose(i, e[start:stop] + c)
        index, own = self.mask.positions[i], self.own(i)
        if index is None or isinstance(own, slice):
            e.zero_()
            c.zero_()
        else:
            e.scatter_(0, index.long(), 0)
            c.scatter_(0, own.long(), 0)
        if self.sent[0].dropped is None:
            return
        # What rounding took off is owed again.
        dropped = torch.cat([row.dropped_parts[i] for row in self.sent]).mul_(1 - h["betas"][0])
        if index is None:
            e.copy_(dropped)
        else:
            e.scatter_(0, index.long(), dropped)
