"""Local steps: ranks train on their own for a while, and then average what they moved (DiLoCo, and
Streaming DiLoCo where fragments or a delay are asked for).

Rank k has parameters w_k, in fragments p = 0 to P - 1; anchors a_p are the same on all ranks, and a
round has H steps::

    1  inner.step()                                     # every step, on the rank's own gradients
    at step p * H // P of a round (0: its last), prepare_sync
    2  d_k <- a_p - w_k                                 # the pseudo-gradient
    3  d <- mean over ranks of d_k                      # as the outer optimizer averages gradients
    ``delay`` steps later, on all ranks or on none, perform_sync
    4  a_p <- the outer optimizer steps a_p by d        # v <- mu v + d;  a_p <- a_p - lr (d + mu v)
    5  w_k <- a_p + what the rank moved since line 2

At first all gradients are averaged for ``warmup_steps``, as ``Average(inner)`` does, and rounds
grow from 1 step to H over ``every_warmup_steps``, mu and lr from 0 and 1 with them.

Where rounds end by time, or ranks are ``weighted``, line 3 is a mean weighted by the steps or
samples that ranks took in the round.

There is one outer optimizer; anchors are its parameters, fragments its groups. An exchange is one
step of it, of the fragments that are due, cut in two: up to the decision of all ranks, and the
commit. Where we differ: Streaming DiLoCo drops a part of what a rank moved while an exchange was on
its way. And d_k is taken from where the rank began: for bfloat16 parameters that is a_p rounded to
bfloat16. Otherwise rounding errors would leak into the anchors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from time import monotonic
from typing import Any, Literal

import torch
from torch import Tensor

from ._engine.checkpoint import check_groups, warn_of_missing_state
from ._engine.collective_generators import CollectiveGenerator, sum_over_groups
from ._engine.combined import OneOrSeveral, combine_optimizers, describe_members
from ._engine.decision import StepDecision
from ._engine.gradients import (
    check_gradients,
    drop_scale_on_error,
    restore_scale,
    unscale_gradients,
)
from ._engine.handshake import gather_rows, warn_without_gradients
from ._engine.join import JoinHook, follow_ranks_with_data
from ._engine.missing_ranks import RankLeft
from ._engine.options import OPTIONS_WITHOUT_HANDSHAKE, Group, Setting, require, select_options
from ._engine.resharding import average_base, average_state, catch_up, warn_of_lost_residuals
from ._engine.session import Handshake, weak_method
from ._engine.signals import defer_signals
from ._engine.stats import Stats, show_line
from ._engine.step import Step, check_can_step
from ._engine.update import replace_gradients
from ._engine.wrapper import Wrapper
from ._local import rounds
from ._local.anchors import Anchors, MakeOuter, assign_to_fragments, reset_moments
from ._local.checkpoint import Entry, SavedRounds, read_rounds, save_rounds, split_rounds
from ._local.distances import cosine_and_spread
from ._local.exchange import Contribution, FragmentSync, Outcome, begin_sync
from ._local.rounds import LocalStats, OpenRound, RoundCounts
from ._ops.norms import clip_factor, scale_all_
from ._state.buckets import Bucket
from ._state.layouts import Layout, LocalShape, PaddedVector
from ._state.tensors import HOST, to_local
from ._wire.collectives import (
    Communicator,
    PendingCollective,
    ProcessGroup,
    get_rank,
    get_replicate_size,
)
from ._wire.payload import PayloadDtype
from ._wire.requests import CommunicationError, RequestGenerator
from .average import average, outer_sgd


class LocalSteps(Wrapper):
    """Any torch optimizer, stepped by every rank on its own gradients; every so many steps ranks
    average what they moved::

        adamw = torch.optim.AdamW(model.parameters(), lr=3e-4)
        optimizer = compopt.LocalSteps(adamw, every=30)

    ``param_groups`` are the inner optimizer's own, so LR schedulers act on it. Between exchanges
    nothing crosses the network and parameters differ from rank to rank. They are equal at the end
    of a round if ``fragments=1`` and ``delay=0``. Moments stay on their rank.

    Args:
        inner: an optimizer over the model's parameters, or a list of several over disjoint ones;
            may be of this package (AdamS), which then averages nothing itself.
        every: H, steps of a round; 30 by default.
        round_seconds: instead of ``every``: a round ends on a rank at its first step after this
            time. Each rank takes as many steps as it can, and all are averaged by their weights.
        weighted: weight ranks by the steps each took since the last average (skipped ones not
            counted), or by the ``samples`` passed to ``step()``. Always on with
            ``round_seconds``. Default: equal weights.
        outer: makes the optimizer, one of this package, that steps the anchors it is given, on
            pseudo-gradients; those of further fragments are added to it as groups. None:
            ``Average`` around ``torch.optim.SGD`` with Nesterov's momentum, by ``payload_dtype``,
            ``outer_lr`` and ``outer_momentum``.
        payload_dtype: of what is exchanged, and of gradients in the averaged start; as in
            :class:`Average`.
        outer_lr, outer_momentum: of the default ``outer``, after a round of ``every`` steps. 1 and
            0: ranks average parameters. A momentum of None is 0.9, or 0.6 with a Muon inside.
        fragments: P, parts of the model that are exchanged at different steps of a round.
        delay: steps from the beginning of an exchange to its application; training goes on
            meanwhile. At most every / fragments.
        warmup_steps: steps at the start in which gradients are averaged, as by :class:`Average`.
        every_warmup_steps: steps after these in which rounds grow from 1 step to their length, and
            an ``outer`` around SGD, as the default, from averaging parameters to its own rate and
            momentum.
        max_grad_norm: clips each rank's own gradient to this L2 norm; in the start the averaged
            one.
        process_group: the ranks to average over. None: the default group, or one process where
            there is none.
        offload: "outer" keeps anchors and outer optimizer in host memory, and exchanges from there:
            the process group must carry host tensors (gloo does).
        simulate: take rounds on one process too, to see what many would do. Else, without other
            ranks, a step is that of ``inner``.

    State beside the inner optimizer's: in the outer one the anchors, its momentum and its
    ``residual``, each as large as the parameters; ``residual`` of the averaged start, while that
    lasts. What a rank moved is as large again while it is exchanged.

    Raises:
        TypeError: inner is no optimizer, or one that evaluates the model more than once a step
            (LBFGS).
        ValueError: inner compresses by itself; two of several have the same parameters; an option
            out of its range.
    """

    rank_local_state = ("residual",)
    _anchors: Anchors | None = None  # from the first local step on, where there are other ranks
    _exchange: FragmentSync | None = None  # on its way
    _due: frozenset[int] = frozenset()  # fragments that wait for an exchange
    _exchanged: dict[str, Any] = {}  # what ``stats`` report of the last exchange
    _clock: float | None = None  # as read last, in the running round
    _samples: float | None = None  # of the coming step
    _bytes_sent = 0  # before the running step
    _open_round: OpenRound | None = None
    _hidden: list[tuple[Tensor, Tensor]] | None = None  # parameters while anchors are shown

    def __init__(
        self,
        inner: OneOrSeveral,
        every: int | None = None,
        *,
        round_seconds: float | None = None,
        weighted: bool = False,
        outer: MakeOuter | None = None,
        payload_dtype: PayloadDtype = "int4",
        outer_lr: float = 0.7,
        outer_momentum: float | None = None,
        fragments: int = 1,
        delay: int = 0,
        warmup_steps: int = 0,
        every_warmup_steps: int = 800,
        max_grad_norm: float | None = None,
        process_group: ProcessGroup | None = None,
        offload: Literal["outer"] | None = None,
        simulate: bool = False,
    ):
        self.offload, inner = offload, combine_optimizers(inner)
        if outer_momentum is None:  # of the lowest loss (docs/local_settings.md)
            outer_momentum = 0.6 if "Muon" in describe_members(inner) else 0.9
        if every is not None and round_seconds is not None:
            raise ValueError(
                f"a round has every={every} steps or round_seconds={round_seconds}: pass one of "
                "them."
            )
        options: dict[str, Any] = dict(
            every=30 if every is None else every,
            round_seconds=round_seconds,
            weighted=weighted or round_seconds is not None,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            fragments=fragments,
            delay=delay,
            warmup_steps=warmup_steps,
            every_warmup_steps=every_warmup_steps,
            payload_dtype=payload_dtype,
            max_grad_norm=max_grad_norm,
        )
        self._make_outer, self._counts = outer, RoundCounts()
        super().__init__(inner, options, process_group, simulate)

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.base

    @property
    def _options(self) -> Group:
        """The options, with the number of steps."""
        return self._wrapper_groups[0]

    def check_group(self, group: Group) -> None:
        rounds.check_options(group, self.offload)

    def after_layout(self) -> None:
        super().after_layout()
        self._session.stats = self.add_to_stats(self._session.stats)

    def _settings(self) -> list[Setting]:
        running = {name: getattr(self._counts, name) for name in ("round", "begun", "mean_step")}
        settings = [*super()._settings(), ("running round", running)]
        if self._options["round_seconds"] is None:
            return settings
        # ranks differ in steps, and in schedules by them
        unequal = {"begun", "momentum", *OPTIONS_WITHOUT_HANDSHAKE}
        return [
            (subject, select_options(value, value.keys() - unequal))
            if isinstance(value, dict)
            else (subject, value)
            for subject, value in settings
        ]

    # A step

    def step(
        self, closure: Callable[[], Any] | None = None, *, samples: float | None = None
    ) -> Any:
        """Take a step of the inner optimizer, and the exchange that is due after it. All ranks must
        call it, with ``round_seconds`` as often as they can.

        ``samples``: in this rank's batch; its weight in the average, if ranks are ``weighted``.
        Pass them in every step on all ranks, or in none.

        Raises CommunicationError if the exchange failed; the rank's own step was then taken.
        """
        if samples is not None:
            is_good = rounds.is_number(samples) and 0 <= samples < math.inf
            require(is_good, "samples", samples, "a number >= 0")
            if not self._options["weighted"]:
                raise ValueError(
                    "samples= weighs ranks, and these have equal weights: make the optimizer with "
                    "weighted=True or round_seconds=."
                )
        self._samples = samples
        return super().step(closure)

    def step_as_generator(self) -> Generator[PendingCollective, None, None]:
        if self.averages_gradients:
            yield from super().step_as_generator()
            return
        session, is_applied = self._session, False
        with drop_scale_on_error(session):
            check_can_step(session)
            self._check_not_hidden()
            self._see_ranks_and_groups()
            if session.handshake is not Handshake.VERIFIED and not session.is_single_process:
                yield from self._follow_ranks_with_data()
                yield from Step(session, session.comm, session.steps + 1).verify_peers()
            self._ensure_anchors()
            if self._anchors is not None:
                # new anchors rebuild the outer optimizer's buckets: apply a running exchange before
                if self._exchange is not None and self._anchors.list_new(self._params):
                    with self._explain_failed_exchange():
                        is_applied = yield from self._perform_sync(self._exchange)
                self._anchors.note_training(self._params)
                self._read_clock()
            norm = yield from self._step_inner()  # line 1
            try:
                with self._explain_failed_exchange():
                    is_applied |= yield from self._synchronize()
            finally:
                session.has_local_gradients = False
                self._note_open_round()
            self._report(norm, is_applied)
            session.count_skips(math.isfinite(norm))

    @contextmanager
    def _explain_failed_exchange(self) -> Iterator[None]:
        """Name the step, the rank, and what to do in the error of an exchange."""
        try:
            yield
        except (CommunicationError, RankLeft) as error:
            advice = "It is tried again after the next step."
            if isinstance(error, RankLeft):
                advice = "Make a new process group on all ranks and call rebind()."
            session = self._session
            raise CommunicationError(
                f"step {session.steps} was taken on rank {session.comm.rank}, but not the exchange "
                f"that follows it: {error}. {advice}"
            ) from error

    # Exchanges

    def _synchronize(self) -> CollectiveGenerator[bool]:
        """Perform and prepare what is due after a step. Returns whether an exchange was applied."""
        options, counts, anchors, is_applied = self._options, self._counts, self._anchors, False
        if anchors is None:
            return False
        t, at = options["step"], options["step"] - counts.begun
        if options["round_seconds"] is not None:
            steps, is_over = at, counts.seconds >= rounds.round_duration(options, counts.mean_step)
            self._due |= anchors.fragments if is_over else set()
        else:
            steps = rounds.round_length(options, counts.begun - options["warmup_steps"])
            count = options["fragments"]
            self._due |= {n for n in anchors.fragments if rounds.is_due(n, at, steps, count)}
            if at >= steps:
                counts.round, counts.begun = counts.round + 1, t
        if self._exchange is not None and (self._due or t >= self._exchange.apply_at):
            is_applied = yield from self._perform_sync(self._exchange)
        if self._due:
            # never more steps than lie between two exchanges
            delay = min(int(options["delay"]), steps // int(options["fragments"]))
            apply_at = t + delay if delay else 0
            exchange = yield from self._prepare_sync(anchors, steps, apply_at)
            if delay:
                exchange.communication.poll()
            else:
                is_applied = yield from self._perform_sync(exchange)
        return is_applied

    @torch.no_grad()
    def _prepare_sync(
        self, anchors: Anchors, steps: int, apply_at: int = 0, is_last: bool = False
    ) -> CollectiveGenerator[FragmentSync]:
        """Begin the exchange of the fragments that are due, after a round of so many ``steps``."""
        fragments, session, counts = self._due, self._session, self._counts
        yield from self._follow_ranks_with_data()
        try:
            device = anchors.outer._session.device
            squared = anchors.set_pseudo_gradients(fragments, device)  # line 2
            if session.shard_communicators:  # a replica is lost where one of its shards is
                (total,) = yield from sum_over_groups(
                    session.shard_communicators, [float(squared)], session.device
                )
                squared = squared if math.isfinite(total) else squared.fill_(math.nan)
        except BaseException:
            anchors.cancel(fragments)
            raise
        self._due = frozenset()
        weight = counts.weight if self._options["weighted"] else 1.0
        contribution = Contribution(weight, steps, counts.seconds, is_last)
        self._exchange = exchange = begin_sync(  # line 3
            session, anchors, fragments, apply_at, squared, contribution
        )
        return exchange

    @torch.no_grad()
    def _perform_sync(self, exchange: FragmentSync) -> CollectiveGenerator[bool]:
        """Wait for an exchange, and apply it. Returns whether it was: not where the average is not
        finite. Where it fails, on all ranks, nothing is applied, and it is due again.
        """
        session = self._session
        waited = session.waits.seconds
        try:
            outcome = yield from exchange.communication.finish()
            apart = [outcome.squared, outcome.product]
            squared, product = yield from sum_over_groups(
                session.shard_communicators, apart, session.device
            )
            with defer_signals():
                is_applied = self._apply(exchange, outcome)
        except BaseException:
            exchange.step.undo()
            self._cancel_exchange()
            raise
        self._exchange = None
        exchange.step.comm.unfinished.clear()
        self._exchanged = {
            **self._exchanged,
            "weight": outcome.share,
            "round_steps": int(exchange.contribution.steps),
            "round_wait_seconds": session.waits.seconds - waited,
        }
        if outcome.ranks > 1 and squared > 0:
            cosine, spread = cosine_and_spread(squared, product, outcome.ranks)
            self._exchanged |= {"cosine": cosine, "spread": spread}
        if outcome.is_lost and is_applied:
            reset_moments(self.base, exchange.list_received(is_lost=True))
            session.warn_once(
                "lost",
                f"rank {session.comm.rank} had parameters that are not finite after step "
                f"{session.steps}: it took the other ranks' average, and zeroed its moments "
                "that are not finite. Lower the learning rate, or clip (max_grad_norm=).",
                0,  # on this rank, whichever it is
            )
        return is_applied

    def _apply(self, exchange: FragmentSync, outcome: Outcome) -> bool:
        """Apply lines 4 and 5, as a whole."""
        anchors, session, decision = exchange.anchors, self._session, outcome.decision
        counts = self._counts
        if outcome.is_empty:
            anchors.clear_gradients()
            return False
        if decision is not None and not decision.applied:
            exchange.step.commit(decision)  # which counts and reports what is skipped
            anchors.cancel(exchange.fragments)
            return False
        received = exchange.list_received(outcome.is_lost)
        is_late = exchange.apply_at > 0 and not outcome.is_lost
        since = [t.moved_since() if is_late else None for t in received]
        session.corrupt = f"the exchange before step {session.steps + 1} was interrupted"
        if decision is not None:
            exchange.step.commit(decision)  # line 4
        for t, moved in zip(received, since, strict=True):
            t.write_param(moved)  # line 5
        session.corrupt = ""
        anchors.outer._session.consolidated_at = session.consolidated_at = None
        anchors.clear_gradients()
        counts.weight = 0.0
        if self._options["round_seconds"] is not None:
            self._begin_round(counts.round + 1, counts.mean_step + outcome.mean.steps)
        return True

    def _cancel_exchange(self) -> None:
        """Give up the exchange on its way: it is due again."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.communication.close()
            exchange.step.session.forget_in_flight()
            exchange.anchors.cancel(exchange.fragments)
            self._due |= exchange.fragments

    # Line 1: a rank's own step

    def _step_inner(self) -> CollectiveGenerator[float]:
        """Step the inner optimizer, unless a gradient of this rank, or of another shard of its
        replica, is not finite, and count the step. Signals are handled afterwards.

        Returns the norm of the gradients; it is finite where the step was taken.
        """
        session = self._session
        check_gradients(session)
        scale = unscale_gradients(session)
        grads = {
            p: to_local(p.grad) for p in self._params if p.requires_grad and p.grad is not None
        }
        if not grads and session.comm.size > 1 and session.trainable and session.has_data:
            step = self._options["step"] + 1
            warn_without_gradients(session, step, "adds nothing to the average of its round")
        try:
            norm = yield from self._gradient_norm(grads)
        except BaseException:
            if scale is not None:
                restore_scale(session, scale)
            raise
        with defer_signals():
            if math.isfinite(norm):
                scale_all_([*grads.values()], clip_factor(norm, self._options["max_grad_norm"]))
                # a frozen parameter may have a gradient left
                with replace_gradients({p: None for p in self._params if not p.requires_grad}):
                    self.base.step()
                entries = [self.state.get(p, {}) for p in grads]
                if counts := [entry["step"] for entry in entries if "step" in entry]:
                    torch._foreach_add_(counts, 1)
                if grads and self._anchors is not None:
                    self._counts.weight += 1 if self._samples is None else self._samples
            for group in self._wrapper_groups:
                group["step"] += 1
            self._samples = None
        return norm

    def _gradient_norm(self, grads: dict[Tensor, Tensor]) -> CollectiveGenerator[float]:
        """The norm over all shards of the replica; NaN where a GradScaler has found an inf. Shards
        also agree on the time of the round.
        """
        shards = self._session.shard_communicators
        by_copies: dict[int, list[Tensor]] = {}
        for p, g in grads.items():
            by_copies.setdefault(get_replicate_size(p, shards), []).append(g)
        norms = {n: float(torch.nn.utils.get_total_norm(gs)) for n, gs in by_copies.items()}
        squared = sum(norm**2 / replicate_size for replicate_size, norm in norms.items())
        if getattr(self, "found_inf", None):
            squared = math.nan
        numbers = [squared, self._counts.seconds]
        total, seconds = yield from sum_over_groups(shards, numbers, self._session.device)
        self._counts.seconds = seconds / math.prod(comm.size for comm in shards)
        return math.sqrt(total)

    @property
    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    # Rounds

    def _begin_round(self, number: int, mean_step: float) -> None:
        """Begin a round that ends by time, on this rank's clock."""
        self._counts = RoundCounts(number, self._options["step"], mean_step)
        self._clock = monotonic()

    def _read_clock(self) -> None:
        """Add the time since the last call to that of a round that ends by time."""
        if self._options["round_seconds"] is None:
            return
        now = monotonic()
        self._counts.seconds += now - (now if self._clock is None else self._clock)
        self._clock = now

    @torch.inference_mode(False)  # its memory is used in later steps
    @torch.no_grad()
    def end_round(self) -> None:
        """End the running round: exchange what ranks have moved, and apply it.

        Afterwards parameters are equal on all ranks: call it on all of them after the last step,
        before an evaluation, or before the model is saved. Where they are equal nothing changes.

        Raises CommunicationError when the exchange failed; it is tried again after the next step.
        """
        for _ in self.end_round_as_generator():
            pass

    def end_round_as_generator(self) -> Generator[PendingCollective, None, None]:
        anchors, counts, last = self._anchors, self._counts, self._session.stats
        self._check_not_hidden()
        if anchors is None:
            return
        t, is_applied = self._options["step"], False
        at = t - counts.begun
        if self._exchange is not None:
            is_applied = yield from self._perform_sync(self._exchange)
        if self._options["round_seconds"] is not None:
            # take part in the rounds of ranks that go on, until all have come to their end
            is_applied = is_last = False
            while not is_last:
                self._read_clock()
                anchors.note_training(self._params)
                self._due |= anchors.fragments
                steps = self._options["step"] - self._counts.begun
                exchange = yield from self._prepare_sync(anchors, steps, is_last=True)
                is_applied |= yield from self._perform_sync(exchange)
                outcome = yield from exchange.communication.finish()  # it has ended
                is_last = outcome.mean.is_last == 1
        elif at > 0:
            counts.round, counts.begun = counts.round + 1, t
        self._due |= {moved.fragment for moved in anchors.tensors if moved.has_moved}
        if self._due:
            exchange = yield from self._prepare_sync(anchors, max(1, at))
            is_applied = yield from self._perform_sync(exchange)
        self._note_open_round()
        if is_applied or at > 0:
            self._report(last.grad_norm, is_applied, is_step=False)
            self._session.stats.bytes_sent += last.bytes_sent

    # Join: ranks that run out of data

    def _follow_ranks_with_data(self) -> CollectiveGenerator[None]:
        session = self._session
        if session.is_joining and session.comm.size > 1:
            yield from follow_ranks_with_data(session, session.comm)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if not kwargs.get("divide_by_initial_world_size", True):
            raise ValueError(
                "LocalSteps averages what all ranks have moved: pass "
                "divide_by_initial_world_size=True to Join."
            )
        return super().join_hook(**kwargs)

    def end_join(self) -> None:
        """End the running round: what all ranks have moved is averaged."""
        if self._session.is_joining:
            self.end_round()
        super().end_join()

    # The averaged start

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        return average(bucket, self.ops, self._update)

    def state_layouts(self, dtype: torch.dtype) -> dict[str, Layout]:
        return {"residual": LocalShape(dtype, optional=True)}

    def _bucket_layouts(self, bucket: Bucket) -> dict[str, Layout]:
        if self.averages_gradients:
            return super()._bucket_layouts(bucket)
        return {
            "residual": PaddedVector(
                bucket.compute_dtype, lambda p: 0, optional=True
            )  # of the start
        }

    @property
    def averages_gradients(self) -> bool:
        """True if the coming step belongs to ``warmup_steps``, where gradients are averaged."""
        return bool(self._options["step"] < self._options["warmup_steps"])

    @property
    def has_equal_replicas(self) -> bool:
        return self._anchors is None

    @torch.no_grad()
    def gradients_ready(self, params: Iterable[Tensor]) -> None:
        if self.averages_gradients:
            super().gradients_ready(params)
        elif self._exchange is not None:
            self._exchange.communication.poll()

    # Anchors

    def _see_ranks_and_groups(self) -> None:
        """Connect ranks, add new groups, and keep nothing of the averaged start."""
        session = self._session
        session.connect_ranks()
        if session.has_foreign_state:
            session.rebuild_buckets()
        self.add_groups_of_base()
        if any(bucket.flat["residual"].numel() for bucket in session.buckets):
            session.rebuild_buckets()

    def _ensure_anchors(self) -> None:
        """Make anchors once there are other ranks, and something to train."""
        session, options, counts = self._session, self._options, self._counts
        if self.offload and not session.comm.can_exchange(HOST):
            raise ValueError(
                "offload='outer' exchanges tensors in host memory, and the process group has no "
                "backend for those: init_process_group('cpu:gloo,cuda:nccl'), or without a "
                "backend, has one."
            )
        if session.is_single_process:
            self._cancel_exchange()
            self._anchors = None
        elif self._anchors is None:
            counts.begun = options["step"]
            self._anchors = self._make_anchors(options)
        if self._anchors is None:
            counts.begun = options["step"] + 1  # a round begins after this step
        else:
            self._connect_outer(self._anchors, options)

    def _make_anchors(self, options: Group, fragments: list[int] | None = None) -> Anchors | None:
        """Make anchors in these ``fragments``, or in as many as there are to be; None if nothing is
        trained.
        """
        if fragments is None:
            fragments = assign_to_fragments(self.param_groups, options["fragments"])
        if set(fragments) <= {-1}:
            return None
        make_outer = self._make_outer or partial(outer_sgd, options)
        count, on_host = options["fragments"], self.offload == "outer"
        return Anchors(self._params, fragments, count, make_outer, on_host)

    def _connect_outer(self, anchors: Anchors, options: Group) -> None:
        """Exchange anchors over the ranks there are."""
        outer, comm = anchors.outer, self._session.comm
        outer.simulate = self.simulate
        if options["delay"]:  # what runs beside training has a process group of its own
            comm = comm.with_own_group()
            outer._session.given_shard_communicators = [
                shards.with_own_group() for shards in self._session.shard_communicators
            ]
        if outer._session.group is not comm and not self._session.is_single_process:
            outer._session.waits = self._session.waits
            outer._session.connect_to(comm)
            self._bytes_sent = comm.bytes_sent

    @contextmanager
    def use_anchors(self) -> Iterator[None]:
        """Put the anchors into the model, and afterwards this rank's own parameters back::

            with optimizer.use_anchors():
                evaluate(model)

        Anchors are the parameters as of the last exchange, which are equal on all ranks. Nothing is
        communicated, and training goes on as if nothing had been. Any rank may do so alone, at any
        time. Within the block a step, the end of a round, and saving or loading this optimizer
        raise RuntimeError.
        """
        if self._anchors is None or self._hidden is not None:
            yield
            return
        # parameters that may have moved
        moved = [t for t in self._anchors.tensors if t.has_moved or t.anchor.grad is not None]
        with torch.no_grad():
            local_parts = [to_local(t.param.detach()) for t in moved]
            hidden = [(p, p.clone()) for p in local_parts]
            for t in moved:
                t.write_param()
            self._hidden = hidden
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in self._hidden:
                    p.copy_(value)
            self._hidden = None

    def _check_not_hidden(self) -> None:
        if self._hidden is not None:
            raise RuntimeError(
                "the model shows anchors, not this rank's parameters: leave use_anchors() first."
            )

    # Reports

    @property
    def round_is_open(self) -> bool:
        """True if parameters may differ from rank to rank: after a local step, until all fragments
        have been exchanged, or ``end_round()`` is called.
        """
        anchors = self._anchors
        has_moved = anchors is not None and any(t.has_moved for t in anchors.tensors)
        return has_moved or self._exchange is not None

    def _note_open_round(self) -> None:
        if self._anchors is not None:
            step = self._options["step"]
            self._open_round = self._open_round or OpenRound(self, step - 1)
            self._open_round.update(self.round_is_open, step, self.comm)

    def _report(self, norm: float, is_applied: bool, is_step: bool = True) -> None:
        """Renew ``stats``, after a step or the end of a round."""
        session, anchors, sent = self._session, self._anchors, 0
        phase = "exchanged" if is_applied else "dense" if session.is_single_process else "local"
        if anchors is not None:
            before, self._bytes_sent = self._bytes_sent, anchors.outer._session.comm.bytes_sent
            sent = self._bytes_sent - before
        non_finite = [] if math.isfinite(norm) else ["of this rank"]
        decision = StepDecision(norm=norm, phase_of={0: phase}, non_finite=non_finite)
        session.update_stats(decision, sent, is_step)
        is_shown = is_applied and session.comm.rank == 0 == get_rank() and session.comm.size > 1
        stats = session.stats
        if is_shown and stats.bytes_dense and session.claim_first("compression"):
            text = rounds.describe_rounds(self._options, stats.bytes_sent / stats.bytes_dense)
            show_line(f"{session.name}: {text}")

    def add_to_stats(self, stats: Stats, decision: StepDecision | None = None) -> Stats:
        options, counts = self._options, self._counts
        if self._anchors is not None:
            stats.residual_norm = weak_method(self._anchors.outer._session.residual_norm)
        known = {field.name: getattr(stats, field.name) for field in fields(Stats)}
        at = max(0, options["step"] - max(counts.begun, options["warmup_steps"]))
        return LocalStats(**known, round=counts.round, steps_into_round=at, **self._exchanged)

    # Other ranks

    @torch.no_grad()
    def rebind_as_generator(
        self, process_group: ProcessGroup | Communicator | None = None
    ) -> Generator[PendingCollective, None, None]:
        session = self._session
        self._check_not_hidden()
        before = session.connection.size if session.connection else 0
        self._cancel_exchange()
        session.forget_in_flight()
        session.connect_to(process_group)
        fragments = yield from self._adopt_counts()
        if fragments:
            self._see_ranks_and_groups()
            is_new = self._anchors is None
            self._anchors = self._anchors or self._make_anchors(self._options, fragments)
            self._ensure_anchors()
            if self._anchors is not None:
                yield from self._rejoin(self._anchors, is_new)
        else:
            yield from catch_up(session, session.comm)
        driver = session if self._anchors is None else self._anchors.outer._session
        session.stats.residual_norm = weak_method(driver.residual_norm)
        warn_of_lost_residuals(session, before, session.comm.size, driver.residual_norm)

    def _adopt_counts(self) -> CollectiveGenerator[list[int]]:
        """If any rank has anchors, adopt the counts of the one that is furthest, and what is due on
        any rank. Returns its fragments; none where no rank has anchors.

        Where rounds end by time a rank keeps its number of steps, if it has taken any, and begins a
        round if it lacks one.
        """
        session, options, counts = self._session, self._options, self._counts
        anchored = self._anchors.tensors if self._anchors else []
        fragment_of = {t.param: t.fragment for t in anchored}
        fragments = [fragment_of.get(p, -1) for p in self._params]
        exchanges = self._anchors.applied_exchanges if self._anchors else -1
        known = (counts.round, options["step"], counts.begun, counts.mean_step, exchanges)
        due = [n in self._due for n in fragments]
        numbers = [self._anchors is not None, *known, *fragments, *due]
        message = torch.tensor(numbers, dtype=torch.float64, device=session.device)
        rows: list[list[float]] = (yield from gather_rows(message, session.comm)).tolist()
        has_anchors, number, step, begun, mean_step, _, *numbers = max(rows)
        if not has_anchors:
            return []
        fragments, latest = [int(n) for n in numbers[: len(due)]], max(row[5] for row in rows)
        # a rank that lacks an exchange takes it over, and does not repeat it
        dues = [row[-len(due) :] for row in rows if row[5] == latest]
        self._due = frozenset(n for n, *on in zip(fragments, *dues, strict=True) if any(on))
        by_time = options["round_seconds"] is not None
        keeps_step = by_time and self._anchors is not None
        if not keeps_step:
            counts.round, counts.begun = int(number), int(begun)
            for group in self._wrapper_groups:
                group["step"] = int(step)
        if by_time and (not keeps_step or counts.round < number):
            self._begin_round(int(number), mean_step)
        return fragments

    def _rejoin(self, anchors: Anchors, is_new: bool) -> CollectiveGenerator[None]:
        """Bring anchors to where those of the other ranks are. On a rank that is new or lacks an
        exchange, the parameters of the exchanged fragments follow; the others keep their moves.
        """
        outer, before = anchors.outer._session, anchors.count_exchanges()
        outer.forget_in_flight()
        outer.forget_masks()
        yield from catch_up(outer, outer.comm, is_new)
        applied = anchors.count_exchanges()
        late = {n for n in anchors.fragments if is_new or applied[n] > before[n]}
        if late:
            self._counts.weight = 0.0
        for t in anchors.list_members(late):
            t.write_param()
            t.has_moved = False

    # Checkpoints

    def consolidate_as_generator(self) -> Generator[PendingCollective, None, None]:
        """Beside residuals, what the inner optimizer keeps becomes its mean over ranks, and within
        a round the parameters too: what ranks have moved is then the same on all.
        """
        session, anchors = self._session, self._anchors
        self._check_not_hidden()
        if self._exchange is not None:
            yield from self._perform_sync(self._exchange)
        if anchors is not None and self.round_is_open:
            weight = 1.0
            if self._options["weighted"]:  # of this rank in the round, by the mean over ranks
                message = torch.tensor([self._counts.weight], dtype=torch.float64)
                rows = yield from gather_rows(message.to(session.device), session.comm)
                mean = float(rows.mean())
                weight = self._counts.weight / mean if mean else 1.0
            for t in anchors.tensors:
                if not bool(to_local(t.param.detach()).isfinite().all()):
                    t.write_param()
                    reset_moments(self.base, [t])
                yield from average_state(t.param.detach(), session.device, session.comm, weight)
        if anchors is not None:
            yield from anchors.outer.consolidate_as_generator()
            yield from average_base(self.base, session.buckets, session.comm)
        yield from super().consolidate_as_generator()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, of our own options. The entry of a parameter has the inner optimizer's state
        under "base", and under "outer" its anchor, the outer optimizer's state of that, and the
        running round. No communication.
        """
        saved = self._saved()
        for entry in saved["state"].values() if not self._options["warmup_steps"] else ():
            entry.pop("residual", None)
        for place, entry in enumerate(self._save_rounds()):
            if entry is not None:
                saved["state"].setdefault(place, {})["outer"] = entry
        outer = [] if self._anchors is None else [self._anchors.outer._session]
        warn_of_missing_state(self._session, outer)
        return saved

    def _save_rounds(self) -> list[Entry | None]:
        """Return what the state dict has under "outer"; before there are anchors, of some that are
        made for it.
        """
        self._check_not_hidden()
        options = self._options
        anchors = self._anchors or self._make_anchors(options)
        if anchors is None:
            return [None] * len(self._params)
        entries = save_rounds(
            self._params, anchors, options, self._counts, self._due, self._exchange
        )
        for entry in entries if self._anchors is None else ():
            if entry is not None:
                entry["fragment"].fill_(-1)
        return entries

    def _show_base(self) -> None:
        """Also name what is under "outer", for a flattened state dict."""
        super()._show_base()
        for entry in self.state.values():
            entry["outer"] = {}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load all of it. A checkpoint without "base" is taken for the inner optimizer's own: then
        all begins anew.

        Raises ValueError, with nothing loaded, when it does not fit. All ranks must load.
        """
        self._check_not_hidden()
        groups = check_groups(self._session, state_dict)
        mixes = [group["mix"] for group in groups if group.get("mix")]
        if "outer" in state_dict or mixes:
            what = f"mix={mixes[0]!r}" if mixes else "anchors apart"
            raise ValueError(
                f"loaded state dict is of an earlier version of LocalSteps, with {what}: call "
                'end_round() there, and load what its state_dict() has under "base". Outer '
                "momentum then begins anew."
            )
        state_dict, entries = split_rounds(state_dict)
        options = {**self._options, **groups[0]}
        written_by = groups[0].get("class", self._session.name)
        if any(entries) and written_by != self._session.name:
            raise ValueError(
                f"loaded state dict is of {written_by}, and its anchors are nothing that "
                f"{self._session.name} goes on from: load a checkpoint of {self._session.name}."
            )
        anchors, saved = self._restore_anchors(entries, options)
        super().load_state_dict(state_dict)
        self._resume(anchors, saved)

    def _restore_anchors(
        self, entries: list[Entry | None], options: Group
    ) -> tuple[Anchors | None, SavedRounds | None]:
        """Return anchors as they were saved, with their outer optimizer, None if none were; and
        what entries have beside them.
        """
        try:
            saved = read_rounds(entries)
            anchors = None if saved is None else self._make_anchors(options, saved.fragments)
            if saved is not None and anchors is not None:
                self._session.connect_ranks()
                self._connect_outer(anchors, options)
                saved.load_into(anchors, options.get("residuals", "mean"))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"loaded state dict has an outer optimizer that is damaged, or of other "
                f"parameters: {error}."
            ) from error
        return anchors, saved

    def _resume(self, anchors: Anchors | None, saved: SavedRounds | None) -> None:
        """Go on with anchors that were saved, and with the exchange that was on its way."""
        if self._exchange is not None:
            self._exchange.drain()
        self._cancel_exchange()
        self._clock = None
        self._anchors, self._due = anchors, frozenset()
        if saved is not None:
            self._due, self._counts = saved.due, saved.counts
            for group in self._wrapper_groups:
                group["step"] = saved.step
        if anchors is not None and saved is not None and saved.exchange:
            self._exchange = begin_sync(self._session, anchors, **saved.exchange)
        if self._open_round is not None:
            self._open_round.update(False, self._counts.begun, self.comm)
        self._note_open_round()
        self._session.stats = self.add_to_stats(self._session.stats)

    def _begin_anew(self) -> None:
        self._counts = RoundCounts()
        super()._begin_anew()

    def _contents(self) -> dict[str, Any]:
        saved = None if self._anchors is None else self._save_rounds()
        kept = {"_make_outer": self._make_outer, "_counts": self._counts, "_rounds": saved}
        return {**super()._contents(), **kept}

    @torch.no_grad()
    def _revive(self, contents: dict[str, Any], group: ProcessGroup | Communicator | None) -> None:
        contents = dict(contents)
        entries = contents.pop("_rounds")
        super()._revive(contents, group)
        if entries is not None:
            self._resume(*self._restore_anchors(entries, self._options))
