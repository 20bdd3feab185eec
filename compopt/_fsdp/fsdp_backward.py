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
from typing import Any, Literal

import torch
from torch import Tensor

from .._engine.engine import Engine
from .._engine.exchange import BucketExchange, ExchangeInputs
from .._engine.meetings import meet_in_backward
from .._engine.optimizer import CompressedOptimizer
from .._engine.options import RATES, Group, Setting
from .._engine.reducer import Reducer, Update
from .._engine.settings import check_changed_options
from .._ops.norms import clip_factor, stacked_squared_norms
from .._ops.operations import Ops
from .._state.bucket import Bucket
from .._state.layouts import GlobalShape, Layout, LocalShape, Sharded
from .._state.next_state import commit_next
from .._state.residuals import Residuals, residual_layout
from .._state.tensors import has_gradient_hook, to_local, upload
from .._wire.collectives import connect, is_sharded_over
from .._wire.requests import (
    Agree,
    AllReduceMean,
    Phase,
    ReadToHost,
    ReadyToCommit,
    RequestGenerator,
)
from .fsdp_bucket import (
    ParamColumns,
    PendingState,
    PendingStates,
    ReduceScatterBucket,
    place_in_rows,
)

GatherDtype = torch.dtype | Literal["int8"] | None
# the parameters whose gradients a row holds, in order, and the dimension along which each is cut
Params = Sequence[tuple[Tensor, int]]
ABSENT = object()  # in place of an option that a group does not have


class FSDPBackward:
    """The optimizer's part in FSDP2's backward: it compresses and averages gradients."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.method: Any = engine.method  # a ``ReducingOptimizer``
        # kept when state is laid out again between backward and step(), which has to commit it
        self.pending_states: PendingStates = {}
        # the buckets that backward has reduced since the last step, with their phases
        self.buckets_since_step: dict[int, tuple[Bucket, Phase]] = {}
        self.in_flight: list[PendingReduction] = []
        # why this rank could not send the gradients of a backward; ``step()`` raises it
        self.error: Exception | None = None
        self._buckets: dict[tuple[Tensor, ...], list[ReduceScatterBucket]] = {}
        self._bucket_count = 0
        self._backward_number = -1  # of the running backward
        self._is_further = False  # there was one before since the last step
        # why averages are read in the running backward, and parameters with a gradient of before
        self._why_read, self._kept = "", set[Tensor]()
        self._valid_options = self._copy_sent_options()

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

    def forget_buckets(self) -> None:
        """Forget all layouts; the next backward makes new ones.

        Parameters were added or frozen, or have their state elsewhere.
        """
        self._buckets, self._bucket_count = {}, 0

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
        if backward != self._backward_number:
            self._backward_number = backward
            self.finish()  # reductions of a backward that raised
            self._is_further = bool(self.buckets_since_step)
            self._discard_unapplied()
            self._check_and_lay_out()
            self._find_readers()
        buckets = self._buckets_of(params, rows.dtype)
        self._advance_all()
        for bucket in buckets:
            inputs = ExchangeInputs(
                lambda bucket: self._reduce_bucket(bucket, rows, out),
                self.engine.comm,
                problem=problem,
            )
            self.in_flight.append(PendingReduction(bucket, inputs, is_last=False))
        self._take_ended()
        if blocking or self._has_to_wait(params):
            self.finish()

    def _find_readers(self) -> None:
        """Find out why averages of the running backward are read in it, on this rank: hooks that
        were registered since the last handshake, and gradients of before, to which FSDP2 adds.
        """
        bucket_of = self.engine.bucket_of
        self._kept, self._why_read = {p for p in bucket_of if p.grad is not None}, ""
        for p in bucket_of:
            if p in self._kept or has_gradient_hook(p):
                bucket, what = bucket_of[p], "a gradient of before" if p in self._kept else "a hook"
                name = next(n for q, n in zip(bucket.params, bucket.names, strict=True) if q is p)
                self._why_read = f"{name} has {what}"
                break

    def _has_to_wait(self, params: Params) -> bool:
        """Return True if the averages of all that has begun are read before backward goes on.

        A rank that waits for several collectives of one reduction starts them before the next
        reduction, so all ranks wait or none. One that finds a reason in this backward asks for
        theirs. If it is alone with it, it does not wait, and ``step()`` raises.
        """
        engine = self.engine
        if self._is_further or engine.waits_in_backward or not engine.peers_verified:
            return True
        if self._why_read and any(r.has_next_stage or not r.is_in_flight for r in self.in_flight):
            why, self._why_read = self._why_read, ""
            if absence := meet_in_backward(engine):
                self.error = self.error or RuntimeError(
                    f"{why} on rank {engine.comm.rank}, which reads its average in backward, and "
                    f"{absence}: register hooks and call zero_grad() on all ranks alike."
                )
            engine.waits_in_backward = not absence
            return engine.waits_in_backward
        # a module that is used twice has gradients of this backward
        is_added = any(p.grad is not None and p not in self._kept for p, _ in params)
        return bool(self._why_read) or is_added

    def _copy_sent_options(self) -> list[tuple[Group, Group]]:
        """Return groups with their options that decide what is sent, of a base only those of its
        wrapper.
        """
        (_, own, known), *others = self.method.compared_groups
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

    def _buckets_of(self, params: Params, dtype: torch.dtype) -> list[ReduceScatterBucket]:
        """Return a bucket for each parameter group; new ones if a reducer needs other shapes."""
        key = tuple(p for p, _ in params)
        buckets = self._buckets.get(key, [])
        pieces = [piece for bucket in buckets for piece in bucket.pieces]
        pieces = pieces or place_in_rows(params, self.engine.comm.size, self.engine.bucket_of)
        needs_matrix = self.method.reduces_as_matrix
        as_matrix = [one.position is not None and needs_matrix(*one.position) for one in pieces]
        if buckets and as_matrix == [piece.is_matrix for piece in pieces]:
            return buckets
        by_group: dict[int, list[ParamColumns]] = {}
        for piece, is_matrix in zip(pieces, as_matrix, strict=True):
            group = None if piece.position is None else piece.position[0].group
            by_group.setdefault(id(group), []).append(piece._replace(is_matrix=is_matrix))
        # New buckets keep the numbers of the old ones. Rounding draws its noise by them, and a
        # resumed run has no old ones.
        first = buckets[0].index if buckets else self._bucket_count
        buckets = self._buckets[key] = [
            ReduceScatterBucket(first + number, self.engine, members, dtype)
            for number, members in enumerate(by_group.values())
        ]
        self._bucket_count = max(self._bucket_count, first + len(buckets))
        return buckets

    def _discard_unapplied(self) -> None:
        """Forget the pending residuals of gradients that were discarded since the last backward.

        ``zero_grad(set_to_none=False)`` leaves zeros, as one shard may have by chance, and one rank
        may have discarded its shards alone: one all-reduce, for which backward waits, decides which
        gradients were discarded.
        """
        if self.error is not None and all(p.grad is None for p in self.engine.bucket_of):
            self.error = None
        if self.pending_states:
            engine = self.engine
            grads = [p.grad for p in self.pending_states]
            some = any(g is not None and bool(to_local(g).any()) for g in grads)
            kept = [float(some), *(float(g is not None) for g in grads)]
            flags = torch.tensor(kept, dtype=torch.float32, device=engine.device)
            engine.comm.start(AllReduceMean(flags)).wait()
            some, *are_kept = (flag > 0 for flag in flags.tolist())
            pairs = zip(self.pending_states.items(), are_kept, strict=True)
            self.pending_states = {
                p: pending for (p, pending), is_kept in pairs if some and is_kept
            }

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


# The optimizer


class ReducingOptimizer(CompressedOptimizer):
    """An optimizer whose reducer averages gradients inside FSDP2 as well.

    Where FSDP2 shards the parameters over the optimizer's ranks, ``fsdp_backward`` takes the
    place of its reduce-scatter, and a subclass's ``algorithm`` must return ``step_fsdp_shards``.
    """

    fsdp_backward: FSDPBackward | None = None
    # the dtype of FSDP2's parameter gathers (None: its own), and whether an integration has set it
    gather_dtype: str | None = None
    has_gathers = False

    def make_reducer(self, bucket: Bucket) -> Reducer:
        """Return the reducer of a bucket for the coming step."""
        raise NotImplementedError

    def list_adamw_state(self, dtype: torch.dtype) -> dict[str, Layout]:
        """Return the layouts of AdamW's moments and of the residuals of compressed tensors, for
        classes that have no other state (``TagcAdamW``, docs/writing.md's ``RandomK``).
        """
        moments = Sharded if self.sharded else LocalShape
        residual = self.choose_residual_layout(dtype, compressed_only=True)
        return {"exp_avg": moments(dtype), "exp_avg_sq": moments(dtype), "residual": residual}

    def choose_residual_layout(self, dtype: torch.dtype, compressed_only: bool = False) -> Layout:
        """Return the layout of residuals: whole inside FSDP2, although it shards parameters."""
        layout = GlobalShape if self.replaces_reduce_scatter else LocalShape
        return residual_layout(layout(dtype, compressed_only=compressed_only), self.residual_dtype)

    def write_residual(self, bucket: Bucket, i: int, pending: PendingState, factor: float) -> None:
        """Write the residual of tensor i when a step inside FSDP2 is applied, and put other new
        state into ``bucket.next``.

        ``factor``, which clipped the average, is ignored here: all that was sent counts as sent.
        (With projections the clip changes the residual: see ``ProjectingOptimizer``.)
        """
        pending.write_to(Residuals(bucket), i, 1.0)

    def before_exchange(self) -> None:
        super().before_exchange()
        if self.gather_dtype is not None and not self.has_gathers:
            raise ValueError(
                f"gather_dtype={self.gather_dtype!r} is for parameters that FSDP2 gathers, and no "
                "module that fully_shard wraps holds these: call fully_shard before the optimizer "
                "is made, or leave gather_dtype out. (TagcAdamW without FSDP2 sends updates in "
                "update_dtype.)"
            )

    def list_fixed_settings(self) -> list[Setting]:
        return [*super().list_fixed_settings(), ("gather_dtype", self.gather_dtype)]

    def _copyable_attributes(self) -> dict[str, Any]:
        return {**super()._copyable_attributes(), "gather_dtype": self.gather_dtype}

    def before_layout(self) -> None:
        super().before_layout()
        params = [p for group in self.option_groups for p in group["params"]]
        flags = [False]  # of each parameter: whether FSDP2 shards it over the optimizer's ranks
        if any(hasattr(p, "device_mesh") for p in params):
            comm = connect(self._engine.process_group)
            flags = [is_sharded_over(p, comm) for p in params]
        fsdp_shards_params = all(flags)
        if any(flags) and not fsdp_shards_params:
            raise ValueError(
                f"{flags.count(False)} of {len(flags)} parameters are not among those that FSDP2 "
                "shards over the ranks of this optimizer: call fully_shard on the whole model "
                "before the optimizer is made, or give the others an optimizer of their own."
            )
        if fsdp_shards_params and any(group.get("when") == "auto" for group in self.option_groups):
            raise ValueError(
                "when='auto' compares compressed steps with dense ones of its own, and inside "
                "FSDP it takes no dense ones: leave it out, and compare two runs."
            )
        if self.replaces_reduce_scatter and not fsdp_shards_params:
            raise ValueError(
                f"FSDP2 shards the parameters over the ranks this {type(self).__name__} was made "
                "with: make FSDP and the optimizer anew for others, and load a checkpoint."
            )
        self.replaces_reduce_scatter = fsdp_shards_params
        if fsdp_shards_params:  # FSDP2 has sharded the state
            self.sharded = False

    def after_layout(self) -> None:
        super().after_layout()
        if self.replaces_reduce_scatter and self.fsdp_backward is None:
            self.fsdp_backward = FSDPBackward(self._engine)
        if self.fsdp_backward is not None:
            self.fsdp_backward.forget_buckets()
