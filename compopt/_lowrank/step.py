"""One bucket at one step: how each of its tensors is sent, and the message that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .._ops.norms import clip_factor, stacked_squared_norms
from .._ops.operations import Ops
from .._ops.updates import Factored
from .._state.buckets import Bucket, upload
from .._state.masks import Mask
from .._wire.payload import Payload
from .._wire.requests import RequestGenerator, RunBatched
from .options import clips_average, forgets
from .sent import Projected, Sent, Whole, keep, write
from .tracking import Tracked, follow, follow_all, next_bases, track


@dataclass
class Projections:
    """How one bucket is projected at one step.

    ``tensors`` says how each tensor is sent, ``draw_matrices`` makes the random matrices of those
    that are projected on such. ``clipped`` is the factor on the local gradient; ``sends``: tensors
    sent whole take along what is owed of them. ``found`` takes the cosines of Algorithm 3, at a
    step that adapts to them. ``alike``: the averaged gradient is clipped by the norm that each rank
    finds, so it must not depend on the number of threads.
    """

    bucket: Bucket
    ops: Ops
    tensors: list[Sent]
    draw_matrices: Callable[[], list[Tensor | None]]
    clipped: float
    sends: bool
    found: Callable[[dict[Tensor, float]], None] | None
    alike: bool
    agreed: Payload | None = None  # a payload before this one, whose header is the ranks' mean
    # what tracked tensors begin with the next time
    bases: list[Tensor] = field(default_factory=list)

    @cached_property
    def projects(self) -> bool:
        """Whether anything is projected."""
        return any(isinstance(tensor, Projected) for tensor in self.tensors)

    @property
    def grads(self) -> list[Tensor | None]:
        return [tensor.g for tensor in self.tensors]

    @property
    def phase(self) -> str:
        return "projected" if self.projects else "dense"

    @cached_property
    def tracked(self) -> dict[int, Tracked]:
        pairs = enumerate(self.tensors)
        return {i: tensor for i, tensor in pairs if isinstance(tensor, Tracked)}

    def track(self) -> RequestGenerator[None]:
        """Find the columns of what is tracked, by an exchange before."""
        if self.tracked:
            self.agreed = yield from track(self.bucket, self.ops, self.grads, self.tracked)

    def draw(self) -> None:
        """Line 2, R: valid until matrices of another bucket are drawn."""
        for tensor, R in zip(self.tensors, self.draw_matrices(), strict=True):
            if isinstance(tensor, Projected) and R is not None:
                tensor.R = R

    def pack(self) -> Payload:
        """Lines 1 and 2: the bucket's message.

        p of every projected tensor, the other gradients whole, the cosines if asked for.
        """
        bucket, grads = self.bucket, self.grads
        if not self.projects and self.clipped == 1:  # in one pass, where the back end has one
            owed: list[Tensor | None] = [*bucket.state["residual"]]
            return self.ops.encode(bucket, grads, Mask(bucket), owed if self.sends else None)
        lengths = [tensor.length for tensor in self.tensors]
        cosines = [len(lengths)] if self.found else []
        payload = bucket.payload(lengths + cosines, bucket.group["payload_dtype"])
        if self.agreed is None:
            self.ops.write_header(payload, grads)
        else:
            words = len(payload.flat) - len(payload.body)
            payload.flat[:words].copy_(self.agreed.flat[:words])
        write(self.tensors, payload.exact)
        if self.found:
            for i, tensor in enumerate(self.tensors):
                payload.exact[-1][i] = tensor.cosine(payload.exact[i])
        return payload.round()

    def keep(self, sent: Payload) -> None:
        """What is needed of this rank's own message when it is the mean of all ranks'."""
        keep(self.tensors, sent)

    def squared_norm(self, mean: Payload) -> Tensor | None:
        """The tensors' parts of the squared norm of what is averaged; None where it is the
        payload's.
        """
        if not self.projects:
            return None
        squares = stacked_squared_norms(mean.parts[: len(self.tensors)], self.alike)
        scales = [tensor.square_scale for tensor in self.tensors]
        if {*scales} == {1.0}:
            return squares
        return squares * upload(scales, torch.float64, mean.flat.device)

    def find_bases(self, mean: Payload) -> None:
        """What tracked tensors begin with the next time: on a CPU now, while others' payloads
        travel; on a device of all buckets together.
        """
        if self.bucket.device.type == "cpu":
            self.bases = next_bases(self.tracked, mean)

    # After all ranks have agreed

    def factor(self, norm: float) -> float:
        """That clips the averaged gradient, where it is clipped."""
        h = self.bucket.group
        return clip_factor(norm, h["max_grad_norm"]) if clips_average(h) else 1.0

    # What a back end is told that does lines 4 and 5 at once (see ``_ops.updates``)

    @property
    def are_factors(self) -> bool:
        """Whether every averaged gradient is whole, or a product that needs no other matrices."""
        return all(isinstance(tensor, Tracked | Whole) for tensor in self.tensors)

    def factored(self, mean: Payload, present: Sequence[int]) -> list[Factored]:
        tracked = self.tracked
        return [tracked[i].factored(i, mean) for i in present if i in tracked]

    def whole(self, present: Sequence[int]) -> list[int]:
        return [i for i in present if isinstance(self.tensors[i], Whole)]

    def feed_back(self, i: int, mean: Payload, factor: float) -> None:
        self.tensors[i].feed_back(mean, i, factor)

    def share(self, factor: float) -> float:
        kept = [1 - tensor.q.beta for tensor in self.tracked.values()]
        return factor * kept[0] if kept else 0.0

    @property
    def forgets(self) -> bool:
        """Whether the errors are forgotten after this step."""
        return forgets(self.bucket.group, self.bucket.group["step"] + 1)

    def commit(self, mean: Payload, present: list[bool], factor: float) -> RequestGenerator[None]:
        """What the next step begins with."""
        bucket, tracked = self.bucket, self.tracked
        if bucket.device.type == "cpu":
            follow(bucket, tracked, self.bases, present)
        elif tracked:
            yield RunBatched("separate.follow", follow_all, bucket, (tracked, mean, present))
        waits = not all(present) or (self.sends and factor != 1)
        bucket.cache["owes"] = self.projects or (bucket.owes and waits)
        if self.found:
            self.found(self._cosines(mean, present))

    def _cosines(self, mean: Payload, present: list[bool]) -> dict[Tensor, float]:
        """The mean over ranks, of each projected tensor of which any has a gradient."""
        params, cosines = self.bucket.params, mean.parts[-1].tolist()
        pairs = zip(self.tensors, present, strict=True)
        projected = [i for i, (t, here) in enumerate(pairs) if here and isinstance(t, Projected)]
        return {params[i]: cosines[i] for i in projected}
