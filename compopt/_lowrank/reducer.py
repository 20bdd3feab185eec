"""SEPARATE's reducer: matrices are sent projected, the other tensors whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

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
from .options import clips_average, forgets
from .tensors import ProjectedTensor, WholeTensor
from .tracking import TrackedTensor, find_columns, next_bases


@dataclass(frozen=True)
class Encoding:
    """How the tensors of one bucket are sent at one step.

    ``draw_matrices`` draws R of those that are projected on random columns. ``local_factor`` clips
    the local gradient. ``on_cosines`` takes the cosines of Algorithm 3, at a step that adapts to
    them. ``norm_is_exact``: every rank clips by the norm that it finds, which must not depend on
    the number of threads. ``with_basis``: the parameters for which a step has found columns to
    begin with. ``others``: reduces what is not projected, where the bucket is cut into shards.
    """

    tensors: Sequence[WholeTensor | ProjectedTensor]
    draw_matrices: Callable[[], list[Tensor | None]]
    local_factor: float
    sends_residuals: bool
    norm_is_exact: bool
    with_basis: set[Tensor]
    on_cosines: Callable[[dict[Tensor, float]], None] | None = None
    others: WholeReducer | None = None


class ProjectionReducer:
    """Lines 1 to 5 of Algorithm 1, for all tensors of one bucket."""

    def __init__(self, bucket: Bucket, ops: Ops, how: Encoding):
        self.bucket, self.ops, self.how = bucket, ops, how
        self.tensors, self.others = how.tensors, how.others
        self.projects = any(isinstance(tensor, ProjectedTensor) for tensor in self.tensors)
        # what tracked tensors begin with in the next step, by their numbers
        self.bases: dict[int, Tensor] = {}

    @property
    def phase(self) -> str:
        return "projected" if self.projects else "dense"

    @cached_property
    def tracked(self) -> dict[int, TrackedTensor]:
        pairs = enumerate(self.tensors)
        return {i: tensor for i, tensor in pairs if isinstance(tensor, TrackedTensor)}

    def reduce(self) -> RequestGenerator[Payload]:
        """Lines 1 to 3."""
        if self.others is not None and not self.projects:
            self.mean = yield from self.others.reduce()
            return self.mean
        agreed = None
        if self.tracked:
            agreed = yield from find_columns(self.bucket, self.ops, self.tracked)
        self.draw_matrices()
        payload = self.encode(agreed)
        self.keep_sent(payload)
        mean: Payload = yield AllReduceMean(payload)
        self.mean = mean
        bases = next_bases(self.tracked, mean)
        self.bases = dict(zip(self.tracked, bases, strict=True))
        if self.others is not None and self.others.sent_whole:
            yield from self.others.reduce()
        return mean

    def draw_matrices(self) -> None:
        """Line 2, R: valid until matrices of another bucket are drawn."""
        for tensor, R in zip(self.tensors, self.how.draw_matrices(), strict=True):
            if isinstance(tensor, ProjectedTensor) and R is not None:
                tensor.R = R

    def encode(self, agreed: Payload | None) -> Payload:
        """Lines 1 and 2: the bucket's payload. ``agreed``: one before it, whose header is known."""
        bucket, how = self.bucket, self.how
        if not self.projects and how.local_factor == 1:  # in one pass, where the back end has one
            residual: list[Tensor | None] = [*bucket.state["residual"]]
            add = residual if how.sends_residuals else None
            return self.ops.encode(bucket, bucket.grads(), Mask(bucket), add)
        lengths = [tensor.length for tensor in self.tensors]
        cosines = [len(lengths)] if how.on_cosines else []
        payload = bucket.make_payload(lengths + cosines, bucket.group["payload_dtype"])
        if agreed is None:
            self.ops.write_header(payload, bucket.grads())
        else:
            words = len(payload.flat) - len(payload.body)
            payload.flat[:words].copy_(agreed.flat[:words])
        for tensor, part in zip(self.tensors, payload.exact, strict=False):
            if isinstance(tensor, ProjectedTensor):
                tensor.project(part)
        self._write_whole(payload)
        if how.on_cosines:
            for i, tensor in enumerate(self.tensors):
                payload.exact[-1][i] = tensor.cosine(payload.exact[i])
        return payload.round()

    def _write_whole(self, payload: Payload) -> None:
        """The tensors that are not projected, into their parts."""
        pairs = zip(self.tensors, payload.exact, strict=False)
        whole = [(tensor, part) for tensor, part in pairs if isinstance(tensor, WholeTensor)]
        present = [(part, x.grad.reshape(-1)) for x, part in whole if x.grad is not None]
        if present:
            parts = [part for part, _ in present]
            torch._foreach_copy_(parts, [g for _, g in present])
            if self.how.local_factor != 1:
                torch._foreach_mul_(parts, self.how.local_factor)
        for tensor, part in whole:
            if tensor.grad is None:
                part.zero_()
            if tensor.residual is not None and tensor.sends_residual:
                part.add_(tensor.residual.view(-1))

    def keep_sent(self, payload: Payload) -> None:
        """Copy what this rank sends of projected tensors: the payload becomes the average."""
        pairs = zip(self.tensors, payload.parts, strict=False)
        sent = [(tensor, part) for tensor, part in pairs if isinstance(tensor, ProjectedTensor)]
        if sent:
            parts = [part for _, part in sent]
            memory = torch.empty_like(payload.body[: sum(map(len, parts))])
            copies = list(memory.split([len(part) for part in parts]))
            torch._foreach_copy_(copies, parts)
            for (tensor, _), copy in zip(sent, copies, strict=True):
                tensor.p = copy

    def squared_norm(self) -> Tensor | None:
        """The squared norm of what is averaged, a number for each tensor; None where it is that of
        the payload.
        """
        if not self.projects:
            return None
        parts = self.mean.parts[: len(self.tensors)]
        squares = stacked_squared_norms(parts, self.how.norm_is_exact)
        scales = [tensor.square_scale for tensor in self.tensors]
        if {*scales} == {1.0}:
            return squares
        return squares * upload(scales, torch.float64, self.mean.flat.device)

    # This rank's shard of the average, inside FSDP

    def own_parts(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Line 4, of the rows that this rank owns."""
        self.draw_matrices()
        whole = iter(() if self.others is None else self.others.own_parts(dtype))
        for i, tensor in enumerate(self.tensors):
            if isinstance(tensor, ProjectedTensor):
                start, stop = self.bucket.shards.own[i]
                width = tensor.q.columns
                part = self.mean.parts[i]
                yield tensor.reconstruct_rows(part, start // width, stop // width).reshape(-1)
            else:
                yield next(whole)

    def feed_back(self, present: list[bool]) -> None:
        """Line 5, where the average is not clipped."""
        if self.others is not None and self.others.sent_whole:
            self.others.feed_back(present)
        for i, tensor in enumerate(self.tensors):
            if present[i] and isinstance(tensor, ProjectedTensor):
                tensor.feed_back(self.mean, i, 1.0)

    def next_state(self, i: int) -> dict[str, Tensor]:
        return {"basis": self.bases[i]} if i in self.bases else {}

    # The commit, of whole tensors

    def clip_factor(self, norm: float) -> float:
        """What clips the averaged gradient, where that is clipped."""
        h = self.bucket.group
        return clip_factor(norm, h["max_grad_norm"]) if clips_average(h) else 1.0

    def commit_state(self, present: list[bool], factor: float) -> None:
        """Forget residuals where it is time, and keep what the next step begins with."""
        bucket, h = self.bucket, self.bucket.group
        if forgets(h, h["step"] + 1):
            bucket.flat["residual"].zero_()
        kept = [i for i in self.bases if present[i]]
        if kept:
            state = [bucket.state["basis"][i].view(self.bases[i].shape) for i in kept]
            torch._foreach_copy_(state, [self.bases[i] for i in kept])
            self.how.with_basis.update(bucket.origins[i] for i in kept)
        remains = not all(present) or (self.how.sends_residuals and factor != 1)
        bucket.cache["has_residual"] = self.projects or (bucket.has_residual and remains)
        if self.how.on_cosines:
            self.how.on_cosines(self._cosines(present))

    def _cosines(self, present: list[bool]) -> dict[Tensor, float]:
        """The mean over ranks, of each projected tensor of which any has a gradient."""
        params, cosines = self.bucket.params, self.mean.parts[-1].tolist()
        pairs = enumerate(zip(self.tensors, present, strict=True))
        projected = [i for i, (x, here) in pairs if here and isinstance(x, ProjectedTensor)]
        return {params[i]: cosines[i] for i in projected}

    # What a back end needs that fuses lines 4 and 5 with AdamW (see ``_ops.updates``)

    @property
    def has_factors(self) -> bool:
        """Whether every averaged gradient is whole, or a product that needs no other matrices."""
        return all(isinstance(tensor, TrackedTensor | WholeTensor) for tensor in self.tensors)

    @property
    def clipped(self) -> float:
        return self.how.local_factor

    def factored(self, mean: Payload, present: Sequence[int]) -> list[Factored]:
        return [self.tracked[i].factored(i, mean) for i in present if i in self.tracked]

    def whole(self, present: Sequence[int]) -> list[int]:
        return [i for i in present if isinstance(self.tensors[i], WholeTensor)]

    def feed_back_whole(self, i: int, mean: Payload, factor: float) -> None:
        self.tensors[i].feed_back(mean, i, factor)

    def share(self, factor: float) -> float:
        kept = [1 - tensor.q.beta for tensor in self.tracked.values()]
        return factor * kept[0] if kept else 0.0
