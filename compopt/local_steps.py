"""Local steps: ranks train on their own for a while, and then average what they moved (DiLoCo, and
Streaming DiLoCo where fragments or a delay are asked for).

Rank k has parameters w_k, in fragments p = 0 to P - 1; anchors a_p are the same on all ranks, and a
round has H steps::

    1  inner.step()                                     # every step, on the rank's own gradients
    at step p * H // P of a round (0: its last), ``prepare_sync``
    2  d_k <- a_p - w_k                                 # the pseudo-gradient
    3  d <- mean over ranks of d_k, as the outer optimizer's class averages gradients
    ``delay`` steps later, on all ranks or on none, ``perform_sync``
    4  a_p <- the outer optimizer steps a_p by d        # v <- mu v + d;  a_p <- a_p - lr (d + mu v)
    5  w_k <- mix (w_k of line 2) + (1 - mix) a_p + what the rank moved since

At first all gradients are averaged for ``warmup_steps``, as ``Average(inner)`` does, and rounds
grow from 1 step to H over ``every_warmup_steps``, mu and lr from 0 and 1 with them.

The outer optimizer has the anchors for its parameters, and its own groups and buckets for each
fragment; an exchange is one step of the fragments that are due. Where we differ: the papers lose
what a rank moved while an exchange was on its way, in part (mix = .5) or whole (0). And d_k is
taken from where the rank began: of parameters below float32 that is a_p as they show it, else
rounding would pull anchors to what is shown of them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ._engine import frozen, gradients
from ._engine.decision import StepDecision
from ._engine.face import Group
from ._engine.missing_ranks import RankLeft
from ._engine.moving import average_base
from ._engine.peers import gather_rows, warn_without_gradients
from ._engine.recovery import catch_up, warn_of_lost_residuals
from ._engine.reporting import error_of_skips
from ._engine.saving import warn_of_what_is_missing
from ._engine.session import Corrupt, Sync
from ._engine.signals import defer_signals
from ._engine.stats import Stats
from ._engine.step import Step, check_can_step
from ._engine.turns import Background, Turns, sum_over
from ._engine.weakly import weakly
from ._engine.wrapper import Wrapper
from ._local.anchors import Anchors, MakeOuter, deal, mend_moments
from ._local.exchange import Exchange, check_saved, communicate, distances
from ._local.open_round import OpenRound
from ._local.rounds import (
    LocalStats,
    check_counts,
    check_options,
    delay_within,
    is_due,
    outer_share,
    round_length,
    with_rounds,
)
from ._ops.norms import clip_factor, scale_all_
from ._state.buckets import Bucket, local
from ._state.devices import HOST
from ._state.layouts import Dense, Layout, Prefix
from ._wire.collectives import Communicator, PendingCollective, ProcessGroup, count_copies
from ._wire.payload import PayloadDtype
from ._wire.requests import CommunicationError, RequestGenerator
from ._wire.warning import warn
from .average import average, outer_sgd


class LocalSteps(Wrapper):
    """Any torch optimizer, stepped by every rank on its own gradients; every so many steps ranks
    average what they moved::

        adamw = torch.optim.AdamW(model.parameters(), lr=3e-4)
        optimizer = compopt.LocalSteps(adamw, every=30)

    ``param_groups`` are the inner optimizer's own, so LR schedulers act on it. Between exchanges
    nothing crosses the network and parameters differ from rank to rank; they are equal when a round
    ends, where all fragments are exchanged then and nothing is delayed. Moments stay on their rank.

    Args:
        inner: an optimizer over the model's parameters; one of this package (AdamS) is stopped from
            averaging.
        every: H, steps of a round.
        outer: makes the optimizer, one of this package, that steps the anchors it is given, on
            pseudo-gradients. None: ``Average`` around ``torch.optim.SGD`` with Nesterov's
            momentum, by ``payload_dtype``, ``outer_lr`` and ``outer_momentum``.
        payload_dtype: of what is exchanged, and of gradients in the averaged start; as in
            :class:`Average`.
        outer_lr, outer_momentum: of the default ``outer``, after a round of ``every`` steps. 1 and
            0: ranks average parameters.
        fragments: P, parts of the model that are exchanged at different steps of a round.
        delay: steps from the beginning of an exchange to its application; training goes on
            meanwhile. At most every / fragments.
        mix: what a rank keeps of its own parameters, in [0, 1); the rest is the new anchor.
        warmup_steps: steps at the start in which gradients are averaged, as by :class:`Average`.
        every_warmup_steps: steps after these in which rounds grow from 1 step to ``every``, and
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
        ValueError: inner compresses by itself; an option out of its range.
    """

    averaged_state = ("residual",)
    # from the first local step on, where there are other ranks
    _anchors: Anchors | None = None
    _exchange: Exchange | None = None  # on its way
    _due: frozenset[int] = frozenset()  # fragments that wait for an exchange
    _distances = (0.0, 0.0)  # cosine and spread, of the last exchange
    _bytes_sent = 0  # before the running step
    _warned_of_loss = False
    _open_round: OpenRound | None = None  # before the first local step

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        every: int = 30,
        *,
        outer: MakeOuter | None = None,
        payload_dtype: PayloadDtype = "int4",
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        warmup_steps: int = 0,
        every_warmup_steps: int = 800,
        max_grad_norm: float | None = None,
        process_group: ProcessGroup | None = None,
        offload: Literal["outer"] | None = None,
        simulate: bool = False,
    ):
        self.offload = offload
        options: dict[str, Any] = dict(
            every=every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            fragments=fragments,
            delay=delay,
            mix=mix,
            warmup_steps=warmup_steps,
            every_warmup_steps=every_warmup_steps,
            payload_dtype=payload_dtype,
            max_grad_norm=max_grad_norm,
            round=0,  # rounds that have ended
            begun=0,  # the step after which the running one began
        )
        self._make_outer = outer
        super().__init__(inner, options, process_group, simulate)

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.base

    @property
    def _options(self) -> Group:
        """The options, with the counts of the running round."""
        return self._wrapper_groups[0]

    def check_group(self, group: Group) -> None:
        check_options(group, self.offload)

    def after_layout(self) -> None:
        super().after_layout()
        self._session.stats = self.add_to_stats(self._session.stats)

    # The averaged start

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        return average(bucket, self.ops, self._update)

    def state_specs(self, dtype: torch.dtype) -> dict[str, Layout]:
        return {"residual": Dense(dtype, optional=True)}

    def _specs(self, bucket: Bucket) -> dict[str, Layout]:
        if self.averages_gradients:
            return super()._specs(bucket)
        return {"residual": Prefix(bucket.wide, lambda p: 0, compressed_only=True, optional=True)}

    @property
    def averages_gradients(self) -> bool:
        """Whether the step that comes is one of the averaged start."""
        return bool(self._options["step"] < self._options["warmup_steps"])

    @property
    def has_equal_replicas(self) -> bool:
        return self._anchors is None

    @torch.no_grad()
    def gradients_ready(self, params: Iterable[Tensor]) -> None:
        if self.averages_gradients:
            super().gradients_ready(params)
        elif self._exchange is not None:
            self._exchange.turns.poll()

    # A step

    def step_in_turns(self) -> Generator[PendingCollective, None, None]:
        if self.averages_gradients:
            yield from super().step_in_turns()
            return
        session = self._session
        check_can_step(session)
        self._look_around()
        if session.sync is not Sync.VERIFIED and not session.is_single_process:
            yield from Step(session, session.comm, session.steps + 1).verify_peers()
        self._connect()
        if self._anchors is not None:
            self._anchors.note_training()
        norm = yield from self._step_inner()  # line 1
        try:
            is_applied = yield from self._synchronize()
        except (CommunicationError, RankLeft) as error:
            gradients.drop_scale(session)
            advice = "It is tried again after the next step."
            if isinstance(error, RankLeft):
                advice = "Make a new process group on all ranks and call rebind()."
            raise CommunicationError(
                f"step {session.steps} was taken on rank {session.comm.rank}, but not the exchange "
                f"that follows it: {error}. {advice}"
            ) from error
        finally:  # the rank's own step stands, whatever became of the exchange
            session.has_local_gradients = False
            self._note_open_round()
        self._report(norm, is_applied)
        if too_many := error_of_skips(session, math.isfinite(norm)):
            raise too_many

    def _look_around(self) -> None:
        """See which ranks and groups there are, and keep nothing of the averaged start."""
        session = self._session
        session.connect_ranks()
        if frozen.reset_from_outside(session):
            session.rebuild_buckets()
        self.add_groups_of_base()
        if any(bucket.flat["residual"].numel() for bucket in session.buckets):
            session.rebuild_buckets()

    def _connect(self) -> None:
        """Make anchors once there are other ranks."""
        session, h = self._session, self._options
        if session.is_single_process:
            self._cancel_exchange()
            self._anchors, h["begun"] = None, h["step"] + 1  # a round begins after this step
            return
        if self.offload and not session.comm.can_exchange(HOST):
            raise ValueError(
                "offload='outer' exchanges tensors in host memory, and the process group has no "
                "backend for those: init_process_group('cpu:gloo,cuda:nccl'), or without a "
                "backend, has one."
            )
        if self._anchors is None:
            h["begun"] = max(h["begun"], h["warmup_steps"])
            self._anchors = self._make_anchors(h, *deal(self.param_groups, h["fragments"]))
        self._connect_outer(self._anchors, h)

    def _make_anchors(self, h: Group, params: list[Tensor], fragments: list[int]) -> Anchors:
        make_outer = self._make_outer or partial(outer_sgd, h)
        return Anchors(params, fragments, h["fragments"], make_outer, self.offload == "outer")

    def _connect_outer(self, anchors: Anchors, h: Group) -> None:
        """Exchange anchors over the ranks there are."""
        outer, comm = anchors.outer, self._session.comm
        outer.simulate = self.simulate
        if h["delay"]:  # what runs beside training has a process group of its own
            comm = comm.with_own_group()
        if outer._session.group is not comm and not self._session.is_single_process:
            outer._session.connect_to(comm)
            self._bytes_sent = comm.bytes_sent

    def _step_inner(self) -> Turns[float]:
        """Step the inner optimizer, unless a gradient of this rank, or of another shard of its
        replica, is not finite, and count the step. Signals are handled afterwards.

        Returns the norm of the gradients; it is finite where the step was taken.
        """
        session = self._session
        gradients.check(session)
        scale = gradients.unscale(session)
        grads = {
            p: local(p.grad)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        }
        if not grads and session.comm.size > 1 and session.trainable:
            step = self._options["step"] + 1
            warn_without_gradients(session, step, "adds nothing to the average of its round")
        try:
            norm = yield from self._gradient_norm(grads)
        except BaseException:
            if scale is not None:
                gradients.scale_back(session, scale)
            raise
        is_taken = math.isfinite(norm)
        if is_taken:
            factor = clip_factor(norm, self._options["max_grad_norm"])
            scale_all_([*grads.values()], factor)
        with defer_signals():
            if is_taken:
                self.base.step()
                entries = [self.state.get(p, {}) for p in grads]
                if counts := [entry["step"] for entry in entries if "step" in entry]:
                    torch._foreach_add_(counts, 1)
            for group in self._wrapper_groups:
                group["step"] += 1
        return norm

    def _gradient_norm(self, grads: dict[Tensor, Tensor]) -> Turns[float]:
        """The norm over all shards of the replica; NaN where a GradScaler has found an inf."""
        shards = self._session.make_shard_communicators
        by_copies: dict[int, list[Tensor]] = {}
        for p, g in grads.items():
            by_copies.setdefault(count_copies(p, shards), []).append(g)
        norms = {n: float(torch.nn.utils.get_total_norm(gs)) for n, gs in by_copies.items()}
        squared = sum(norm**2 / copies for copies, norm in norms.items())
        if getattr(self, "found_inf", None):
            squared = math.nan
        (total,) = yield from sum_over(shards, [squared], self._session.device)
        return math.sqrt(total)

    # Exchanges

    def _synchronize(self) -> Turns[bool]:
        """Perform and prepare what is due after a step. Returns whether an exchange was applied."""
        h, anchors, is_applied = self._options, self._anchors, False
        if anchors is None:
            return False
        t = h["step"]
        steps = round_length(h, h["begun"] - h["warmup_steps"])
        at, delay = t - h["begun"], delay_within(h, steps)
        self._due |= {n for n in anchors.fragments if is_due(n, at, steps, h["fragments"])}
        if at >= steps:
            h.update(round=h["round"] + 1, begun=t)
        if self._exchange is not None and (self._due or t >= (self._exchange.apply_at or 0)):
            is_applied = yield from self._perform_sync(self._exchange)
        if self._due:
            share, apply_at = outer_share(h, steps), t + delay if delay else None
            exchange = yield from self._prepare_sync(anchors, share, apply_at, h["mix"])
            if delay:
                exchange.turns.poll()
            else:
                is_applied = yield from self._perform_sync(exchange)
        return is_applied

    @torch.no_grad()
    def _prepare_sync(
        self, anchors: Anchors, share: float, apply_at: int | None, mix: float
    ) -> Turns[Exchange]:
        """Make the exchange of the fragments that are due; rate and momentum of the outer optimizer
        have this ``share`` of their own.
        """
        fragments, session = self._due, self._session
        try:
            squared = anchors.set_pseudo_gradients(fragments)  # line 2
            (squared,) = yield from sum_over(
                session.make_shard_communicators, [squared], session.device
            )
        except BaseException:
            anchors.cancel(fragments)
            raise
        if not math.isfinite(squared):
            anchors.clear_gradients()  # this rank takes the average of the others
        anchors.set_outer_share(share)
        self._due = frozenset()
        return self._begin_exchange(anchors, fragments, apply_at, mix, squared)

    def _begin_exchange(
        self,
        anchors: Anchors,
        fragments: frozenset[int],
        apply_at: int | None,
        mix: float,
        squared: float,
    ) -> Exchange:
        session = anchors.outer._session
        groups = anchors.groups_of(fragments)
        step = Step(session, session.connect_ranks(), anchors.exchanges + 1, groups)
        turns = communicate(self._session, anchors, step, squared, apply_at is not None)  # line 3
        exchange = Exchange(anchors, fragments, apply_at, mix, squared, step, Background(turns))
        self._exchange = exchange
        if apply_at is not None:
            session.comm.unfinished.add("delayed exchange")
        return exchange

    @torch.no_grad()
    def _perform_sync(self, exchange: Exchange) -> Turns[bool]:
        """Wait for an exchange, and apply it. Returns whether it was: not where the average is not
        finite.

        Where it fails, on all ranks, nothing is applied, and it is due again.
        """
        session = self._session
        try:
            outcome = yield from exchange.turns.finish()
            apart = [outcome.squared, outcome.product]
            own, product = yield from sum_over(
                session.make_shard_communicators, apart, session.device
            )
            with defer_signals():
                is_applied = self._apply(exchange, outcome.decision)
        except BaseException as error:
            exchange.step.undo(error)
            self._cancel_exchange()
            raise
        self._exchange = None
        exchange.step.comm.unfinished.clear()
        if outcome.ranks > 1 and own > 0:
            self._distances = distances(own, product, outcome.ranks)
        if exchange.is_lost and is_applied:
            mend_moments(self.base, exchange.tensors)
            if not self._warned_of_loss:
                self._warned_of_loss = True
                warn(
                    f"rank {session.comm.rank} had parameters that are not finite after step "
                    f"{session.steps}: it took the other ranks' average, and its moments begin "
                    "anew. Lower the learning rate, or clip (max_grad_norm=).",
                    0,  # on this rank, whichever it is
                )
        return is_applied

    def _apply(self, exchange: Exchange, decision: StepDecision | None) -> bool:
        """Lines 4 and 5, as a whole."""
        anchors, session = exchange.anchors, self._session
        if decision is not None and not decision.applied:
            exchange.step.commit(decision)  # which counts and reports what is skipped
            anchors.cancel(exchange.fragments)
            return False
        sent, mix = exchange.tensors, exchange.mix
        since = [t.moved_since() if exchange.apply_at else None for t in sent]
        if exchange.is_lost:
            since, mix = [None] * len(sent), 0.0
        sync = session.sync
        session.sync = Corrupt(f"the exchange before step {session.steps + 1} was interrupted")
        if decision is not None:
            exchange.step.commit(decision)  # line 4
        for t, moved in zip(sent, since, strict=True):
            t.write_back(moved, mix)  # line 5
            t.has_moved |= mix > 0
        session.sync = sync
        anchors.outer._session.consolidated_at = None
        anchors.clear_gradients()
        return True

    def _cancel_exchange(self) -> None:
        """Give up the exchange on its way: it is due again."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.give_up()
            self._due |= exchange.fragments

    @torch.no_grad()
    def end_round(self) -> None:
        """End the running round: exchange what ranks have moved, and apply it.

        Afterwards parameters are equal on all ranks: call it on all of them after the last step,
        before an evaluation, or before the model is saved. Where they are equal nothing changes.

        Raises CommunicationError when the exchange failed; it is tried again after the next step.
        """
        for _ in self.end_round_in_turns():
            pass

    def end_round_in_turns(self) -> Generator[PendingCollective, None, None]:
        h, anchors, last, is_applied = self._options, self._anchors, self._session.stats, False
        if anchors is None:
            return
        t, begun = h["step"], h["begun"]
        if self._exchange is not None:
            self._exchange.mix = 0.0
            is_applied = yield from self._perform_sync(self._exchange)
        if t > begun:
            h.update(round=h["round"] + 1, begun=t)
        self._due |= {moved.fragment for moved in anchors.tensors if moved.has_moved}
        if self._due:
            share = outer_share(h, max(1, t - begun))
            exchange = yield from self._prepare_sync(anchors, share, None, 0.0)
            is_applied = yield from self._perform_sync(exchange)
        if is_applied:
            self._report(last.grad_norm, is_applied)
            self._session.stats.bytes_sent += last.bytes_sent
        self._note_open_round()

    @property
    def round_is_open(self) -> bool:
        """True if parameters may differ from rank to rank: after a local step, until all fragments
        have been exchanged or ``end_round()`` is called.
        """
        if self._anchors is None:
            return False
        return self._exchange is not None or any(t.has_moved for t in self._anchors.tensors)

    def _note_open_round(self) -> None:
        if self._open_round is None and self.round_is_open:
            self._open_round = OpenRound(self)
        if self._open_round is not None:
            self._open_round.update(self.round_is_open, self.comm)

    # Reports

    def add_to_stats(self, stats: Stats, decision: StepDecision | None = None) -> LocalStats:
        return with_rounds(stats, self._options, *self._distances)

    def _report(self, norm: float, is_applied: bool) -> None:
        """Renew ``stats``, after a step or the end of a round."""
        session, anchors, is_taken = self._session, self._anchors, math.isfinite(norm)
        phase = "exchanged" if is_applied else "dense" if session.is_single_process else "local"
        stats = Stats(
            step=session.steps,
            phase=phase if is_taken else "skipped",
            bytes_dense=sum(bucket.dense_bytes for bucket in session.buckets),
            grad_norm=norm,
            buckets=len(session.buckets),
            skipped=session.stats.skipped + (not is_taken),
            reason="" if is_taken else "non-finite gradient on this rank",
        )
        if anchors is not None:
            outer = anchors.outer._session
            stats.bytes_sent = outer.comm.bytes_sent - self._bytes_sent
            self._bytes_sent += stats.bytes_sent
            stats.residual_norm = weakly(outer.residual_norm)
        session.stats = self.add_to_stats(stats)

    # Groups and ranks

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the inner optimizer; it is a fragment of its own.

        All ranks must do so at the same step.
        """
        super().add_param_group(param_group)
        if self._anchors is not None and self.param_groups[-1]["params"]:
            self._anchors.add(self.param_groups[-1]["params"])

    @torch.no_grad()
    def rebind_in_turns(
        self, process_group: ProcessGroup | Communicator | None = None
    ) -> Generator[PendingCollective, None, None]:
        session, is_new = self._session, self._anchors is None
        before = session.connection.size if session.connection else 0
        self._cancel_exchange()
        session.forget_in_flight()
        session.connect_to(process_group)
        if (yield from self._adopt_counts()):
            self._look_around()
            self._connect()
            if self._anchors is not None:
                yield from self._rejoin(self._anchors, is_new)
        else:
            yield from catch_up(session, session.comm)
        driver = session if self._anchors is None else self._anchors.outer._session
        session.stats.residual_norm = weakly(driver.residual_norm)
        warn_of_lost_residuals(session, before, session.comm.size, driver.residual_norm)

    def _adopt_counts(self) -> Turns[bool]:
        """Where any rank is past the averaged start, adopt the counts of the one that is furthest.
        Returns whether any is.
        """
        session, h = self._session, self._options
        counts = [self._anchors is not None, h["step"], h["round"], h["begun"]]
        message = torch.tensor(counts, dtype=torch.int64, device=session.device)
        is_past, *furthest = max((yield from gather_rows(message, session.comm)).tolist())
        for group in self._wrapper_groups if is_past else ():
            group.update(zip(("step", "round", "begun"), furthest, strict=True))
        return bool(is_past)

    def _rejoin(self, anchors: Anchors, is_new: bool) -> Turns[None]:
        """Bring anchors, and parameters of ranks that are new or lack an exchange, to where those
        of the others are. What is due on any rank is due on all.
        """
        outer, before = anchors.outer._session, anchors.exchanges
        outer.forget_in_flight()
        outer.forget_masks()
        yield from catch_up(outer, outer.comm, is_new)
        if is_new or anchors.exchanges > before:
            self._due = frozenset()
            for t in anchors.tensors:
                t.write_back(None, 0.0)
                t.has_moved = False
        fragments = sorted(anchors.fragments)
        due = torch.tensor(
            [n in self._due for n in fragments], dtype=torch.int64, device=outer.device
        )
        due_anywhere = (yield from gather_rows(due, outer.comm)).any(0).tolist()
        self._due = frozenset(
            n for n, is_due in zip(fragments, due_anywhere, strict=True) if is_due
        )

    # Checkpoints

    def consolidate_in_turns(self) -> Generator[PendingCollective, None, None]:
        """Beside residuals, what the inner optimizer keeps becomes its mean over ranks."""
        if self._exchange is not None:
            yield from self._exchange.turns.finish()
        yield from super().consolidate_in_turns()
        if self._anchors is not None:
            yield from self._anchors.outer.consolidate_in_turns()
            yield from average_base(self.base, self._session.buckets, self._session.comm)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, of our own options, with the inner optimizer's under "base", and under
        "outer" anchors, the outer optimizer's, and what is on its way. No communication.
        """
        saved = super().state_dict()
        for entry in saved["state"].values() if not self.averages_gradients else ():
            entry.pop("residual", None)
        if self._anchors is not None:
            saved["outer"] = self._outer_state()
            warn_of_what_is_missing(self._session, [self._anchors.outer._session])
        return saved

    def _outer_state(self) -> dict[str, Any] | None:
        if self._anchors is None:
            return None
        saved = {**self._anchors.state_dict(), "due": sorted(self._due), "exchange": None}
        if self._exchange is not None:
            saved["exchange"] = self._exchange.state_dict()
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load all of it. A checkpoint without "base" is taken for the inner optimizer's own: then
        all begins anew.

        Raises ValueError, with nothing loaded, when it does not fit. All ranks must load.
        """
        groups = self._groups_of(state_dict)
        for group in groups:
            check_counts(group)
        saved = state_dict.get("outer")
        name = type(self).__name__
        writer = groups[0].get("class", name) if groups else name
        if saved is not None and writer != name:
            raise ValueError(
                f"loaded state dict is of {writer}, and {name} does not go on from that: build "
                f"{writer}, or load a checkpoint of {name} or of its inner optimizer."
            )
        h = {**self._options, **groups[0]}
        anchors = None if saved is None else self._anchors_of(saved, h)
        super().load_state_dict(state_dict)
        self._take_over_anchors(anchors, saved)

    def _anchors_of(self, saved: Any, h: Group) -> Anchors:
        """Anchors as they were saved, with their outer optimizer, by the options ``h``."""
        if isinstance(saved, list):
            raise ValueError(
                "loaded state dict is of LocalSteps as written by compopt 0.1.0, with an outer "
                "optimizer for every fragment: call end_round() there, and load what its "
                'state_dict() has under "base". Outer momentum then begins anew.'
            )
        params = [p for group in self.param_groups for p in group["params"]]
        try:
            check_saved(saved, len(params))
            anchors = self._make_anchors(h, params, saved["fragments"])
            self._session.connect_ranks()
            self._connect_outer(anchors, h)
            anchors.load_state_dict(saved)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"loaded state dict has an outer optimizer that is damaged: {error!r}."
            ) from error
        return anchors

    def _take_over_anchors(self, anchors: Anchors | None, saved: Any) -> None:
        """Go on with anchors that were saved, and with the exchange that was on its way."""
        if self._exchange is not None:
            self._exchange.drain()
        self._cancel_exchange()
        self._anchors, self._due = anchors, frozenset(saved["due"] if saved else ())
        if anchors is not None and saved["exchange"]:
            fragments = frozenset(saved["exchange"]["fragments"])
            self._begin_exchange(anchors, **{**saved["exchange"], "fragments": fragments})

    def _begin_anew(self) -> None:
        for group in self._wrapper_groups:
            group.update(round=0, begun=0)
        super()._begin_anew()

    def _contents(self) -> dict[str, Any]:
        outer = {"_make_outer": self._make_outer, "_outer_state": self._outer_state()}
        return {**super()._contents(), **outer}

    @torch.no_grad()
    def _revive(self, contents: dict[str, Any], group: ProcessGroup | Communicator | None) -> None:
        contents = dict(contents)
        saved = contents.pop("_outer_state")
        super()._revive(contents, group)
        if saved is not None:
            self._take_over_anchors(self._anchors_of(saved, self._options), saved)
