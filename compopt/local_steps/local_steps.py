"""Local steps: ranks train on their own for a while, and then average what they moved (DiLoCo, and
Streaming DiLoCo where fragments or a delay are asked for).

Rank k has parameters w_k, in fragments p = 0 to P - 1; anchors a_p are the same on all ranks, and a
round has H steps::

    1  inner.step()                                     # every step, on the rank's own gradients
    at step p * H // P of a round (p = 0: at its last), prepare_sync
    2  d_k <- a_p - w_k                                 # the pseudo-gradient
    3  d <- mean over ranks of d_k + e_k, rounded;  e_k <- d_k + e_k less what was sent
    ``delay`` steps later, on all ranks or on none, perform_sync
    4  a_p <- the outer optimizer steps a_p by d        # v <- mu v + d;  a_p <- a_p - lr (d + mu v)
    5  w_k <- a_p + what the rank moved since line 2

In the first ``dense_steps`` all gradients are averaged, as ``Average(inner)`` does. Over the next
``growth_steps`` rounds grow from 1 step to H, mu from 0 and lr from 1 to their values. With
``outer_lr="auto"`` each tensor of d is stretched in line 4 to the mean norm of the d_k, and lr is
1 - mu.

Where rounds end by time, or ranks are ``weighted``, line 3 is a mean weighted by the steps or
samples that ranks took in the round.

There is one outer optimizer, of torch; anchors are its parameters, fragments its groups. A
sync has two halves: up to the decision of all ranks, and the commit. ``FragmentSync`` in
``local_steps/fragment_sync.py`` does lines 2 to 5, on tensors that ``AnchorBucket`` in
``local_steps/anchor_bucket.py`` keeps next to each other.

Differences from the papers: Streaming DiLoCo discards a part of what a rank moved during a
sync; here all of it is kept (line 5). And d_k is taken from where the rank began: for bfloat16
parameters that is a_p rounded to bfloat16. Otherwise rounding errors would leak into the anchors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from .._engine import gradients
from .._engine.decision import StepDecision
from .._engine.exchange import sum_over_groups
from .._engine.handshake import gather_json, warn_without_gradients
from .._engine.join import JoinHook, copy_options_from_ranks_with_data
from .._engine.missing_ranks import RankLeft, explain_failed_step, explain_failure
from .._engine.options import (
    ComparedGroups,
    Group,
    ResidualDtype,
    Setting,
    is_number,
    read_int8,
    require,
)
from .._engine.resharding import average_residuals, average_state
from .._engine.settings import check_changed_options
from .._engine.signals import defer_signals
from .._engine.stats import Stats, show_line
from .._engine.step import Step
from .._inside.base_state import average_base, copy_learned_options
from .._inside.bases import (
    OneOrSeveral,
    check_mode,
    combine_optimizers,
    describe_members,
    replace_gradients,
)
from .._ops.norms import clip_factor, scale_all_, sum_squares_of_shards, total_norm
from .._state.bucket import Bucket
from .._state.layouts import Layout, LocalShape, PaddedVector
from .._state.residuals import residual_layout
from .._state.tensors import to_local
from .._wire.collectives import get_replicate_size
from .._wire.groups import ProcessGroup, Ranks, get_rank
from .._wire.payload import PayloadDtype
from .._wire.requests import CallsDiffer, CommunicationError, RequestGenerator
from ..average import average
from .anchor_bucket import write_params
from .anchored import AnchoredWrapper
from .anchors import GROUP, MakeOuter, reset_moments
from .fragment_sync import FragmentSync, RunningSync
from .rounds import LocalStats, RoundCounts, check_options, describe_rounds, find_due, round_length


class LocalSteps(AnchoredWrapper):
    """Any torch optimizer, which every rank steps on its own gradients. At the end of a round ranks
    average what they have moved::

        adamw = torch.optim.AdamW(model.parameters(), lr=3e-4)
        optimizer = compopt.LocalSteps(adamw, every=30)

    ``param_groups`` are the inner optimizer's own, so LR schedulers act on it. Between syncs
    nothing crosses the network and parameters differ from rank to rank. They are equal at the end
    of a round if ``fragments=1`` and ``delay=0``. Moments stay on their rank.

    Args:
        inner: an optimizer over the model's parameters, or a list of several over disjoint ones;
            may be of this package (AdamS), which then averages nothing itself.
        every: H, the steps of a round; 30 by default.
        round_seconds: in place of ``every``: a round ends on a rank at its first step after this
            time. Each rank takes as many steps as it can, and ranks are averaged by their weights.
        weighted: weight ranks by the steps each took since the last average (skipped ones not
            counted), or by the ``samples`` passed to ``step()``. Always on with
            ``round_seconds``. Default: equal weights.
        outer: a function of a list of anchors, which returns a torch optimizer over them; it steps
            them on averaged pseudo-gradients. Further fragments become groups of it. The
            constructor calls it too, on anchors of its own, to see what it returns. None:
            ``torch.optim.SGD`` with Nesterov's momentum, ``outer_lr`` and ``outer_momentum``.
        payload_dtype: dtype on the wire, of pseudo-gradients, and of gradients in the averaged
            start; as in :class:`Average`.
        outer_lr, outer_momentum: the rates of the default ``outer`` after a round of ``every``
            steps. With 1 and 0 ranks average parameters. A momentum of None is 0.9, or 0.6 if the
            inner optimizer contains a Muon. A rate of "auto" keeps the length of a step, from the
            first sync on: what ranks have moved in different directions makes their average
            shorter, and each tensor of it is stretched to the mean length of theirs, by at most the
            square root of the number of ranks.
        average_anchors: keep a mean of the anchors over about the last this share of all steps, as
            0.1, which ``use_anchors(average=True)`` shows. It takes as much memory as an anchor.
        fragments: P, the number of parts of the model, synced at different steps of a round.
        delay: steps from the beginning of a sync to its application; training goes on
            meanwhile. At most every / fragments.
        dense_steps: steps at the start in which gradients are averaged, as by :class:`Average`.
        growth_steps: steps after the start in which rounds grow from 1 step to their length.
            An ``outer`` around SGD, as the default, grows with them, from averaging parameters to
            its own rate and momentum.
        max_grad_norm: clips each rank's own gradient to this L2 norm; in the averaged start the
            average.
        process_group: the ranks to average over. None: the default group, or one process where
            there is none.
        offload: "outer" keeps anchors and outer optimizer in host memory, and exchanges from there:
            the process group must carry host tensors (gloo does).
        residual_dtype: as in :class:`SeparateAdam`.
        simulate: take rounds on a single process too, to see their effect. Otherwise a step without
            other ranks is that of ``inner``.

    State beside the inner optimizer's: the anchors, the outer momentum and the outer ``residual``,
    each as large as the parameters; during the averaged start its ``residual``. During a sync
    the pseudo-gradient takes as much again. In a state dict the entry of a parameter has the inner
    optimizer's state under "base". Under "outer" it has the anchor with its state, and the running
    round.

    Raises:
        TypeError: inner is no optimizer, or one that evaluates the model more than once per step
            (LBFGS).
        ValueError: inner compresses by itself; two of several have the same parameters; an option
            is out of its range.
    """

    rank_local_state = ("residual",)
    _samples: float | None = None  # the samples of the coming step
    _is_synced = False  # the step, or the end of a round, has applied a sync
    _sync_stats: dict[str, Any] = {}  # what ``stats`` report of the last sync

    def __init__(
        self,
        inner: OneOrSeveral,
        every: int | None = None,
        *,
        round_seconds: float | None = None,
        weighted: bool = False,
        outer: MakeOuter | None = None,
        payload_dtype: PayloadDtype = "int4",
        outer_lr: float | Literal["auto"] = 0.7,
        outer_momentum: float | None = None,
        average_anchors: float | None = None,
        fragments: int = 1,
        delay: int = 0,
        dense_steps: int = 0,
        growth_steps: int = 800,
        max_grad_norm: float | None = None,
        process_group: ProcessGroup | Ranks | None = None,
        offload: Literal["outer"] | None = None,
        residual_dtype: ResidualDtype = None,
        simulate: bool = False,
    ):
        inner = combine_optimizers(inner)
        if outer_momentum is None:  # these gave the lowest loss (docs/local_settings.md)
            outer_momentum = 0.6 if "Muon" in describe_members(inner) else 0.9
        is_one = every is None or round_seconds is None
        require(is_one, "every", every, "left out beside round_seconds= (pass one of them)")
        self.residual_dtype = read_int8("residual_dtype", residual_dtype)
        self._make_outer, self.offload, self._counts = outer, offload, RoundCounts()
        every = 30 if every is None else every
        weighted = weighted or round_seconds is not None
        lengths = dict(every=every, round_seconds=round_seconds, growth_steps=growth_steps)
        schedule = dict(dense_steps=dense_steps, fragments=fragments, delay=delay)
        averaging: Group = dict(weighted=weighted, average_anchors=average_anchors)
        averaging |= dict(outer_lr=outer_lr, outer_momentum=outer_momentum)
        sending = dict(payload_dtype=payload_dtype, max_grad_norm=max_grad_norm)
        options = {**lengths, **schedule, **averaging, **sending}
        super().__init__(inner, options, process_group, simulate)
        if outer is not None:  # refuse here what cannot be made, not in the first local step
            self._make_sync(self._options)

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.base

    def check_group(self, group: Group) -> None:
        check_options(group, self.offload)

    @property
    def steps_alike(self) -> bool:  # type: ignore[override]
        return bool(self._options["dense_steps"] > 0)

    @property
    def ranks_step_together(self) -> bool:  # type: ignore[override]
        return self._options["round_seconds"] is None and not self._is_comparing

    @property
    def compared_groups(self) -> list[ComparedGroups]:
        outer = [] if self._anchors is None else [self._anchors.outer]
        of_outer = [(GROUP, one.param_groups, one.defaults) for one in outer]
        return [*super().compared_groups, *of_outer]

    def list_fixed_settings(self) -> list[Setting]:
        settings, anchors = super().list_fixed_settings(), self._anchors
        if anchors is None:
            return settings
        (subject, name), *others = settings
        name = f"{name}, outer optimizer {type(anchors.outer).__name__}"
        return [(subject, name), *others, ("outer optimizer, backend", anchors.ops.name)]

    def list_running_settings(self) -> list[Setting]:
        counts, sync = self._counts, self._sync
        if sync is not None and self._is_comparing:  # with a delay ranks do so at different steps
            return sync.anchors.list_values(self._engine)
        running = {"round": counts.round, "mean_step": counts.mean_step}
        if self.ranks_step_together:
            running["begun"] = counts.begun
        return [("running round", running)]

    @property
    def _is_comparing(self) -> bool:
        return self._sync is not None and self._sync.is_comparing

    # A step

    def step(
        self, closure: Callable[[], Any] | None = None, *, samples: float | None = None
    ) -> Any:
        """Take a step of the inner optimizer, and the sync that is due after it. All ranks must
        call it, with ``round_seconds`` as often as they can.

        ``samples``: in this rank's batch; its weight in the average, if ranks are ``weighted``.
        Pass them in every step on all ranks, or in none.

        Raises CommunicationError if the sync failed; the rank's own step was then taken.
        """
        if samples is not None:
            is_good = is_number(samples) and 0 <= samples < math.inf
            require(is_good, "samples", samples, "a number >= 0")
            is_used = bool(self._options["weighted"])
            require(is_used, "samples", samples, "left out without weighted=True or round_seconds=")
        self._samples = samples
        return super().step(closure)

    def take_step(self) -> None:
        if self.averages_gradients:
            super().take_step()
            return
        engine = self._engine
        try:
            engine.check_can_step()
            if self._has_modes:
                check_mode(self.base)
            self._check_own_params()
            try:
                self._see_ranks_and_groups()
                self.run_handshake()
                self._ensure_anchors()
            except (CommunicationError, RankLeft) as error:
                raise explain_failed_step(engine, engine.steps + 1, error) from error
            options, params = self._options, self._params
            if (sync := self._sync) is not None:
                sync.anchors.note_training(params)
                if options["round_seconds"] is not None:
                    self._counts.read_clock()
            norm = self._step_inner(params, options)  # line 1
            try:
                with self._explain_failed_sync():
                    self._synchronize(options)
            finally:
                engine.ddp_left_gradients = False
                self._note_open_round()
            self._report(norm)
            if engine.consecutive_skips or not math.isfinite(norm):
                engine.count_skips(math.isfinite(norm), self.max_skipped)
        except BaseException:
            gradients.drop_scale(engine)
            raise

    def run_handshake(self) -> None:
        """Compare settings with the other ranks, if they have not been compared since ranks or
        options have changed. All ranks must call it; the next step does.
        """
        engine = self._engine
        check_changed_options(engine)
        if not engine.peers_verified and not engine.sends_nothing:
            copy_options_from_ranks_with_data(engine)
            # over the group of syncs, where it meets those of ranks that begin none
            if self._sync is not None:
                self._sync.decide_running()
            Step(engine, engine.comm.beside, engine.steps + 1).run_handshake()

    @contextmanager
    def _explain_failed_sync(self) -> Iterator[None]:
        """Say in the error of a sync what has become of the step, on which rank, and what to do."""
        engine = self._engine
        try:
            yield
        except (CommunicationError, RankLeft) as error:
            why, advice = "", "Make a new process group on all ranks and call rebind()"
            if not isinstance(error, RankLeft | CallsDiffer):
                why = explain_failure(engine, error)
                advice = "The sync is tried again after the next step, and by end_round()"
            raise CommunicationError(
                f"step {engine.steps} was taken on rank {engine.comm.rank}, but not the sync "
                f"that follows it: {error}{why}. {advice}."
            ) from error

    # Exchanges

    @property
    def exchange_is_due(self) -> bool:
        """True if the coming ``step()`` exchanges something with other ranks. Where rounds end by
        time: if this one's is over already.
        """
        engine, options, counts, sync = self._engine, self._options, self._counts, self._sync
        if self._engine.comm.size > 1 and self.averages_gradients:
            return True
        step = options["step"] + 1
        if sync is None:  # a round begins with the coming step
            is_last = round_length(options, options["step"] - options["dense_steps"]) == 1
            return is_last and not engine.sends_nothing and options["round_seconds"] is None
        if sync.due or (sync.running is not None and step >= sync.running.apply_at):
            return True
        seconds = counts.read_seconds()
        return bool(find_due(sync.anchors.groups, options, counts, step, seconds))

    def _synchronize(self, options: Group) -> None:
        """Apply the sync whose delay has ended, and begin the one that is due after this step."""
        counts, sync, self._is_synced = self._counts, self._sync, False
        if sync is None:
            return
        step, by_time = options["step"], options["round_seconds"] is not None
        in_round = step - counts.begun  # steps of the running round
        length = round_length(options, counts.begun - options["dense_steps"])
        length = in_round if by_time else length
        sync.due |= find_due(sync.anchors.groups, options, counts, step, counts.seconds)
        if in_round >= length and not by_time:
            counts.round, counts.begun = counts.round + 1, step
        if sync.running is not None and (sync.due or step >= sync.running.apply_at):
            self._perform_and_report(sync)
        if sync.due:
            # at most the number of steps between two syncs
            delay = min(int(options["delay"]), length // int(options["fragments"]))
            sync.prepare_sync(counts, length, apply_at=step + delay if delay else 0)
            if not delay:
                self._perform_and_report(sync)

    def _perform_and_report(self, sync: FragmentSync) -> RunningSync:
        """Wait for the sync in flight, apply it, and report it."""
        engine = self._engine
        waited = engine.waits.seconds
        result = sync.perform_sync(self._counts)
        self._sync_stats = {
            **self._sync_stats,
            **({} if result.step_length is None else {"step_length": result.step_length}),
            "weight": result.scale / engine.comm.size,
            "round_steps": int(result.contribution.steps),
            "round_wait_seconds": engine.waits.seconds - waited,
        }
        self._is_synced |= result.received is not None
        if result.received is not None and result.is_lost:
            reset_moments(self.base, result.received)
            engine.warn_once(
                "lost",
                f"rank {engine.comm.rank} had parameters that are not finite after step "
                f"{engine.steps}: it took the average, in which what it moved counts as zero, and "
                "zeroed its moments that are not finite. Lower the learning rate, or clip "
                "(max_grad_norm=).",
            )
        return result

    # Line 1: a rank's own step

    def _step_inner(self, params: list[Tensor], options: Group) -> float:
        """Step the inner optimizer, unless a gradient of this rank, or of another shard of its
        replica, is not finite, and count the step. Signals are handled afterwards.

        Returns the norm of the gradients; it is finite where the step was taken.
        """
        engine = self._engine
        gradients.check_gradients(engine)
        scale = gradients.unscale_gradients(engine)
        stepped = [p for p in params if p.requires_grad and p.grad is not None]
        grads: list[Tensor] = [*map(gradients.GRAD, stepped)]
        shards = engine.shard_communicators
        copies = [get_replicate_size(p, shards) for p in stepped] if shards else []
        if any(bucket.is_dtensor for bucket in engine.buckets):
            grads = [*map(to_local, grads)]
        if not grads and engine.comm.size > 1 and engine.trainable and engine.has_data:
            step = options["step"] + 1
            warn_without_gradients(engine, step, "adds nothing to the average of its round")
        try:
            norm = self._gradient_norm(grads, copies)
        except BaseException:
            if scale is not None:
                gradients.scale_gradients(engine, scale)
            raise
        with defer_signals():
            if math.isfinite(norm):
                scale_all_(grads, clip_factor(norm, options["max_grad_norm"]))
                # a frozen parameter may have a gradient left
                others = {*params}.difference(stepped) if len(stepped) < len(params) else {}
                frozen = dict.fromkeys(p for p in others if not p.requires_grad)
                with replace_gradients(frozen) if frozen else nullcontext(), self._watch_base():
                    self.base.step()
                for bucket in engine.buckets:
                    bucket.count_steps([p not in others for p in bucket.params])
                self._show_base_in_state()
                if grads and self._sync is not None:
                    self._counts.weight += 1 if self._samples is None else self._samples
            for group in self._wrapper_groups:
                group["step"] += 1
            self._samples = None
        return norm

    def _gradient_norm(self, grads: list[Tensor], copies: list[int]) -> float:
        """Return the norm over all shards of the replica, NaN if a GradScaler has found an inf.

        In the same message shards agree on the time of the round. ``copies``: see
        ``sum_squares_of_shards``.
        """
        shards = self._engine.shard_communicators
        squared = 0.0
        if getattr(self, "found_inf", None):
            squared = math.nan
        elif not shards:
            return float(total_norm(grads)) if grads else 0.0
        elif grads:
            squared = float(sum_squares_of_shards([total_norm([g]) for g in grads], copies))
        numbers = [squared, self._counts.seconds]
        total, seconds = sum_over_groups(shards, numbers, self._engine.device)
        self._counts.seconds = seconds / math.prod(comm.size for comm in shards)
        return math.sqrt(total)

    # Rounds

    @torch.inference_mode(False)  # its memory is used in later steps
    @torch.no_grad()
    def end_round(self) -> None:
        """End the running round: exchange what ranks have moved, and apply it.

        Afterwards parameters are equal on all ranks. Call it on all ranks after the last step,
        before an evaluation, and before the model is saved. It changes nothing if parameters are
        equal already.

        Raises CommunicationError if the sync failed, also because another rank is in
        ``consolidate_state()`` or saves; it is tried again after the next step.
        """
        if (sync := self._sync) is None:
            return
        self._check_own_params()
        with self._explain_failed_sync(), self._show_end_of_round(sync), self._in_train_mode():
            self._sync_the_rest(sync)
            if self._has_modes:  # eval() sets parameters by the base's state
                self._average_base()

    def _sync_the_rest(self, sync: FragmentSync) -> None:
        """Exchange what has moved since the last sync of its fragment."""
        counts, last, self._is_synced = self._counts, self._engine.stats, False
        self._engine.refresh_ranks()
        sync.connect()
        step = self._options["step"]
        in_round = step - counts.begun
        if sync.running is not None:
            self._perform_and_report(sync)
        if self._options["round_seconds"] is not None:
            # take part in the rounds of ranks that still train, until all have called this
            is_last = False
            while not is_last:
                counts.read_clock()
                sync.anchors.note_training(self._params)
                sync.due = frozenset(sync.anchors.groups)
                sync.prepare_sync(counts, step - counts.begun, is_last=True)
                is_last = self._perform_and_report(sync).mean.is_last == 1
        elif in_round > 0:
            counts.round, counts.begun = counts.round + 1, step
        sync.due |= {t.fragment for t in sync.anchors.tensors if t.has_moved}
        if sync.due:
            sync.prepare_sync(counts, int(max(1, in_round, sync.steps_given_up)))
            self._perform_and_report(sync)
        self._note_open_round()
        if self._is_synced or in_round > 0:
            self._report(last.grad_norm, is_step=False)
            self._engine.stats.bytes_sent += last.bytes_sent

    # Join: ranks that run out of data

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if self._options["round_seconds"] is not None:
            raise ValueError(
                "Join has ranks meet in every step, and LocalSteps(round_seconds=) does not: leave "
                "Join out, and call end_round() after the loop, which waits for other ranks."
            )
        divides = kwargs.get("divide_by_initial_world_size", True)
        require(divides, "divide_by_initial_world_size", divides, "True with LocalSteps")
        return super().join_hook(**kwargs)

    def end_join(self) -> None:
        """End the running round: what all ranks have moved is averaged."""
        if self.is_joining:
            self.end_round()
        super().end_join()

    # The averaged start

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        return average(bucket, self.ops, self._update)

    def state_layouts(self, dtype: torch.dtype) -> dict[str, Layout]:
        return {"residual": residual_layout(LocalShape(dtype, optional=True), self.residual_dtype)}

    def bucket_layouts(self, bucket: Bucket) -> dict[str, Layout]:
        if self.averages_gradients:
            return super().bucket_layouts(bucket)
        # the averaged start has ended, so its residual is empty
        return {"residual": PaddedVector(bucket.compute_dtype, lambda p: 0, optional=True)}

    @property
    def averages_gradients(self) -> bool:  # type: ignore[override]
        """True if the coming step belongs to ``dense_steps``, where gradients are averaged."""
        return bool(self._options["step"] < self._options["dense_steps"])

    @torch.no_grad()
    def gradients_ready(self, params: Iterable[Tensor]) -> None:
        if self.averages_gradients:
            super().gradients_ready(params)
        elif self._sync is not None and self._sync.running is not None:
            self._sync.running.poll()

    # Anchors

    @contextmanager
    def use_anchors(self, average: bool = False) -> Iterator[None]:
        """Put the anchors into the model within the block, then restore this rank's parameters::

            with optimizer.use_anchors():
                evaluate(model)

        Anchors are the parameters as of the last sync, which are equal on all ranks;
        ``average``: the mean of the last ones, if ``average_anchors`` keeps it. Nothing is
        communicated, and training is not affected. Any rank may do so alone, at any time. Within
        the block a step, the end of a round, and saving or loading this optimizer raise
        RuntimeError.
        """
        sync, is_kept = self._sync, self._options["average_anchors"] is not None
        require(not average or is_kept, "average", average, "False without average_anchors=")
        underway = sync.running.fragments if sync and sync.running else ()
        with sync.anchors.put_into_params(underway, average) if sync else nullcontext():
            yield

    # Reports

    def after_layout(self) -> None:
        super().after_layout()
        self._engine.stats = self.add_to_stats(self._engine.stats, StepDecision())

    def add_to_stats(self, stats: Stats, decision: StepDecision) -> Stats:
        options, counts = self._options, self._counts
        in_round = max(0, options["step"] - max(counts.begun, options["dense_steps"]))
        added = {"round": counts.round, "steps_into_round": in_round, **self._sync_stats}
        return LocalStats(**{**vars(stats), **added})

    def _report(self, norm: float, is_step: bool = True) -> None:
        """Update ``stats`` after a step or the end of a round."""
        engine, is_applied = self._engine, self._is_synced
        phase = "exchanged" if is_applied else "dense" if engine.sends_nothing else "local"
        non_finite = [] if math.isfinite(norm) else ["of this rank"]
        decision = StepDecision(norm=norm, phase_of={0: phase}, non_finite=non_finite)
        engine.update_stats(decision, is_step)
        is_shown = is_applied and engine.comm.rank == 0 == get_rank() and engine.comm.size > 1
        stats = engine.stats
        if is_shown and stats.bytes_dense and engine.claim_first("compression"):
            text = describe_rounds(self._options, stats.bytes_sent, stats.bytes_dense)
            show_line(f"{engine.name}: {text}")

    # Checkpoints

    def _consolidate(self, are_shares: bool = False) -> None:
        """Replace residuals and the state of the inner optimizer by their means over ranks; within
        a round parameters too, so that all ranks have moved the same.

        ``are_shares``: ranks have loaded shares of another number of ranks' state. Only the mean of
        them counts, of frozen parameters too.
        """
        engine, sync = self._engine, self._sync
        self._check_own_params()
        if sync is not None and sync.running is not None:
            self._perform_and_report(sync)
        if sync is not None:
            # where rounds end by time, a round may be open on some ranks only
            row = [self.round_is_open, self._counts.weight]
            rows = gather_json(row, engine.device, engine.comm)
            if any(is_open for is_open, _ in rows):
                self._average_params(sync, [weight for _, weight in rows], are_shares)
            for bucket in sync.anchors.buckets:
                average_residuals(bucket, "residual", engine.device, engine.comm)
            self._average_base()
        super()._consolidate()

    def _average_params(self, sync: FragmentSync, weights: list[float], are_shares: bool) -> None:
        """Replace parameters within a round by their mean over ranks of these ``weights``. Frozen
        ones that have not moved stay, unless they ``are_shares``: a mean of equal values is
        rounded.
        """
        engine, weight = self._engine, 1.0
        if self._options["weighted"] and any(weights):  # over the mean of all weights
            weight = self._counts.weight / (sum(weights) / len(weights))
        self._agree_on_moved(sync.anchors)
        for t in (t for t in sync.anchors.tensors if t.has_moved or are_shares):
            if not bool(to_local(t.param.detach()).isfinite().all()):
                write_params([t])
                reset_moments(self.base, [t])
            average_state(t.param.detach(), engine.device, engine.comm, weight)

    def average_shares(self) -> None:
        """As for every class, and also in the averaged start, where moments are equal otherwise,
        and not sent in a save.
        """
        self._consolidate(are_shares=True)
        if self._sync is None:
            self._average_base()

    def _average_base(self) -> None:
        """Replace the state of the inner optimizer by its mean over ranks, and the numbers that it
        keeps in its groups by rank 0's.
        """
        engine = self._engine
        # a layer that is unfrozen between local steps has an anchor, and stays in no bucket
        trained = {t.param for t in self._anchors.tensors} if self._anchors else set()
        unfrozen = [b for b in engine.frozen_buckets if not trained.isdisjoint(b.params)]
        buckets = [*engine.buckets, *unfrozen]
        average_base(self.base, buckets, engine)
        copy_learned_options(self.param_groups, self.given_options, engine)
