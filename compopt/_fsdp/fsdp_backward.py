"""Inside FSDP2: an optimizer averages in place of FSDP's own reduce-scatter, in backward.

    fully_shard(model)                                  # ZeRO-3 over all ranks
    optimizer = compopt.TagcAdamW(model.named_parameters(), lr=3e-4)

Where FSDP2 shards the parameters over the optimizer's own ranks, each of its reduce-scatters comes
here as soon as backward has the gradients. The gradients of each parameter group of the optimizer
in one reduce-scatter become a bucket, cut as FSDP cuts the parameters, and the method's reducer
averages it as it does elsewhere. The averages become FSDP's gradients (``p.grad``), which may be
clipped and read as usual. In ``step()`` all ranks agree, and this rank's shards are updated. Only
an applied step changes residuals. FSDP gathers parameters itself.

In a further backward of the same step residuals are left out: they have been sent.

A rank that cannot send its gradients takes part without them, as under DDP, marks its shard of the
average by NaN, and says so in ``step()``: all ranks raise, and nothing is applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._engine.engine import Engine
from .._engine.exchange import BucketExchange, ExchangeInputs
from .._engine.options import RATES, Group
from .._engine.reducer import Reducer, Update
from .._engine.settings import check_changed_options
from .._ops.norms import clip_factor, stacked_squared_norms
from .._ops.operations import Ops
from .._state.bucket import Bucket
from .._state.layouts import PaddedVector
from .._state.next_state import commit_next, read_next
from .._state.residuals import Residuals
from .._state.tensors import to_local, upload
from .._wire.payload import Payload
from .._wire.requests import (
    Agree,
    AllReduceMean,
    Phase,
    ReadToHost,
    ReadyToCommit,
    RequestGenerator,
)
from .fsdp_shards import ParamColumns, cut_by_rows, place_in_rows

# the parameters whose gradients a row holds, in order, and the dimension along which each is cut
Params = Sequence[tuple[Tensor, int]]
ABSENT = object()  # in place of an option that a group does not have
# a bucket of the engine, and which of its tensors
BucketPosition = tuple[Bucket, int]


@dataclass
class PendingState:
    """The state that a parameter gets if the step is applied.

    ``next_residual``, what none of the step's backwards has sent, then takes the place of
    ``residual``; both as they are stored. ``others``: other new state, by name.
    """

    next_residual: Tensor
    residual: Tensor
    others: dict[str, Tensor] = field(default_factory=dict)

    def add_unsent(self, residuals: Residuals, i: int, rest: Tensor) -> None:
        """Add what a further backward has not sent."""
        self.next_residual = residuals.pack(i, residuals.unpack(i, self.next_residual) + rest)

    def write_to(self, residuals: Residuals, i: int, factor: float) -> None:
        """Write ``next_residual`` to residual i; ``factor``, which clipped the average, scales the
        change.

        If ``residual`` was replaced since backward (a checkpoint was loaded, or state was laid out
        again), the change, ``next_residual - residual``, is added to the one that is there.
        """
        new, old = (residuals.unpack(i, x) for x in (self.next_residual, self.residual))
        with residuals.open([i]) as opened:
            (e,) = opened.tensors
            if residuals.stored[i] is not self.residual:
                e.add_(new.sub_(old), alpha=factor)
            elif factor == 1:
                e.copy_(new)
            else:
                e.lerp_(new, factor)


# of parameters whose gradients a backward has reduced
PendingStates = dict[Tensor, PendingState]


class ReduceScatterBucket(Bucket):
    """The gradients of one parameter group of the optimizer in one reduce-scatter.

    Its ``params`` are stand-ins without memory; only their ``grad`` is real. A stand-in that the
    reducer needs ``as_matrix`` has the parameter's global shape, and ranks own the rows of it that
    FSDP gives them. Any other is a vector in the order of FSDP's shards, padded so that all ranks
    own equally many elements. ``bucket_positions`` say where the parameters are in the engine's
    buckets, which hold their state. The position of a parameter that was unfrozen since the last
    step is None: it is in no bucket and has no residual yet, and its gradient is sent unrounded.
    """

    def __init__(
        self,
        index: int,
        engine: Engine,
        pieces: list[ParamColumns],
        bucket_positions: list[BucketPosition | None],
        as_matrix: list[bool],
        dtype: torch.dtype,
    ):
        self.pieces, self.bucket_positions, self.as_matrix = pieces, bucket_positions, as_matrix
        self.rank, ranks = engine.comm.rank, engine.comm.size
        first, device = bucket_positions[0], pieces[0].p.device
        group = {**engine.option_groups[0], "payload_dtype": None}
        names, compressed = ["unfrozen"] * len(pieces), [False] * len(pieces)
        if first is not None:
            known, group = [*filter(None, bucket_positions)], first[0].group
            names = [bucket.names[i] for bucket, i in known]
            compressed = [bucket.compressed[i] for bucket, i in known]
        tensors = [
            torch.empty(1, dtype=dtype, device=device).expand(
                piece.p.shape if matrix else (ranks * piece.size,)
            )
            for piece, matrix in zip(pieces, as_matrix, strict=True)
        ]
        is_compressed = dict(zip(tensors, compressed, strict=True))
        scratch = None if first is None else first[0].scratch
        super().__init__(index, group, tensors, names, lambda p, *_: is_compressed[p], scratch)
        self.model_params = [piece.p for piece in pieces]
        pairs = [*zip(pieces, as_matrix, strict=True)]
        ranges = [[piece.range_of(r, matrix) for piece, matrix in pairs] for r in range(ranks)]
        compressed_pieces = [piece for piece, c in zip(pieces, compressed, strict=True) if c]
        owned = [sum(piece.count_filled(r) for piece in compressed_pieces) for r in range(ranks)]
        self.shards = cut_by_rows(ranges, owned, compressed, self.rank)
        self.codecs = engine.ops.codecs

    def load_rows(self, rows: Tensor, pending_states: PendingStates) -> None:
        """Read this rank's gradients from ``rows``; copy the residuals to be sent."""
        for p, piece, matrix in zip(self.params, self.pieces, self.as_matrix, strict=True):
            values = rows[:, piece.columns].reshape(-1)
            p.grad = piece.in_shape(values) if matrix else values
        parts: list[list[Tensor]] = []  # the residual of each tensor, as vectors
        for i, (p, piece, matrix) in enumerate(
            zip(self.model_params, self.pieces, self.as_matrix, strict=True)
        ):
            e = self.read_residual(i)
            if e is None:
                parts.append([])
            elif p in pending_states:  # an earlier backward has sent it
                parts.append([e.new_zeros(self.lengths[i])])
            else:
                parts.append([e.reshape(-1)] if matrix else piece.in_shard_order(e))
        vectors = [vector for part in parts for vector in part]
        empty = torch.empty(0, dtype=torch.float32, device=self.device)
        flat = torch.cat(vectors) if vectors else empty
        views: list[Any] = list(flat.split([sum(map(len, part)) for part in parts]))
        for i, (p, part) in enumerate(zip(self.params, parts, strict=True)):
            views[i] = views[i].view(p.shape) if part else None
        self.flat, self.state = {"residual": flat}, {"residual": views}
        self.storage_version += 1
        first = self.bucket_positions[0]
        for name, layout in ({} if first is None else first[0].layouts).items():
            if isinstance(layout, PaddedVector):  # state of global tensors, on every rank
                positions = filter(None, self.bucket_positions)
                self.state[name] = [bucket.state[name][i] for bucket, i in positions]
        self.cache["has_residual"] = True

    def read_residual(self, i: int) -> Tensor | None:
        """Return the optimizer's residual of tensor i."""
        if (position := self.bucket_positions[i]) is None:
            return None
        residuals = Residuals(position[0])
        return residuals.read(position[1]) if position[1] in residuals else None

    def write_shard(self, reducer: Reducer, mean: Payload, out: Tensor) -> None:
        """Write this rank's shard of the average to FSDP's output.

        Where any rank's gradient is not finite, as the header of ``mean`` says, the shard's first
        element becomes NaN: a reducer that sends a part of the elements may not have sent that one.
        """
        shards: list[Tensor] = []
        parts = reducer.read_owned_averages(out.dtype)
        for piece, matrix, part in zip(self.pieces, self.as_matrix, parts, strict=True):
            if matrix and piece.dim:
                part = piece.select_part(part.view(piece.p.shape), self.rank)
            shards.append(out[piece.begin : piece.begin + len(part)].copy_(part))
        zero_or_nan = (mean.header * 0).to(out.dtype).split(1)
        torch._foreach_add_([shard[:1] for shard in shards], [*zero_or_nan])

    def collect_residuals(self, reducer: Reducer, pending_states: PendingStates) -> None:
        """Add what this backward has not sent."""
        reducer.keep_unsent([True] * len(self.pieces))
        for i, (p, piece) in enumerate(zip(self.model_params, self.pieces, strict=True)):
            rest, position = self.state["residual"][i], self.bucket_positions[i]
            if position is None or rest is None:
                continue
            residuals, number = Residuals(position[0]), position[1]
            rest = rest if self.as_matrix[i] else piece.in_shape(rest)
            if p in pending_states:
                pending_states[p].add_unsent(residuals, number, rest)
            else:
                stored = residuals.stored[number]
                pending_states[p] = PendingState(residuals.pack(number, rest), stored)
            pending_states[p].others.update(read_next(self, i))
        self._forget_gradients()

    def refuse_average(self, out: Tensor, pending_states: PendingStates) -> None:
        """Write NaN in place of this rank's shard of an average that lacks its gradients: no step
        applies it, also if the error is caught. Residuals stay.
        """
        for p, piece, position in zip(
            self.model_params, self.pieces, self.bucket_positions, strict=True
        ):
            out[piece.columns].fill_(float("nan"))
            if position is not None and position[1] in (residuals := Residuals(position[0])):
                stored = residuals.stored[position[1]]
                pending_states.setdefault(p, PendingState(stored, stored))
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for p in self.params:
            p.grad = None
        self.flat, self.state = {}, {}


@dataclass
class FSDPUnit:
    """One reduce-scatter: its parameters, the positions of their state, and their buckets."""

    pieces: list[ParamColumns]
    bucket_positions: list[BucketPosition | None]
    as_matrix: list[bool] = field(default_factory=list)
    buckets: list[ReduceScatterBucket] = field(default_factory=list)


class FSDPBackward:
    """The optimizer's part in FSDP2's backward: it compresses and averages gradients."""

    def __init__(self, engine: Engine):
        self.engine = engine
        # kept when state is laid out again between backward and step(), which has to commit it
        self.pending_states: PendingStates = {}
        # the buckets that backward has reduced since the last step, with their phases
        self.buckets_since_step: dict[int, tuple[Bucket, Phase]] = {}
        self.in_flight: list[PendingReduction] = []
        # why this rank could not send the gradients of a backward; ``step()`` raises it
        self.error: Exception | None = None
        self._units: dict[tuple[Tensor, ...], FSDPUnit] = {}
        self._bucket_count = 0
        self._backward_number = -1  # of the running backward
        self._valid_options = self._copy_sent_options()

    @property
    def method(self) -> Any:
        """The ``ReducingOptimizer``; its file imports this one."""
        return self.engine.method

    @property
    def phase(self) -> Phase:
        """The phase of the coming step."""
        phases = [phase for _, phase in self.buckets_since_step.values()]
        return next((phase for phase in phases if phase != "dense"), "dense")

    @property
    def dense_bytes(self) -> int:
        """Bytes that FSDP2 itself would have sent."""
        buckets = self.engine.buckets
        return sum(p.numel() * b.grad_dtype.itemsize for b in buckets for p in b.params)

    def end_step(self) -> None:
        """Forget what the step has committed or skipped. If it raised all is kept: ``step()`` may
        be called again with the same averages.
        """
        self.pending_states, self.buckets_since_step = {}, {}

    def forget_units(self) -> None:
        """Forget all layouts; the next backward makes new ones.

        Parameters were added or frozen, or have their state elsewhere.
        """
        self._units, self._bucket_count = {}, 0

    def reduce(
        self,
        params: Params,
        rows: Tensor,
        out: Tensor,
        blocking: bool,
        backward: int,
        problem: Exception | None = None,
    ) -> None:
        """Begin FSDP's reduce-scatter of ``rows``, a row for each rank, into ``out``.

        It ends here if ``blocking``, else in ``finish``. ``backward`` is the number of the running
        backward. ``problem``: why this rank cannot send ``rows``.

        All ranks make these calls in the same order. Each call first advances every earlier
        reduction by one collective, then starts its own, so collectives start in the same order
        too.
        """
        key = tuple(p for p, _ in params)
        if backward != self._backward_number:
            self._backward_number = backward
            self.finish()  # reductions of a backward that raised
            self._discard_unapplied()
            self._check_and_lay_out()
        buckets = self._buckets_of(params, key, rows.dtype)
        self._advance_all()
        for bucket in buckets:
            inputs = ExchangeInputs(
                lambda bucket: self._reduce_bucket(bucket, rows, out),
                self.engine.comm,
                problem=problem,
            )
            self.in_flight.append(PendingReduction(bucket, inputs, is_last=False))
        self._take_ended()
        if blocking or any(p.grad is not None for p in key):
            self.finish()

    def _copy_sent_options(self) -> list[tuple[Group, Group]]:
        """Return groups with their options that decide what is sent, of a base only those of its
        wrapper.
        """
        (_, own, known), *others = self.method._compared_groups
        rows = [(group, {*known} - RATES) for group in own]
        for _, groups, names in others:
            rows += [(group, {n for n in names if n.startswith("compopt_")}) for group in groups]
        return [(g, {n: g.get(n, ABSENT) for n in names - {"step"}}) for g, names in rows]

    def _check_and_lay_out(self) -> None:
        """Apply options that were changed since the last backward. Where they are not valid they
        are set back, because other ranks wait for this one's gradients; ``step()`` raises why.
        """
        try:
            check_changed_options(self.engine)
        except (TypeError, ValueError) as error:
            self.error = self.error or error
            for group, options in self._valid_options:
                group.update(options)
                for name in [n for n, value in options.items() if value is ABSENT]:
                    del group[name]
        self.method.apply_changed_options()
        self._valid_options = self._copy_sent_options()

    def _reduce_bucket(self, bucket: Any, rows: Tensor, out: Tensor) -> RequestGenerator[None]:
        """Average the gradients of one bucket, from ``rows`` into ``out``."""
        bucket.load_rows(rows, self.pending_states)
        reducer: Reducer = self.method.make_reducer(bucket)
        self.buckets_since_step[bucket.index] = bucket, reducer.phase
        mean = yield from reducer.reduce()
        if bucket.withholds_gradients:
            bucket.refuse_average(out, self.pending_states)
        else:
            bucket.write_shard(reducer, mean, out)
            bucket.collect_residuals(reducer, self.pending_states)
        yield Agree(mean, reducer.phase)  # ``step()`` does

    def _buckets_of(
        self, params: Params, key: tuple[Tensor, ...], dtype: torch.dtype
    ) -> list[ReduceScatterBucket]:
        """Return a bucket for each parameter group; new ones if a reducer needs other shapes."""
        if key not in self._units:
            pieces = place_in_rows(params, self.engine.comm.size)
            positions: list[BucketPosition | None] = [None] * len(key)
            for n, p in enumerate(key):
                if (bucket := self.engine.bucket_of.get(p)) is not None:
                    i = next(i for i, other in enumerate(bucket.params) if other is p)
                    positions[n] = bucket, i
            self._units[key] = FSDPUnit(pieces, positions)
        unit, needs_matrix = self._units[key], self.method.reduces_as_matrix
        positions = unit.bucket_positions
        as_matrix = [position is not None and needs_matrix(*position) for position in positions]
        if unit.as_matrix != as_matrix:
            by_group: dict[int, list[int]] = {}
            for n, position in enumerate(positions):
                group = None if position is None else position[0].group
                by_group.setdefault(id(group), []).append(n)
            unit.as_matrix = as_matrix
            # New buckets keep the numbers of the old ones. Rounding draws its noise by them, and a
            # resumed run has no old ones.
            first = unit.buckets[0].index if unit.buckets else self._bucket_count
            unit.buckets = [
                ReduceScatterBucket(
                    first + number,
                    self.engine,
                    [unit.pieces[n] for n in indices],
                    [positions[n] for n in indices],
                    [as_matrix[n] for n in indices],
                    dtype,
                )
                for number, indices in enumerate(by_group.values())
            ]
            self._bucket_count = max(self._bucket_count, first + len(unit.buckets))
        return unit.buckets

    def _discard_unapplied(self) -> None:
        """Forget the pending residuals of gradients that were discarded since the last backward.

        ``zero_grad(set_to_none=False)`` leaves zeros, as one shard may have by chance: one
        all-reduce, for which backward waits, decides whether gradients were discarded.
        """
        self.pending_states = {
            p: pending for p, pending in self.pending_states.items() if p.grad is not None
        }
        if self.error is not None and all(p.grad is None for p in self.engine.bucket_of):
            self.error = None
        if self.pending_states:
            engine = self.engine
            some = any(
                bool(to_local(p.grad).any()) for p in self.pending_states if p.grad is not None
            )
            flag = torch.tensor([float(some)], dtype=torch.float32, device=engine.device)
            pending = engine.comm.start(AllReduceMean(flag))
            pending.wait()
            if not flag.item():
                self.pending_states = {}

    def finish(self) -> None:
        """Wait for everything that has begun."""
        while self.in_flight:
            self._advance_all()
            self._take_ended()

    def _advance_all(self) -> None:
        """Advance every running reduction by one collective; give all up if one fails."""
        running, self.in_flight = self.in_flight, []
        for reduction in running:
            reduction.advance()
        self.in_flight = running

    def _take_ended(self) -> None:
        """Forget reductions that have ended, but not why one could not send its gradients."""
        ended = [one for one in self.in_flight if one.has_reached_agree]
        self.in_flight = [one for one in self.in_flight if not one.has_reached_agree]
        for reduction in ended:
            self.error, reduction.error = self.error or reduction.error, None
            reduction.close()

    def check(self) -> None:
        """Raise RuntimeError if a GradScaler drives the steps, or what backward could not send."""
        if self.engine.has_grad_scaler:
            raise RuntimeError(
                f"{self.engine.name} averages inside FSDP's backward, where it does not know a "
                "GradScaler's scale: train in bfloat16, without a scaler."
            )
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame (a reference cycle)

    def commit_residual(self, bucket: Bucket, i: int, norm: float) -> None:
        """Write the residual of tensor i, to which the step is applied. ``norm`` is that of all
        averaged gradients, before a clip.
        """
        pending = self.pending_states.get(bucket.params[i])
        # norm 0: the averaged gradients were zeroed before step(), so residuals stay
        if pending is not None and norm > 0:
            factor = clip_factor(norm, bucket.group["max_grad_norm"])
            self.method.write_residual(bucket, i, pending, factor)


class PendingReduction(BucketExchange):
    """The exchange of one bucket in backward. Its payloads have no control fields: ``step()`` tells
    other ranks of an ``error``.
    """

    def advance(self) -> None:
        """Wait for the collective in flight, or for a number of the device, and start the next."""
        if self.is_in_flight:
            self.complete_stage()
        elif isinstance(self.request, ReadToHost):
            self.resume_before_agree(self.request.tensor.tolist())

    def _write_control(self) -> None:
        pass


def step_fsdp_shards(
    bucket: Bucket,
    ops: Ops,
    fsdp_backward: FSDPBackward,
    update: Update,
    squared_norm_factors: Iterable[float] | None = None,
) -> RequestGenerator[None]:
    """The step: ``update`` takes this rank's shards of the gradient that backward has left.

    ``squared_norm_factors``: factors on the squared norm of each gradient, for reducers whose
    reconstruction has a larger norm than the average.
    """
    grads = bucket.grads()
    message = bucket.make_payload([0] * len(grads), None)
    ops.write_header(message, grads)
    mean = yield AllReduceMean(message)
    given = [g for g in grads if g is not None and g.numel()]
    squared = torch.zeros(1, dtype=torch.float64, device=bucket.device)
    if given:
        squared = stacked_squared_norms(given)
    if given and squared_norm_factors is not None:
        pairs = zip(grads, squared_norm_factors, strict=True)
        factors = [factor for g, factor in pairs if g is not None and g.numel()]
        squared.mul_(upload(factors, torch.float64, bucket.device))
    norm = yield Agree(mean, fsdp_backward.phase, squared, covers_shard_only=True)

    factor = clip_factor(norm, bucket.group["max_grad_norm"])
    have_gradients = mean.have_gradients
    yield ReadyToCommit()
    # from here on state changes
    bucket.count_steps(have_gradients)
    indices = [i for i, has_gradient in enumerate(have_gradients) if has_gradient]
    for i in indices:
        fsdp_backward.commit_residual(bucket, i, norm)
    commit_next(bucket, have_gradients)
    if indices:
        averages = update.memory_for(
            bucket, indices, [grads[i] if factor == 1 else None for i in indices]
        )
        for i, average in zip(indices, averages, strict=True):
            g = grads[i]
            if g is None:
                average.zero_()
            elif average.data_ptr() != g.data_ptr():
                average.copy_(g).mul_(factor)
        update.apply(bucket, indices, averages)
