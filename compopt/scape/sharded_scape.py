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

The residual of the replicated form is e_n + c. That form adds b1 m to the residual of every rank;
here b1 m is added once, to c. So both forms agree to rounding, and the masks of owners and replicas
are of the same step (the paper's are one step apart, and its line 12, a dense reduce-scatter, is
not needed).

The payload is x_n / (1 - b1) on M, as in the replicated form.

``ScapeAdamS.algorithm`` chooses between it and ``scape``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.norms import clip_factor, stacked_squared_norms
from .._ops.operations import Ops
from .._state.bucket import Bucket
from .._state.masks import Mask, Tensors
from .._state.residuals import Residuals
from .._wire.payload import Payload
from .._wire.requests import Agree, AllGather, ReadyToCommit, ReduceScatterMean, RequestGenerator
from .momenta import gradient_weight
from .scape_masks import Selection, exchange_masks, mask_to_send, next_mask_partition


def sharded_scape(bucket: Bucket, ops: Ops) -> RequestGenerator[None]:
    """Algorithm 2, one bucket, one step."""
    grads, mask, shards = bucket.grads(), mask_to_send(bucket), bucket.shards
    partition = next_mask_partition(bucket, shards.ranks)  # cut as the state is
    selection = Selection(bucket, ops, partition, shards.rank) if partition else None
    owned = OwnedElements(bucket, mask)
    sent, flat = encode_for_owners(bucket, ops, owned, grads)
    row = yield ReduceScatterMean(flat, [payload.flat.numel() for payload in sent])
    mean = sent[shards.rank].with_flat(row)
    average = decode_average(bucket, owned, mean)  # line 14

    def drop_absent(given: list[bool]) -> Tensor:
        mean.clear_parts(given)
        absent = [g for g, is_given in zip(average, given, strict=True) if not is_given]
        torch._foreach_zero_(absent)
        return stacked_squared_norms(average)

    phase, squared = mask.phase, stacked_squared_norms(average)
    norm = yield Agree(mean, phase, squared, covers_shard_only=True, drop_absent=drop_absent)

    weights, momenta = step_owned(bucket, ops, owned, average, mean.have_gradients, norm)
    gathered, bucket.parameter_bytes = weights.unsqueeze(0), 0
    if shards.ranks > 1:
        gathered = yield AllGather(weights)  # line 4
        bucket.parameter_bytes = weights.nbytes
    yield ReadyToCommit()  # from here on state changes
    commit_step(bucket, owned, sent, gathered, momenta, selection)
    yield from exchange_masks(bucket, mask, mean, selection)  # line 9


class OwnedElements:
    """The exchanged elements (those on a mask) that each rank owns."""

    def __init__(self, bucket: Bucket, mask: Mask):
        self.bucket, self.positions = bucket, mask.positions
        # for each tensor: where each rank's elements begin among the exchanged ones, and their end
        self.bounds: list[list[int]] = []
        for i, (index, n) in enumerate(zip(mask.positions, bucket.lengths, strict=True)):
            starts = [ranges[i][0] for ranges in bucket.shards.ranges]
            if index is None:
                self.bounds.append([*starts, n])
                continue
            edges = torch.tensor(starts, dtype=index.dtype, device=index.device)
            self.bounds.append([*torch.searchsorted(index, edges).tolist(), len(index)])

    def sizes(self, rank: int) -> list[int]:
        """Return how many elements of each tensor ``rank`` owns."""
        return [bounds[rank + 1] - bounds[rank] for bounds in self.bounds]

    def of_tensor(self, i: int, rank: int) -> Tensor | slice:
        """Return which elements of flattened tensor i ``rank`` owns."""
        part, index = slice(*self.bounds[i][rank : rank + 2]), self.positions[i]
        return part if index is None else index[part].long()

    def of_shard(self, i: int) -> Tensor | slice:
        """Return this rank's elements of tensor i, counted from the start of its shard."""
        elements = self.of_tensor(i, self.bucket.shards.rank)
        start, stop = self.bucket.shards.own_ranges[i]
        return slice(0, stop - start) if isinstance(elements, slice) else elements - start


def compute_owned_x(bucket: Bucket, i: int) -> Tensor:
    """Return b1 m + c plus the residual on this rank's shard of tensor i, which has no gradient, in
    new memory.
    """
    state, beta1 = bucket.state, bucket.group["betas"][0]
    start, stop = bucket.shards.own_ranges[i]
    x = bucket.fetch_state("residual", i, slice(start, stop)).add_(state["common"][i])
    return x.add_(state["exp_avg"][i], alpha=beta1)


def encode_for_owners(
    bucket: Bucket, ops: Ops, owned: OwnedElements, grads: Tensors
) -> tuple[list[Payload], Tensor]:
    """Return a payload for every owner, x_n / (1 - b1) at its elements, and the memory of all."""
    group, ranks = bucket.group, range(bucket.shards.ranks)
    lengths = [owned.sizes(rank) for rank in ranks]
    payloads, flat = bucket.make_payloads(lengths, group["payload_dtype"])
    ops.write_header(payloads[0], grads)
    for payload in payloads[1:]:
        payload.header.copy_(payloads[0].header)
    for i, (g, e) in enumerate(zip(grads, Residuals(bucket).iterate(), strict=True)):
        for rank, payload in enumerate(payloads):
            elements, part = owned.of_tensor(i, rank), payload.unrounded_parts[i]
            part.zero_() if g is None else part.copy_(g.reshape(-1)[elements])
            if group["maximize"]:
                part.neg_()
            if e is not None:
                part.add_(e.view(-1)[elements], alpha=1 / (1 - group["betas"][0]))
    return [payload.round() for payload in payloads], flat


def decode_average(bucket: Bucket, owned: OwnedElements, mean: Payload) -> list[Tensor]:
    """Return G at the elements that this rank owns of each tensor."""
    wide = torch.promote_types(bucket.dtype, torch.float32)
    scale, averages = 1 / (1 - bucket.group["betas"][0]), []
    for i, (part, common) in enumerate(zip(mean.parts, bucket.state["common"], strict=True)):
        average = part.to(wide)
        if common is not None:
            average = average.add(common[owned.of_shard(i)], alpha=scale)
        averages.append(average)
    return averages


def step_owned(
    bucket: Bucket,
    ops: Ops,
    owned: OwnedElements,
    average: list[Tensor],
    have_gradients: list[bool],
    norm: float,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the new weights and momenta of the owned elements (line 15). Nothing that outlives the
    step is written.

    Weights are padded to the length of the rank that owns most; a momentum is None where no rank
    has a gradient.
    """
    group, rank = bucket.group, bucket.shards.rank
    factor = clip_factor(norm, group["max_grad_norm"])
    on_average, clip_factor_in_v = (factor, 1.0) if group["clip"] == "consistent" else (1.0, factor)
    weights: list[Tensor] = []
    momenta: list[Tensor | None] = []
    for i, (g, has_gradient) in enumerate(zip(average, have_gradients, strict=True)):
        w = bucket.fetch_weight(i, owned.of_tensor(i, rank))
        m = bucket.state["exp_avg"][i][owned.of_shard(i)].clone() if has_gradient else None
        weights.append(w)
        momenta.append(m)
        if m is not None and w.numel():
            ops.adams(group, w, g * on_average, m, bucket.state["step"][i] + 1, clip_factor_in_v)
    longest = max(sum(owned.sizes(rank)) for rank in range(bucket.shards.ranks))
    new = torch.cat(weights)
    return torch.nn.functional.pad(new, (0, longest - new.numel())), momenta


def commit_step(
    bucket: Bucket,
    owned: OwnedElements,
    sent: list[Payload],
    gathered: Tensor,
    momenta: list[Tensor | None],
    selection: Selection | None,
) -> None:
    """Write weights, momenta and residuals of every tensor with a gradient on any rank."""
    group, state, grads, shards = bucket.group, bucket.state, bucket.grads(), bucket.shards
    lengths = map(owned.sizes, range(shards.ranks))
    rows = [
        row.split([*sizes, len(row) - sum(sizes)])
        for row, sizes in zip(gathered, lengths, strict=True)
    ]
    residuals, weights = Residuals(bucket).iterate(write=True), bucket.iterate_weights()
    for i, (m, e, w) in enumerate(zip(momenta, residuals, weights, strict=True)):
        selects = selection if selection and i in selection.slices else None
        if m is None:
            if selects:
                selects.select(i, compute_owned_x(bucket, i))
            continue
        state["step"][i] += 1
        if bucket.compressed[i]:
            update_residuals(bucket, owned, sent, i, e.view(-1), grads[i], selects)
        state["exp_avg"][i].zero_()[owned.of_shard(i)] = m
        values, index = torch.cat([row[i] for row in rows]), owned.positions[i]
        if index is None:
            w.copy_(values.view(w.shape))  # line 4
        else:
            flat = w.mul_(1 - float(group["lr"]) * group["weight_decay"]).reshape(-1)  # line 5
            flat.scatter_(0, index.long(), values)  # line 4
            if not w.is_contiguous():  # then ``flat`` is a copy
                w.copy_(flat.view(w.shape))
            del flat
        del values
        bucket.publish_master(i, w)


def update_residuals(
    bucket: Bucket,
    owned: OwnedElements,
    sent: list[Payload],
    i: int,
    e: Tensor,
    g: Tensor | None,
    selection: Selection | None,
) -> None:
    """Update e and c of a compressed tensor; the next mask is selected in between."""
    state, group, (start, stop) = bucket.state, bucket.group, bucket.shards.own_ranges[i]
    c, index, own_index = state["common"][i], owned.positions[i], owned.of_shard(i)
    c.add_(state["exp_avg"][i], alpha=group["betas"][0])
    if g is not None and (selection or index is not None):
        e.view(g.shape).add_(g, alpha=gradient_weight(group))
    if selection:
        selection.select(i, e[start:stop] + c)
    if index is None or isinstance(own_index, slice):
        e.zero_()
        c.zero_()
    else:
        e.scatter_(0, index.long(), 0)
        c.scatter_(0, own_index.long(), 0)
    if sent[0].rounding_errors is None:
        return
    # The residual is 0 on the mask: the rounding error goes there.
    rounding_errors = torch.cat([payload.rounding_error_parts[i] for payload in sent]).mul_(
        1 - group["betas"][0]
    )
    if index is None:
        e.copy_(rounding_errors)
    else:
        e.scatter_(0, index.long(), rounding_errors)


def add_common_residual(bucket: Bucket) -> None:
    """Add the gathered common residual to each rank's own, and clear it; without sharded state
    there is none.
    """
    gathered = bucket.gathered_state.get("common", [])
    known = [(i, common) for i, common in enumerate(gathered) if common is not None]
    Residuals(bucket).add(known)
    for _, common in known:
        common.zero_()
    if "common" in bucket.flat:
        bucket.flat["common"].zero_()
