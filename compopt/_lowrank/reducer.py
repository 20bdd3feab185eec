"""SEPARATE's reducer: matrices are sent projected, the other tensors whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._engine.reducer import WholeReducer
from .._ops.norms import clip_factor, stacked_squared_norms
from .._ops.operations import Ops
from .._ops.updates import Factored
from .._state.buckets import Bucket
from .._state.masks import Mask
from .._state.tensors import upload
from .._wire.payload import Payload
from .._wire.requests import AllReduceMean, RequestGenerator
from .matrices import RandomMatrices
from .options import is_clipped, is_reset_step
from .projections import orthonormalize_each
from .tensors import ProjectedTensor, TrackedTensor, WholeTensor


@dataclass(frozen=True)
class Encoding:
    """Encoding of the tensors of one bucket at one step.

    ``draw_matrices`` draws R of those that are projected on random columns. ``local_factor`` clips
    the local gradient. ``norm_is_exact`` asks for a norm that does not depend on the number of
    threads, since every rank clips by the norm that it computes. ``params_with_basis`` are the
    parameters whose basis has been computed by a step. ``on_cosines`` receives the cosines of
    Algorithm 3 in a step that adapts to them. ``whole_reducer`` reduces what is not projected where
    the bucket is cut into shards.
    """

    tensors: Sequence[WholeTensor | ProjectedTensor]
    draw_matrices: Callable[[], RandomMatrices]
    local_factor: float
    sends_residuals: bool
    norm_is_exact: bool
    params_with_basis: set[Tensor]
    on_cosines: Callable[[dict[Tensor, float]], None] | None = None
    whole_reducer: WholeReducer | None = None


class ProjectionReducer:
    """Lines 1 to 5 of Algorithm 1, for all tensors of one bucket."""

    def __init__(self, bucket: Bucket, ops: Ops, encoding: Encoding):
        self.bucket, self.ops, self.encoding = bucket, ops, encoding
        self.tensors, self.local_factor = encoding.tensors, encoding.local_factor
        # tensors by their index in the bucket
        pairs = [*enumerate(self.tensors)]
        self.projected = {i: x for i, x in pairs if isinstance(x, ProjectedTensor)}
        self.tracked = {i: x for i, x in pairs if isinstance(x, TrackedTensor)}
        self.next_bases: dict[int, Tensor] = {}

    @property
    def phase(self) -> str:
        return "projected" if self.projected else "dense"

    def reduce(self) -> RequestGenerator[Payload]:
        """Lines 1 to 3. Tracked tensors exchange P first, and compute the next basis from p."""
        whole_reducer = self.encoding.whole_reducer
        if whole_reducer is not None and not self.projected:
            self.mean = yield from whole_reducer.reduce()
            return self.mean
        mean_of_P = None
        if self.tracked:
            mean_of_P = yield from self._exchange_P()
        self.draw_matrices()
        payload = self._encode(mean_of_P)
        if self.projected:  # copy what this rank sends: the all-reduce overwrites the payload
            parts = [payload.parts[i] for i in self.projected]
            memory = torch.empty_like(payload.body[: sum(map(len, parts))])
            copies = list(memory.split([len(part) for part in parts]))
            torch._foreach_copy_(copies, parts)
            for tensor, copy in zip(self.projected.values(), copies, strict=True):
                tensor.p = copy
        mean: Payload = yield AllReduceMean(payload)
        self.mean = mean
        averages = [x.q.view_as_projected(mean.parts[i]) for i, x in self.tracked.items()]
        self.next_bases = dict(zip(self.tracked, orthonormalize_each(averages), strict=True))
        if whole_reducer is not None and whole_reducer.sent_whole:
            yield from whole_reducer.reduce()
        return mean

    def _exchange_P(self) -> RequestGenerator[Payload]:
        """Lines 1 and 2 of ``TrackedTensor``: compute R of each. Returns the averaged payload."""
        lengths = [0] * len(self.tensors)
        for i, tensor in self.tracked.items():
            lengths[i] = tensor.q.d * tensor.q.r
        dtype = self.bucket.group["payload_dtype"]
        payload = self.bucket.make_payload(lengths, dtype, use=1)
        self.ops.write_header(payload, self.bucket.grads())
        for i, tensor in self.tracked.items():
            P = tensor.view_as_P(payload.exact[i])
            tensor.multiply_h(tensor.Q, P, transposed=True)
        mean: Payload = yield AllReduceMean(payload.round(), has_next=True)  # line 1
        averages = [x.view_as_P(mean.parts[i]).to(x.Q.dtype) for i, x in self.tracked.items()]
        bases = orthonormalize_each(averages)
        for tensor, R in zip(self.tracked.values(), bases, strict=True):  # line 2
            tensor.R = R
        return mean

    def draw_matrices(self) -> None:
        """Line 2: draw R, valid until matrices of another bucket are drawn."""
        for tensor, R in zip(self.tensors, self.encoding.draw_matrices(), strict=True):
            if isinstance(tensor, ProjectedTensor) and R is not None:
                tensor.R = R

    def _encode(self, mean_of_P: Payload | None) -> Payload:
        """Lines 1 and 2: make the bucket's payload.

        Its header is copied from ``mean_of_P``, on which all ranks have agreed already.
        """
        bucket, encoding = self.bucket, self.encoding
        if not self.projected and self.local_factor == 1:  # one pass, where the backend has one
            residual: list[Tensor | None] = [*bucket.state["residual"]]
            add = residual if encoding.sends_residuals else None
            return self.ops.encode(bucket, bucket.grads(), Mask(bucket), add)
        lengths = [tensor.length for tensor in self.tensors]
        if encoding.on_cosines:
            lengths.append(len(self.tensors))
        payload = bucket.make_payload(lengths, bucket.group["payload_dtype"])
        if mean_of_P is None:
            self.ops.write_header(payload, bucket.grads())
        else:
            header_length = len(payload.flat) - len(payload.body)
            payload.flat[:header_length].copy_(mean_of_P.flat[:header_length])
        for i, tensor in self.projected.items():
            tensor.multiply_h(tensor.R, tensor.q.view_as_projected(payload.exact[i]))
        self._write_whole_tensors(payload)
        if encoding.on_cosines:
            payload.exact[-1].zero_()
            for i, projected in self.projected.items():
                payload.exact[-1][i] = projected.compute_cosine(payload.exact[i])
        return payload.round()

    def _write_whole_tensors(self, payload: Payload) -> None:
        pairs = zip(self.tensors, payload.exact, strict=False)
        uncompressed = [(tensor, part) for tensor, part in pairs if isinstance(tensor, WholeTensor)]
        present = [(part, x.grad.reshape(-1)) for x, part in uncompressed if x.grad is not None]
        if present:
            parts = [part for part, _ in present]
            torch._foreach_copy_(parts, [g for _, g in present])
            if self.local_factor != 1:
                torch._foreach_mul_(parts, self.local_factor)
        for tensor, part in uncompressed:
            if tensor.grad is None:
                part.zero_()
            if tensor.residual is not None and tensor.sends_residual:
                part.add_(tensor.residual.view(-1))

    def squared_norm(self) -> Tensor | None:
        """Return the squared norm of the averaged gradients, one number for each tensor; None where
        it is that of the payload.

        It is the norm before reconstruction. With a Gaussian R the mean of |h R|^2 / r is |h|^2;
        orthonormal columns give the norm of the part of h that they span.
        """
        if not self.projected:
            return None
        parts = self.mean.parts[: len(self.tensors)]
        squares = stacked_squared_norms(parts, self.encoding.norm_is_exact)
        scales = [
            self.projected[i].q.scale if i in self.projected else 1.0 for i in range(len(parts))
        ]
        if {*scales} == {1.0}:
            return squares
        return squares * upload(scales, torch.float64, self.mean.flat.device)

    # Inside FSDP2: this rank's shard of the average

    def own_parts(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Line 4, for the rows that this rank owns."""
        self.draw_matrices()
        reducer = self.encoding.whole_reducer
        uncompressed = iter(() if reducer is None else reducer.own_parts(dtype))
        for i in range(len(self.tensors)):
            if i in self.projected:
                start, stop = self.bucket.shards.own_ranges[i]
                tensor, width = self.projected[i], self.projected[i].q.columns
                rows = tensor.reconstruct_rows(self.mean.parts[i], start // width, stop // width)
                yield rows.reshape(-1)
            else:
                yield next(uncompressed)

    def feed_back(self, present: list[bool]) -> None:
        """Line 5, where the average is not clipped."""
        reducer = self.encoding.whole_reducer
        if reducer is not None and reducer.sent_whole:
            reducer.feed_back(present)
        for i, tensor in self.projected.items():
            if present[i]:
                tensor.feed_back(self.mean, i, 1.0)

    def next_state(self, i: int) -> dict[str, Tensor]:
        return {"basis": self.next_bases[i]} if i in self.next_bases else {}

    # Under DDP: the commit of whole tensors

    def clip_factor(self, norm: float) -> float:
        """Return the factor that clips the averaged gradient."""
        h = self.bucket.group
        return clip_factor(norm, h["max_grad_norm"]) if is_clipped(h, "average") else 1.0

    def commit_state(self, present: list[bool], factor: float) -> None:
        """Reset residuals where they are due, store the next bases, and report the cosines."""
        bucket, h = self.bucket, self.bucket.group
        if is_reset_step(h, h["step"] + 1):
            bucket.flat["residual"].zero_()
        updated = [i for i in self.next_bases if present[i]]
        if updated:
            state = [bucket.state["basis"][i].view(self.next_bases[i].shape) for i in updated]
            torch._foreach_copy_(state, [self.next_bases[i] for i in updated])
            self.encoding.params_with_basis.update(bucket.origins[i] for i in updated)
        remains = not all(present) or (self.encoding.sends_residuals and factor != 1)
        bucket.cache["has_residual"] = bool(self.projected) or (bucket.has_residual and remains)
        if self.encoding.on_cosines:
            cosines = self.mean.parts[-1].tolist()  # means over ranks
            self.encoding.on_cosines(
                {bucket.params[i]: cosines[i] for i in self.projected if present[i]}
            )

    # For fused implementations of lines 4 and 5 with AdamW (see ``_ops.updates``)

    @property
    def has_factors(self) -> bool:
        """True where every averaged gradient is whole, or a product of narrow matrices."""
        return len(self.projected) == len(self.tracked)

    def list_factored(self, mean: Payload, present: Sequence[int]) -> list[Factored]:
        return [self.tracked[i].factors(i, mean) for i in present if i in self.tracked]

    def list_whole(self, present: Sequence[int]) -> list[int]:
        return [i for i in present if i not in self.projected]

    def feed_back_whole(self, i: int, mean: Payload, factor: float) -> None:
        self.tensors[i].feed_back(mean, i, factor)

    def error_share(self, factor: float) -> float:
        shares = [1 - tensor.q.beta for tensor in self.tracked.values()]
        return factor * shares[0] if shares else 0.0
