"""The anchors of parameters in one bucket of a fragment, and their residuals; what a sync computes
on them.

``Anchors`` makes them, by ``cut_uniform_runs``; ``fragment_sync`` calls their methods in the order
of a sync.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn

from .._engine.options import Group
from .._ops.norms import scale_, stacked_squared_norms
from .._state.bucket import Bucket
from .._state.buckets import bucket_bytes
from .._state.layouts import LocalShape
from .._state.residuals import Residuals, residual_layout
from .._state.tensors import HOST, distribute_like, pin, to_local
from .._wire.codec import QuantizedCodec
from .._wire.payload import ControlFields, Mean, Payload
from .rounds import outer_gain

# On a device a bucket is so many times as large as one of gradients: nothing overlaps with
# backward, and each costs launches.
TIMES_GRADIENTS = 8


# Payloads of a small model keep their memory on a CPU: new pages cost more than all computation.
KEPT_BYTES = 128 * 2**20


@dataclass(eq=False, slots=True)
class AnchoredTensor:
    """A parameter, its anchor, this rank's part of that and of its ``trailing_mean``, and the
    fragment that it is synced with.

    ``has_moved`` is true if the parameter has moved since its last sync, or may have. ``is_sent``
    is true if it is part of the sync in flight, or was part of the last one.
    """

    param: Tensor
    fragment: int
    anchor: nn.Parameter
    local_anchor: Tensor
    has_moved: bool = False
    is_sent: bool = True
    trailing_mean: Tensor | None = None


class SyncPayload(Payload):
    """The quantized payload of a sync. Until that is applied only messages stay in memory: the
    payloads of all buckets use the same ``body`` and ``rounding_errors``, one after the other, and
    compute them from the messages again, with the same bits.
    """

    codec: QuantizedCodec

    def receive(self, mean: Mean, received: Tensor, gathered: Tensor) -> None:
        self._place = mean.rank, mean.ranks  # not the mean, which refers to this payload
        self._received, self._gathered = received, gathered

    def read_mean(self) -> None:
        """Write the mean to the body."""
        self._make_mean().decode_mean(self._gathered)

    def compute_rounding_errors(self) -> None:
        """Write the rounding errors, of values that are in the body."""
        mean = self._make_mean()
        mean.encode_for_owners()
        mean.average_own_chunk(self._received)

    def _make_mean(self) -> Mean:
        return self.codec.make_mean(self, *self._place)


class AnchorBucket(Bucket):
    """Anchors of one fragment, whose parameters have one dtype and device, and their residuals.

    ``flat_anchors`` has all of them as one vector. ``payload`` exists during a sync. During a
    delayed one ``pseudo_gradient`` is what the rank had moved when the sync began, until
    ``compute_moved_since`` overwrites it.

    ``shared_size``: the number of values of the largest bucket, if payloads share memory.
    """

    payload: Payload
    shared_size = 0
    _scale, _is_lost = 1.0, False  # the arguments of ``encode``
    pseudo_gradient: Tensor | None = None
    is_averaged = False  # any rank has sent what it has moved
    # of each tensor: the norm of the average, over the mean of those of the ranks' movements
    step_lengths: list[float] = []

    def __init__(
        self,
        index: int,
        group: Group,
        flat: Tensor,
        tensors: list[AnchoredTensor],
        residual_dtype: str | None,
    ):
        names = [f"anchor {i}" for i in range(len(tensors))]
        super().__init__(index, group, [t.anchor for t in tensors], names)
        self.flat_anchors, self.tensors = flat, tensors
        self.trailing_mean: Tensor | None = None  # of the last anchors, as one vector
        layout = residual_layout(LocalShape(self.compute_dtype), residual_dtype)
        self.allocate("residual", layout, [{}] * len(tensors))

    @property
    def sent(self) -> list[AnchoredTensor]:
        """The tensors that are part of the sync."""
        return [t for t in self.tensors if t.is_sent]

    @property
    def sent_indices(self) -> list[int]:
        return [i for i, t in enumerate(self.tensors) if t.is_sent]

    def view_sent(self, flat: Tensor) -> list[Tensor]:
        """Cut a vector into the tensors that are part of the sync."""
        return cut_like([t.local_anchor for t in self.sent], flat)

    # A sync

    @property
    def _shares_memory(self) -> bool:
        """True if the payload's values are valid until those of the next bucket are written."""
        return isinstance(self.payload, SyncPayload)

    def read_movement(self, keeps: bool = False) -> Tensor:
        """Make the payload of a sync with the pseudo-gradient. Returns the squared norm of each of
        its tensors.

        ``keeps``: what the rank has moved is kept until the sync is applied.
        """
        values = self.write_pseudo_gradient(self.make_sync_payload())
        # parameters that are elsewhere would be copied again, for which the host waits
        are_elsewhere = any(t.param.device != self.device for t in self.tensors[:1])
        keeps |= are_elsewhere and self._shares_memory
        self.pseudo_gradient = values.clone() if keeps else None
        squares = stacked_squared_norms(values.split(self.payload.lengths))
        # what the anchors' precision cannot square is not finite: the rank takes the average
        fits = squares.sum() <= torch.finfo(values.dtype).max
        return torch.where(fits, squares, math.inf) / self.replicate_size

    def make_sync_payload(self) -> Tensor:
        """Make the payload of a sync. Returns the vector to which values are written."""
        lengths = [n * t.is_sent for t, n in zip(self.tensors, self.lengths, strict=True)]
        flags = [float(t.is_sent) for t in self.tensors]
        self.control = ControlFields(failed=[0.0], norms=[0.0] * len(self.tensors))
        dtype = self.group["payload_dtype"]
        codec = self.codecs[dtype]
        if self.shared_size and isinstance(codec, QuantizedCodec):
            self.payload = self._make_shared_payload(lengths, flags, codec)
        else:
            self.payload = self.make_payload(lengths, dtype, gradient_flags=flags)
        return self.payload.unrounded_body

    def _make_shared_payload(
        self, lengths: list[int], flags: list[float], codec: QuantizedCodec
    ) -> SyncPayload:
        """Make a payload like ``make_payload``, in memory that all buckets share."""
        dtype, device, total = self.compute_dtype, self.device, sum(lengths)
        fields, seed = self._pin_fields(flags, dtype), (self.group["step"], self.index, 0)
        body = self.scratch("values", self.shared_size, dtype, device)[:total]
        errors = self.scratch("rounding errors", self.shared_size, dtype, device)[:total]
        message, numbers = fields.to(device, copy=True), len(self.control.numbers)
        payload = SyncPayload(
            message, len(flags), numbers, lengths, codec, errors, seed, self.scratch
        )
        payload.body = payload.unrounded_body = body
        payload.write_fields(fields[:0], self.control)
        return payload

    def write_pseudo_gradient(self, out: Tensor) -> Tensor:
        """Write the pseudo-gradient (line 2 of the module ``local_steps``) to a vector; return it.
        The rank began at the anchors in the parameters' dtype.
        """
        if sent := self.sent:
            values, dtype = self.view_sent(out), sent[0].param.dtype
            if len(sent) == len(self.tensors):
                out.copy_(self.flat_anchors.to(dtype))
            else:
                torch._foreach_copy_(values, [t.local_anchor.to(dtype) for t in sent])
            params = [to_local(t.param.detach()).to(out.device) for t in sent]
            torch._foreach_sub_(values, params)
        return out

    def encode(self, scale: float, is_lost: bool, norms: Tensor) -> Payload:
        """Write what this rank sends: the pseudo-gradient and the ``norms`` of its tensors times
        ``scale``, and the residual.

        ``is_lost``: its parameters are not finite, and it takes the average of the others.
        """
        self._scale, self._is_lost = scale, is_lost
        if is_lost:
            self.payload.header.zero_()
        else:
            self.payload.control[self.control.slices["norms"]].copy_(norms * scale)
        return self._write_values()

    def _write_values(self) -> Payload:
        """Write the pseudo-gradient, times ``scale``, and the residual to the payload."""
        values, indices = self.payload.unrounded_body, self.sent_indices
        if self._shares_memory and self.pseudo_gradient is not None:
            values.copy_(self.pseudo_gradient)
        elif self._shares_memory:
            self.write_pseudo_gradient(values)
        if self._is_lost:
            values.zero_()
        scale_(values, self._scale)
        residuals = Residuals(self)
        if residuals.is_exact and len(indices) == len(self.tensors):
            return self.payload.round(residuals.flat)
        if indices and (self.is_rounded or self.has_residual):
            residuals.add_to(list(zip(indices, self.view_sent(values), strict=True)))
        return self.payload.round()

    def encode_failure(self) -> Payload:
        """Write that this rank has an error, and no values."""
        if "payload" not in vars(self):  # it could not be made before
            self.make_sync_payload()
        self.payload.flat.zero_()
        self.payload.unrounded_body.zero_()
        self.payload.control.fill_(1)
        return self.payload

    def read_average(self) -> Tensor:
        """Return the average as one vector; if memory is shared, valid until the next bucket's."""
        if isinstance(self.payload, SyncPayload):
            self.payload.read_mean()
        return self.payload.body

    def set_gradients(self, ranks: int | None = None, copies: bool = False) -> None:
        """Set the anchors' ``grad`` to the average; with ``ranks``, scaled to the mean norm of what
        so many ranks have moved.

        ``copies``: they stay valid after the next bucket has been read.
        """
        if self.is_averaged:
            copies &= self._shares_memory
            mean = self.view_sent(self.read_average().to(self.dtype, copy=copies))
            if ranks is not None:
                lengths = [self.step_lengths[i] for i in self.sent_indices]
                torch._foreach_mul_(mean, [outer_gain(length, ranks) for length in lengths])
            for t, g in zip(self.sent, mean, strict=True):
                t.anchor.grad = distribute_like(t.anchor, g)

    def keep_unsent(self) -> None:
        """Set residuals to what rounding has taken off. It comes before the step of the outer
        optimizer, which changes what is subtracted from.
        """
        if not self.is_averaged or not self.sent_indices:
            return
        payload, residuals, indices = self.payload, Residuals(self), self.sent_indices
        if isinstance(payload, SyncPayload):
            self._write_values()
            payload.compute_rounding_errors()
        errors, has_all = payload.rounding_errors, len(indices) == len(self.tensors)
        if errors is None:
            residuals.scale(indices, 0)
        elif has_all and residuals.is_exact and not self._shares_memory:
            residuals.set_all(errors)
        else:
            residuals.set(list(zip(indices, self.view_sent(errors), strict=True)))
        self.cache.pop("has_residual", None)

    def keep_trailing_mean(self) -> None:
        """Begin a trailing mean of anchors, at the present ones."""
        self.trailing_mean = self.flat_anchors.clone()
        means = cut_like([t.local_anchor for t in self.tensors], self.trailing_mean)
        for t, mean in zip(self.tensors, means, strict=True):
            t.trailing_mean = mean

    def compute_moved_since(self) -> list[Tensor]:
        """Return what the rank has moved since a delayed sync began, of each tensor that was sent:
        the pseudo-gradient at that time, which nothing needs any more, minus the present one. It
        comes before the step of the outer optimizer.
        """
        assert self.pseudo_gradient is not None
        own = None if self._shares_memory else torch.empty_like(self.pseudo_gradient)
        memory = self.payload.unrounded_body if own is None else own
        self.pseudo_gradient -= self.write_pseudo_gradient(memory)
        return self.view_sent(self.pseudo_gradient)


@torch.no_grad()
def write_params(
    tensors: Sequence[AnchoredTensor], moved: Sequence[Tensor] = (), trailing: bool = False
) -> None:
    """Write line 5 to parameters: their anchors, plus what the rank ``moved`` since; or, if
    ``trailing``, the trailing means of anchors. The memory of ``moved`` is overwritten.
    """
    params = [to_local(t.param.detach()) for t in tensors]
    values = [*map(attrgetter("trailing_mean" if trailing else "local_anchor"), tensors)]
    if moved:
        torch._foreach_add_([*moved], values)
    if params:
        pairs = zip(params, moved or values, strict=True)
        torch._foreach_copy_(params, [x.to(p.device) for p, x in pairs])


def cut_like(parts: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Cut a vector into tensors of the shapes of ``parts``."""
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def copy_wide(tensors: Sequence[Tensor], on_host: bool) -> tuple[Tensor, list[Tensor]]:
    """Copy tensors in at least float32 to one vector; return it, and its views in their shapes."""
    parts, first = [to_local(p.detach()) for p in tensors], tensors[0]
    flat = torch.empty(
        sum(part.numel() for part in parts),
        dtype=torch.promote_types(first.dtype, torch.float32),
        device=HOST if on_host else first.device,
    )
    flat = pin(flat, first.device) if on_host else flat
    copies = cut_like(parts, flat)
    torch._foreach_copy_(copies, [part.to(flat.device) for part in parts])
    return flat, copies


def cut_uniform_runs(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Cut parameters into runs of one dtype, device and placement, of a limited size."""
    runs: dict[tuple[object, ...], list[list[Tensor]]] = {}
    sizes: dict[tuple[object, ...], int] = {}
    for p in params:
        mesh, placements = getattr(p, "device_mesh", None), getattr(p, "placements", None)
        key, size = (p.dtype, p.device, mesh, placements), to_local(p).numel() * p.element_size()
        sizes[key] = sizes.get(key, 0) + size
        limit = bucket_bytes(p.device) * (1 if p.device.type == "cpu" else TIMES_GRADIENTS)
        if key not in runs or sizes[key] > limit:
            runs.setdefault(key, []).append([])
            sizes[key] = size
        runs[key][-1].append(p)
    return [run for of_key in runs.values() for run in of_key]
