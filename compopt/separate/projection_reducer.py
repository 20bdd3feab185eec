"""SEPARATE's reducer: matrices are sent projected, the other tensors sent dense.

``ProjectionReducer`` reduces a bucket. A tensor is sent dense, or with the stack of its neighbours
that have the same projection. Its part of a payload holds what this rank sends of it, and after the
exchange the average over ranks. Lines are those of ``stacks``, where the arithmetic is.

``ProjectingOptimizer.make_reducer`` makes one for each step, and ``separate`` drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .._engine.reducer import ReduceScatterReducer
from .._ops.norms import stacked_squared_norms
from .._ops.operations import Ops
from .._state.bucket import Bucket
from .._state.masks import Mask
from .._state.next_state import NextValues, commit_next
from .._state.residuals import Residuals
from .._state.tensors import upload
from .._wire.payload import Payload
from .._wire.requests import AllReduceMean, Phase, RequestGenerator
from .matrices import RandomMatrices
from .projection_options import is_reset_step
from .stacks import (
    ProjectedStack,
    compute_cosines,
    keep_unsent_of_stack,
    multiply,
    orthonormalize_columns,
    reconstruct_rows,
)


class ProjectionReducer:
    """Does the lines of ``stacks`` for all tensors of one bucket at one step.

    ``draw_matrices`` draws R of the tensors that are projected on random columns.
    ``norm_is_reproducible`` asks for a norm that does not depend on the number of threads, since
    every rank clips by the norm that it computes. ``params_with_basis`` are the parameters whose
    basis has been computed by a step. ``on_cosines`` receives the cosines of Algorithm 3 in a step
    that adapts to them.
    """

    def __init__(
        self,
        bucket: Bucket,
        ops: Ops,
        stacks: list[ProjectedStack],
        draw_matrices: Callable[[], RandomMatrices],
        norm_is_reproducible: bool,
        params_with_basis: set[Tensor],
        on_cosines: Callable[[dict[Tensor, float]], None] | None = None,
    ):
        self.bucket, self.ops, self.stacks = bucket, ops, stacks
        self._draw_matrices, self._norm_is_reproducible = draw_matrices, norm_is_reproducible
        self._params_with_basis, self._on_cosines = params_with_basis, on_cosines
        self.stack_of = {i: stack for stack in self.stacks for i in stack.indices}
        self.dense = [i for i in range(len(bucket.params)) if i not in self.stack_of]
        kind = bucket.group["projection"]
        self.is_tracked = bool(self.stacks) and kind == "tracked"
        # the residual of a Gaussian projection is noise; that of a contraction has yet to be sent
        has_due_residual = bucket.has_residual and kind != "gaussian"
        # True if tensors that are sent dense are sent with their residuals
        self.dense_sends_residuals = bucket.is_rounded or has_due_residual
        # reduces what is not projected where the bucket is cut into shards
        self.dense_reducer: ReduceScatterReducer | None = None
        if bucket.is_sharded:
            adds_residuals = self.dense_sends_residuals
            self.dense_reducer = ReduceScatterReducer(bucket, ops, self.dense, adds_residuals)

    @property
    def phase(self) -> Phase:
        return "projected" if self.stacks else "dense"

    def reduce(self) -> RequestGenerator[Payload]:
        """Do lines 1 to 3, and for tracked tensors 6, which gives the bases of the next step."""
        dense_reducer = self.dense_reducer
        if dense_reducer is not None and not self.stacks:
            self.mean = yield from dense_reducer.reduce()
            return self.mean
        mean_of_P = None
        if self.is_tracked:
            mean_of_P = yield from self._exchange_P()
        self.draw_random_columns()
        payload = self._encode(mean_of_P)
        if self.stacks:  # copy what this rank sends: the all-reduce overwrites the payload
            sent = self._parts_of(payload, payload.body)
            sizes = [len(part) for part in sent]
            memory = self.bucket.get_memory("sent", sum(sizes), payload.body.dtype)
            copies = memory.split_with_sizes(sizes)
            torch._foreach_copy_(copies, sent)
            for stack, copy in zip(self.stacks, copies, strict=True):
                stack.sent = copy
        mean: Payload = yield AllReduceMean(payload)
        self.mean = mean
        self._subtract_rounding_errors(mean)
        for stack, part in zip(self.stacks, self._parts_of(mean, mean.body), strict=True):
            stack.mean = part
        if self.is_tracked:
            parts = [stack.mean for stack in self.stacks]
            sizes = [stack.projection.m for stack in self.stacks]
            bases = zip(self.stacks, self._orthonormalize(parts, sizes, 0), strict=True)
            self.bucket.next["basis"] = [NextValues(stack.indices, Q) for stack, Q in bases]
        if dense_reducer is not None and dense_reducer.sent_dense:
            yield from dense_reducer.reduce()
        return mean

    def _exchange_P(self) -> RequestGenerator[Payload]:
        """Do lines 1, 2a and 2b: compute R. Return the averaged payload."""
        lengths = [0] * len(self.bucket.params)
        for i, stack in self.stack_of.items():
            lengths[i] = stack.projection.d * stack.projection.r
        dtype = self.bucket.group["payload_dtype"]
        payload = self.bucket.make_payload(lengths, dtype, use=1)
        parts = self._parts_of(payload, payload.unrounded_body)
        self._multiply([stack.Q for stack in self.stacks], parts, makes_P=True, payload=payload)
        mean: Payload = yield AllReduceMean(payload.round(), has_next=True)  # line 2a
        parts, sizes = self._parts_of(mean, mean.body), [x.projection.d for x in self.stacks]
        columns = self._orthonormalize(parts, sizes, use=1)  # line 2b
        for stack, R in zip(self.stacks, columns, strict=True):
            stack.R = R
        return mean

    def _multiply(
        self,
        right: list[Tensor],
        out: list[Tensor],
        makes_P: bool = False,
        payload: Payload | None = None,
    ) -> None:
        if all(stack.residual.exact is not None for stack in self.stacks):
            inputs = self.stacks, right, out, makes_P, payload
            self.ops.run(multiply, self.bucket, *inputs)
            return
        if payload is not None:
            self.ops.write_header(payload, self.bucket.grads())
        for stack, R, part in zip(self.stacks, right, out, strict=True):
            p = part.view(len(stack.indices), -1)
            for at in stack.residual.cut():
                inputs_at = [stack.select(at)], [R[at]], [p[at].view(-1)], makes_P, None
                self.ops.run(multiply, self.bucket, *inputs_at)

    def _orthonormalize(self, parts: list[Tensor], sizes: list[int], use: int) -> list[Tensor]:
        """Return orthonormal columns of each stack's part, of matrices of this many rows."""
        shapes = [
            (len(stack.indices), n, stack.projection.r)
            for stack, n in zip(self.stacks, sizes, strict=True)
        ]
        return self.ops.run(orthonormalize_columns, self.bucket, parts, shapes, use)

    def _subtract_rounding_errors(self, mean: Payload) -> None:
        """Set ``sent`` of every stack to what the other ranks have received, after rounding. Other
        codecs have rounded the body before it was copied.
        """
        errors = mean.rounding_errors
        if self.stacks and mean.codec.bits and errors is not None:
            sent = [stack.sent for stack in self.stacks]
            torch._foreach_sub_(sent, self._parts_of(mean, errors))

    def draw_random_columns(self) -> None:
        """Draw R for line 2, which is valid until matrices of another bucket are drawn. Tracked
        columns stay as ``_exchange_P`` has computed them.
        """
        if self.is_tracked or not self.stacks:
            return
        matrices = self._draw_matrices()
        for stack in self.stacks:
            first, k = matrices[stack.indices[0]], len(stack.indices)
            assert first is not None
            # a tensor's numbers begin with a word of four
            distance = 4 * -(-first.numel() // 4)
            stack.R = first.as_strided((k, *first.shape), (distance, *first.stride()))

    def _parts_of(self, payload: Payload, memory: Tensor) -> list[Tensor]:
        """Return each stack's part of the payload's body, or of other memory in its layout."""
        starts = [0, *accumulate(payload.lengths)]
        cuts = [starts[i] for x in self.stacks for i in (x.indices.start, x.indices.stop)]
        sizes = [stop - start for start, stop in pairwise([0, *cuts, len(memory)])]
        return list(memory.split_with_sizes(sizes)[1::2])

    def _encode(self, mean_of_P: Payload | None) -> Payload:
        """Do lines 1 and 2, or 2c: make the bucket's payload.

        Its header and control fields are copied from ``mean_of_P``, the average of the first
        exchange.
        """
        bucket = self.bucket
        if not self.stacks:  # one pass, where the backend has one
            adds = self.dense_sends_residuals
            return self.ops.encode(bucket, bucket.grads(), Mask(bucket), adds)
        lengths = [0 if bucket.is_sharded else n for n in bucket.lengths]
        for i, stack in self.stack_of.items():
            lengths[i] = stack.projection.m * stack.projection.r
        if self._on_cosines:
            lengths.append(len(bucket.params))
        fields = None if mean_of_P is None else mean_of_P.fields
        payload = bucket.make_payload(lengths, bucket.group["payload_dtype"], fields=fields)
        if fields is None:
            self.ops.write_header(payload, bucket.grads())
        unrounded = payload.unrounded_body
        parts = self._parts_of(payload, unrounded)
        self._multiply([stack.R for stack in self.stacks], parts)
        if not bucket.is_sharded and self.dense:
            adds = self.dense_sends_residuals
            self.ops.run(write_dense, bucket, unrounded, payload.lengths, self.dense, adds)
        if self._on_cosines:
            payload.unrounded_parts[-1].zero_()
            for stack, part in zip(self.stacks, parts, strict=True):
                cosines = compute_cosines(stack, part)
                payload.unrounded_parts[-1][stack.indices[0] : stack.indices[-1] + 1] = cosines
        return payload.round()

    @property
    def squared_norm(self) -> Tensor | None:
        """The squared norm of the averaged gradients, one number for neighbours that are sent in
        the same way; None where it is that of the payload.

        It is the norm before reconstruction. With a Gaussian R the mean of |h R|^2 / r is |h|^2;
        orthonormal columns give the norm of the part of h that they span.
        """
        if not self.stacks or self.is_tracked:
            return None
        lengths = self.mean.lengths[: len(self.bucket.params)]
        scales: list[float] = []
        sizes: list[int] = []
        for i, n in enumerate(lengths):
            scale = self.stack_of[i].projection.scale if i in self.stack_of else 1.0
            if not scales or scale != scales[-1]:
                scales.append(scale)
                sizes.append(0)
            sizes[-1] += n
        parts = self.mean.body[: sum(sizes)].split(sizes)
        squares = stacked_squared_norms(parts, self._norm_is_reproducible)
        return squares * upload(scales, torch.float64, self.mean.flat.device)

    def drop_absent(self, given: list[bool]) -> Tensor | None:
        """Set what the average has of tensors without a gradient on any rank to zero; return the
        squared norm anew.
        """
        self.mean.clear_parts(given)
        return self.squared_norm

    # Inside FSDP2: this rank's shard of the average

    def read_owned_averages(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Do line 4 for the rows that this rank owns."""
        self.draw_random_columns()
        reducer = self.dense_reducer
        dense_parts = iter(() if reducer is None else reducer.read_owned_averages(dtype))
        for i in range(len(self.bucket.params)):
            if i not in self.stack_of:
                yield next(dense_parts)
                continue
            stack = self.stack_of[i]
            start, stop = (
                at // stack.projection.columns for at in self.bucket.shards.own_ranges[i]
            )
            number = i - stack.indices[0]
            yield reconstruct_rows(stack, number, self.mean.parts[i], start, stop).reshape(-1)

    def keep_unsent(self, have_gradients: list[bool]) -> None:
        """Do line 5 inside FSDP2, where the average is not clipped yet; under DDP
        ``update_tensors`` does it, by ``keep_unsent_of_stack`` and ``keep_unsent_dense``.
        """
        reducer = self.dense_reducer
        if reducer is not None and reducer.sent_dense:
            reducer.keep_unsent(have_gradients)
        for stack in self.stacks_with_gradients(have_gradients):
            keep_unsent_of_stack(stack, 1.0)

    # Under DDP: the commit of unsharded tensors

    def stacks_with_gradients(self, have_gradients: Sequence[bool]) -> Iterator[ProjectedStack]:
        """Iterate over the stacks, without the tensors that no rank has a gradient of."""
        for whole in self.stacks:
            for at in whole.residual.cut():
                stack = whole if len(whole.indices[at]) == len(whole.indices) else whole.select(at)
                flags = [have_gradients[i] for i in stack.indices]
                if all(flags):
                    yield stack
                    continue
                changes = [n for n in range(1, len(flags)) if flags[n] != flags[n - 1]]
                for first, last in pairwise([0, *changes, len(flags)]):
                    if flags[first]:
                        yield stack.select(slice(first, last))

    def keep_unsent_dense(self, indices: Sequence[int], mean: Payload, factor: float) -> None:
        """Set the residuals of tensors that were sent dense to their rounding errors.

        ``factor`` has clipped the average. Of the old residual 1 - ``factor`` stays; of the new
        rounding error ``factor`` is added. A residual that was not sent, the noise of an unbiased
        projection, is dropped.
        """
        is_rounded = mean.rounding_errors is not None
        if not (is_rounded or self.bucket.has_residual):
            return
        for batch in Residuals(self.bucket).batches(indices, write=True):
            residuals = [e.view(-1) for _, e in batch]
            torch._foreach_mul_(residuals, 1 - factor if self.dense_sends_residuals else 0.0)
            if is_rounded:
                errors = [mean.rounding_error_parts[i] for i, _ in batch]
                torch._foreach_add_(residuals, errors, alpha=factor)

    def commit_state(self, have_gradients: list[bool], factor: float) -> None:
        """Reset residuals where they are due, commit the next bases, and report the cosines."""
        bucket, group = self.bucket, self.bucket.group
        if is_reset_step(group, group["step"] + 1):
            Residuals(bucket).clear()
        commit_next(bucket, have_gradients)
        if self.is_tracked:
            updated = [bucket.model_params[i] for i in self.stack_of if have_gradients[i]]
            self._params_with_basis.update(updated)
        remains = not all(have_gradients) or (self.dense_sends_residuals and factor != 1)
        bucket.cache["has_residual"] = bool(self.stacks) or (bucket.has_residual and remains)
        if self._on_cosines:
            cosines = self.mean.parts[-1].tolist()  # means over ranks
            self._on_cosines(
                {bucket.params[i]: cosines[i] for i in self.stack_of if have_gradients[i]}
            )

    # For fused implementations of lines 4 and 5 with AdamW

    @property
    def tracked_stacks(self) -> list[ProjectedStack]:
        """The stacks whose averaged gradients are ``R p^T``, p the stack's ``mean``."""
        return self.stacks if self.is_tracked else []

    def list_dense(self, indices: Sequence[int]) -> list[int]:
        """Return those of ``indices`` that are in no stack."""
        return [i for i in indices if i not in self.stack_of]

    def error_share(self, factor: float) -> float:
        """Return the weight of the new error of a product, where ``factor`` clips the average."""
        stacks = self.tracked_stacks  # of one group, and so of one beta
        return factor * (1 - stacks[0].projection.beta) if stacks else 0.0


def write_dense(
    bucket: Bucket,
    ops: Ops,
    memory: Tensor,
    lengths: Sequence[int],
    indices: Sequence[int],
    adds_residuals: bool,
) -> None:
    """Write gradients that are sent dense to their places in ``memory``, which has parts of these
    lengths; with their residuals if ``adds_residuals``.
    """
    grads, of_all = bucket.grads(), memory[: sum(lengths)].split([*lengths])
    pairs = [(of_all[i], grads[i]) for i in indices]
    given = [(part, g.reshape(-1)) for part, g in pairs if g is not None]
    absent = [part for part, g in pairs if g is None]
    if given:
        torch._foreach_copy_([part for part, _ in given], [g for _, g in given])
    if absent:
        torch._foreach_zero_(absent)
    if adds_residuals:
        Residuals(bucket).add_to([(i, of_all[i]) for i in indices])
