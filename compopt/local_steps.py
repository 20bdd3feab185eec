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
import weakref
from collections.abc import Generator, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ._engine import gradients, moving
from ._engine.averages import Averages
from ._engine.face import Group
from ._engine.handshake import gather
from ._engine.recovery import catch_up, tell_what_is_lost
from ._engine.saving import warn_of_what_is_missing
from ._engine.signals import held_back
from ._engine.stats import Stats
from ._engine.stepping import Step, refuse
from ._engine.turns import Turns, ask
from ._engine.verdicts import Verdict
from ._engine.weakly import weakly
from ._engine.wrapping import Wrapping
from ._local import rounds
from ._local.anchors import Anchors, MakeOuter, deal
from ._local.exchange import Exchange, Outcome, communicate, distances
from ._local.rounds import add_rounds, check_counts, check_options, open_rounds
from ._ops.clipping import clip_factor, scale_all_
from ._state.buckets import Bucket, local
from ._state.devices import HOST
from ._state.layouts import Dense, Layout, Prefix
from ._wire.comm import Comm, ProcessGroup
from ._wire.dtypes import PayloadDtype
from ._wire.meshes import copies_of
from ._wire.pending import Pending
from ._wire.requests import AllReduceMean, Asking, CommunicationError
from ._wire.warning import warn
from .average import average, outer_sgd


class LocalSteps(Wrapping):
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
    _side: tuple[Comm, Comm] | None = None  # the ranks, and their group for delayed exchanges
    _due: frozenset[int] = frozenset()  # fragments that wait for an exchange, one having failed
    _distances = (0.0, 0.0)  # cosine and spread, of the last exchange
    _bytes_sent = 0  # before the running step
    _warned_of_loss = False

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
        return self._own_groups[0]

    def check_group(self, group: Group) -> None:
        check_options(group, self.offload)

    def after_layout(self) -> None:
        super().after_layout()
        self._engine.stats = add_rounds(self._engine.stats, self._options, *self._distances)

    # The averaged start

    def algorithm(self, bucket: Bucket) -> Asking[None]:
        return average(bucket, self.ops, self._averages)

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

    def _end_start(self) -> None:
        """Keep nothing of the averaged start."""
        if any(bucket.flat["residual"].numel() for bucket in self._buckets):
            self._engine.rebuild()
            self._averages = Averages()

    @torch.no_grad()
    def gradients_ready(self, params: Iterable[Tensor]) -> None:
        if self.averages_gradients:
            super().gradients_ready(params)
        elif self._exchange is not None:
            self._exchange.poll()

    # A step

    def step_in_turns(self) -> Generator[Pending, None, None]:
        if self.averages_gradients:
            yield from super().step_in_turns()
            return
        engine = self._engine
        refuse(engine)
        self._look_around()
        if not (engine.known.acquainted or engine.dense):
            yield from Step(engine, engine.comm, engine.steps + 1).verify_peers()
        self._connect()
        if self._anchors is not None:
            self._anchors.note_training()
        norm = yield from self._step_inner()  # line 1
        try:
            is_applied = yield from self._synchronize()
        except CommunicationError as error:
            gradients.drop_scale(engine)
            raise CommunicationError(
                f"step {engine.steps} was taken on rank {engine.comm.rank}, but not the exchange "
                f"that follows it: {error}. It is tried again after the next step."
            ) from error
        finally:
            engine.handed_over = False
        self._report(norm, is_applied)
        if too_many := watch_skips(engine, math.isfinite(norm)):
            raise too_many

    def _look_around(self) -> None:
        """See which ranks and groups there are, and leave the averaged start."""
        self._engine.look_around()
        for group in self.param_groups[len(self._own_groups) :]:
            self.add_param_group(group)  # somebody gave it to the inner optimizer
        self._end_start()

    def _connect(self) -> None:
        """Make anchors, once there are other ranks, and exchange over these ranks."""
        engine, h = self._engine, self._options
        if engine.dense:
            self._cancel_exchange()
            self._anchors, h["begun"] = None, h["step"] + 1  # a round begins after this step
            return
        if self.offload and not engine.comm.carries(HOST):
            raise ValueError(
                "offload='outer' exchanges tensors in host memory, and the process group has no "
                "backend for those: init_process_group('cpu:gloo,cuda:nccl'), or without a "
                "backend, has one."
            )
        if self._anchors is None:
            h["begun"] = max(h["begun"], h["warmup_steps"])
            self._anchors = self._make_anchors(h, *deal(self.param_groups, h["fragments"]))
        outer, comm = self._anchors.outer, self._comm_of_exchanges()
        outer.simulate = self.simulate
        if outer._engine.group is not comm:
            outer._engine.connect_to(comm)

    def _make_anchors(self, h: Group, params: list[Tensor], fragments: list[int]) -> Anchors:
        make_outer = self._make_outer or partial(outer_sgd, h)
        return Anchors(params, fragments, h["fragments"], make_outer, self.offload == "outer")

    def _comm_of_exchanges(self) -> Comm:
        """Exchanges that run beside training have a process group of their own."""
        comm = self._engine.comm
        if not self._options["delay"]:
            return comm
        if self._side is None or self._side[0] is not comm:
            if self._side is not None:
                self._side[1].destroy()
            self._side = comm, comm.apart()
            weakref.finalize(self, self._side[1].destroy).atexit = False
        return self._side[1]

    def _step_inner(self) -> Turns[float]:
        """Step the inner optimizer, unless a gradient of this rank, or of another shard of its
        replica, is not finite; count the step. Signals that come meanwhile are handled after it.

        Returns the norm of the gradients; it is finite where the step was taken.
        """
        engine, inner = self._engine, self.base
        gradients.check(engine)
        scale = gradients.unscale(engine)
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        try:
            norm = yield from self._gradient_norm(params)
        except BaseException:
            if scale is not None:
                gradients.scale_back(engine, scale)
            raise
        is_taken = math.isfinite(norm)
        if is_taken:
            factor = clip_factor(norm, self._options["max_grad_norm"])
            scale_all_([local(p.grad) for p in params], factor)
        with held_back():
            if is_taken:
                inner.step()
            for group in self._own_groups:
                group["step"] += 1
            counts = [
                count
                for bucket in engine.buckets
                for p, count in zip(bucket.params, bucket.state["step"], strict=True)
                if is_taken and p.grad is not None
            ]
            if counts:
                torch._foreach_add_(counts, 1)
        return norm

    def _gradient_norm(self, params: list[Tensor]) -> Turns[float]:
        """The norm over all shards of the replica; NaN where a GradScaler has found an inf."""
        engine = self._engine
        by_copies: dict[int, list[Tensor]] = {}
        for p in params:
            by_copies.setdefault(copies_of(p, engine.shards), []).append(local(p.grad))
        squared = 0.0
        for copies, grads in by_copies.items():
            squared += float(torch.nn.utils.get_total_norm(grads)) ** 2 / copies
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            squared = math.nan
        (total,) = yield from self._sum_over_shards(squared)
        return math.sqrt(total) if total >= 0 else math.nan

    def _sum_over_shards(self, *numbers: float) -> Turns[tuple[float, ...]]:
        """The sums over the ranks that hold the other parts of this replica, if any."""
        engine = self._engine
        if not engine.shards:
            return numbers
        message = torch.tensor(numbers, dtype=torch.float64, device=engine.device)
        for comm in engine.shards:
            message = (yield from ask(comm, AllReduceMean(message))) * comm.size
        return tuple(message.tolist())

    # Exchanges

    def _synchronize(self) -> Turns[bool]:
        """The exchanges of the step that every rank has just taken; whether one was applied."""
        h, anchors, exchange = self._options, self._anchors, self._exchange
        if anchors is None:
            return False
        t = h["step"]
        steps = rounds.round_length(h, h["begun"] - h["warmup_steps"])
        at, delay = t - h["begun"], rounds.delay_within(h, steps)
        self._due |= {n for n in anchors.fragments if rounds.is_due(n, at, steps, h["fragments"])}
        if at >= steps:
            h.update(round=h["round"] + 1, begun=t)
        is_applied = False
        if exchange is not None and (self._due or t >= (exchange.apply_at or 0)):
            is_applied = yield from self.perform_sync()
        if self._due:
            share = rounds.outer_share(h, steps)
            yield from self.prepare_sync(share, t + delay if delay else None, h["mix"])
            if not delay:
                is_applied = yield from self.perform_sync()
        return is_applied

    @torch.no_grad()
    def prepare_sync(self, share: float, apply_at: int | None, mix: float) -> Turns[None]:
        """Begin to exchange the fragments that are due, with the outer optimizer's own rate and
        momentum to this ``share``.
        """
        anchors, fragments = self._anchors, self._due
        assert anchors is not None
        try:
            moved = anchors.set_pseudo_gradients(set(fragments))  # line 2
            norms = [torch.linalg.vector_norm(d, dtype=torch.float64) for d in moved]
            squared = float(torch.stack(norms).square().sum()) if norms else 0.0
            (total,) = yield from self._sum_over_shards(squared)
        except BaseException:
            anchors.cancel()
            raise
        if not math.isfinite(total):
            anchors.clear_gradients()  # the average is that of the others
        anchors.set_outer_share(share)
        self._due = frozenset()
        self._begin_exchange(fragments, apply_at, mix, total)
        if apply_at is not None and self._exchange is not None:
            self._exchange.poll()

    def _begin_exchange(
        self, fragments: frozenset[int], apply_at: int | None, mix: float, squared: float
    ) -> None:
        anchors = self._anchors
        assert anchors is not None
        engine = anchors.outer._engine
        groups = anchors.groups_of(set(fragments))
        step = Step(engine, engine.look_around(), anchors.exchanges + 1, groups)
        turns = communicate(self._engine, anchors, step, squared, apply_at is not None)  # line 3
        self._exchange = Exchange(fragments, apply_at, mix, squared, step, turns)

    @torch.no_grad()
    def perform_sync(self) -> Turns[bool]:
        """Wait for the exchange that is on its way, and apply it. Returns whether it was: not where
        the average is not finite.

        Where it raises, nothing is applied, and the exchange is due again.
        """
        exchange, anchors = self._exchange, self._anchors
        assert exchange is not None and anchors is not None
        try:
            outcome = yield from exchange.arrive()
            numbers = yield from self._sum_over_shards(outcome.squared, outcome.product)
            if outcome.ranks > 1 and numbers[0] > 0:
                self._distances = distances(*numbers, outcome.ranks)
            with held_back():
                is_applied = self._apply(exchange, outcome)
        except BaseException as error:
            exchange.step.undo(error)
            self._cancel_exchange()
            raise
        self._exchange = None
        if exchange.is_lost and is_applied:
            self._begin_moments_anew(exchange)
        return is_applied

    def _apply(self, exchange: Exchange, outcome: Outcome) -> bool:
        """Lines 4 and 5, as a whole."""
        engine, anchors, verdict = self._engine, self._anchors, outcome.verdict
        assert anchors is not None
        if verdict is not None and not verdict.applied:
            exchange.step.commit(verdict)  # counts what is skipped
            anchors.cancel()
            return False
        tensors = anchors.within(set(exchange.fragments))
        sent = [t for t in tensors if t.is_sent or exchange.is_lost]
        is_late = exchange.apply_at is not None and not exchange.is_lost
        since = [t.moved_since() if is_late else None for t in sent]
        engine.half_step = f"the exchange before step {engine.steps + 1} was interrupted"
        if verdict is not None:
            exchange.step.commit(verdict)  # line 4
        for t, moved in zip(sent, since, strict=True):
            t.write_back(moved, 0.0 if exchange.is_lost else exchange.mix)  # line 5
        engine.half_step = ""
        anchors.outer._engine.consolidated = None
        for t in tensors:
            t.has_moved |= t.is_sent and exchange.mix > 0
            t.is_sent = False
        anchors.clear_gradients()
        return True

    def _begin_moments_anew(self, exchange: Exchange) -> None:
        """Zero moments that are not finite, where this rank's parameters were not finite either and
        are the others' now.
        """
        engine, anchors = self._engine, self._anchors
        assert anchors is not None
        for t in anchors.within(set(exchange.fragments)):
            for value in self.base.state.get(t.param, {}).values():
                if isinstance(value, Tensor) and not bool(local(value).isfinite().all()):
                    value.zero_()
        if not self._warned_of_loss:
            self._warned_of_loss = True
            warn(
                f"rank {engine.comm.rank} had parameters that are not finite after step "
                f"{engine.steps}: it took the other ranks' average, and its moments begin anew. "
                "Lower the learning rate, or clip (max_grad_norm=).",
                0,  # on this rank, whichever it is
            )

    def _cancel_exchange(self) -> None:
        """Give up the exchange on its way: it is due again."""
        if self._exchange is not None and self._anchors is not None:
            self._exchange.give_up()
            self._anchors.cancel()
            self._due |= self._exchange.fragments
        self._exchange = None

    @torch.no_grad()
    def end_round(self) -> None:
        """End the running round: exchange what ranks have moved, and apply it.

        Afterwards parameters are equal on all ranks: call it on all of them after the last step,
        before an evaluation, or before the model is saved. Where they are equal already nothing
        changes.

        Raises CommunicationError when the exchange failed; it is tried again after the next step.
        """
        for _ in self.end_round_in_turns():
            pass

    def end_round_in_turns(self) -> Generator[Pending, None, None]:
        h, anchors, last = self._options, self._anchors, self._engine.stats
        if anchors is None:
            return
        is_applied = False
        if self._exchange is not None:
            self._exchange.mix = 0.0
            is_applied = yield from self.perform_sync()
        t, begun = h["step"], h["begun"]
        if t > begun:
            h.update(round=h["round"] + 1, begun=t)
        self._due |= {tensor.fragment for tensor in anchors.tensors if tensor.has_moved}
        if self._due:
            yield from self.prepare_sync(rounds.outer_share(h, max(1, t - begun)), None, 0.0)
            is_applied = yield from self.perform_sync()
        self._report(last.grad_norm, is_applied, last.bytes_sent)

    def _report(self, norm: float, is_applied: bool, bytes_sent: int = 0) -> None:
        """Renew ``stats``, after a step or the end of a round."""
        engine, h = self._engine, self._options
        is_taken = math.isfinite(norm)
        phase = "exchanged" if is_applied else "dense" if engine.dense else "local"
        comms = {engine.comm}
        stats = Stats(
            step=h["step"],
            phase=phase if is_taken else "skipped",
            bytes_sent=bytes_sent + self._count_bytes(),
            bytes_dense=sum(bucket.dense_bytes for bucket in engine.buckets),
            grad_norm=norm,
            buckets=len(engine.buckets),
            skipped=engine.stats.skipped + (not is_taken),
            reason="" if is_taken else "non-finite gradient on this rank",
        )
        if self._anchors is not None:
            stats.residual_norm = weakly(self._anchors.outer._engine.residual_norm)
        engine.stats = add_rounds(stats, h, *self._distances)
        open_rounds.note(id(self), ...)
