"""Local steps: ranks train on their own for a while, and then average what they moved (DiLoCo, and
Streaming DiLoCo where fragments or a delay are asked for).

Rank k, its parameters w_k, in fragments p = 0 to P - 1; anchors a_p are the same on all ranks, and
a round is of H steps::

    1  inner.step()                                     # every step, on the rank's own gradients
    at step p * H // P of a round (0: its last)
    2  d_k <- a_p - w_k
    3  d <- mean over ranks of d_k, as the outer optimizer's class averages gradients
    ``delay`` steps later, on all ranks or on none
    4  a_p <- the outer optimizer steps a_p by d        # v <- mu v + d;  a_p <- a_p - lr (d + mu v)
    5  w_k <- mix (w_k of line 2) + (1 - mix) a_p + what the rank moved since

At first all gradients are averaged for ``warmup_steps``, as ``Average(inner)`` does, and rounds
grow from 1 step to H over ``every_warmup_steps``, mu and lr from 0 and 1 with them. Lines 2 to 5
are ``_local.fragments.Fragment``.

Where we differ: the papers lose what a rank moved while an exchange was on its way, in part (mix =
.5) or whole (0). And d_k is taken from where the rank began: of parameters below float32 that is
a_p as they show it, else rounding would pull anchors to what is shown of them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ._engine.averages import Averages
from ._engine.decision import StepDecision
from ._engine.face import Group
from ._engine.saving import warn_of_what_is_missing
from ._engine.stats import Stats
from ._engine.stepping import refuse
from ._engine.wrapping import Wrapping
from ._local import options
from ._local.engine import LocalEngine
from ._local.open_round import OpenRound
from ._local.outer import Outer
from ._local.stats import LocalStats, begun, with_rounds
from ._state.buckets import Bucket
from ._state.layouts import Dense, Layout, Prefix
from ._wire.comm import Comm, ProcessGroup
from ._wire.dtypes import PayloadDtype
from ._wire.pending import Pending
from ._wire.requests import Asking
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
        outer: makes the optimizer, one of this package, that steps the anchors it is given, on what
            ranks moved away from them. None: ``Average`` around ``torch.optim.SGD`` with Nesterov's
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
    _rounds: LocalEngine
    _open_round: OpenRound | None = None  # before the first local step

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        every: int = 30,
        *,
        outer: Outer | None = None,
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
        self._outer = outer
        super().__init__(inner, options, process_group, simulate)

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.base

    def check_group(self, group: Group) -> None:
        options.check(group, self.offload)

    def before_layout(self) -> None:
        super().before_layout()
        if not self._engine.built:
            outer = self._outer
            self._rounds = LocalEngine(
                self._engine, self.base, lambda h: outer or partial(outer_sgd, h)
            )

    def after_layout(self) -> None:
        super().after_layout()
        self._engine.stats = begun(self._engine.stats, self._own_groups[0])

    # The averaged start

    def algorithm(self, bucket: Bucket) -> Asking[None]:
        return average(bucket, self.ops, self._averages)

    def state_specs(self, dtype: torch.dtype) -> dict[str, Layout]:
        return {"residual": Dense(dtype, optional=True)}

    def _specs(self, bucket: Bucket) -> dict[str, Layout]:
        if self.averages_gradients:
            return super()._specs(bucket)
        return {"residual": Prefix(bucket.wide, lambda p: 0, compressed_only=True, optional=True)}

    def _end_start(self) -> None:
        """Nothing is kept of the averaged start."""
        if any(bucket.flat["residual"].numel() for bucket in self._buckets):
            self._engine.rebuild()
            self._averages = Averages()

    @property
    def averages_gradients(self) -> bool:
        """Whether the step that comes is one of the averaged start."""
        h = self._own_groups[0]
        return bool(h["step"] < h["warmup_steps"])

    def gradients_ready(self, params: Iterable[Tensor]) -> None:
        if self.averages_gradients:
            super().gradients_ready(params)
        else:
            self._rounds.poll()

    # Local steps

    def step_in_turns(self) -> Generator[Pending, None, None]:
        if self.averages_gradients:
            yield from super().step_in_turns()
        else:
            refuse(self._engine)
            self._look_around()
            try:
                yield from self._rounds.step(self._said, self.max_skipped)
            finally:  # the rank's own step stands, whatever became of the exchange
                self._count_local_step()

    def _count_local_step(self) -> None:
        if self._rounds.exchanges is None:
            return
        h = self._own_groups[0]
        self._open_round = self._open_round or OpenRound(self)
        equal_at_end = h["fragments"] == 1 and not h["delay"]
        stats = self.stats
        assert isinstance(stats, LocalStats)
        self._open_round.count_step(stats, self.comm, equal_at_end)

    @property
    def round_is_open(self) -> bool:
        """True if parameters may differ from rank to rank: after a local step, until the round ends
        or ``end_round()`` is called. With ``fragments`` or a ``delay``, until ``end_round()``.
        """
        return self._open_round is not None and self._open_round.steps > 0

    def _look_around(self) -> None:
        """See which ranks and groups there are, and leave the averaged start."""
        self._engine.look_around()
        for group in self.param_groups[len(self._own_groups) :]:
            self.add_param_group(group)  # somebody gave it to the inner optimizer
        self._end_start()
        self._rounds.connect()

    @torch.no_grad()
    def end_round(self) -> None:
        """End the running round: exchange what ranks have moved, and apply it.

        Afterwards parameters are equal on all ranks: call it on all of them after the last step,
        before an evaluation, or before the model is saved.

        Raises CommunicationError when the exchange failed; it is tried again after the next step.
        """
        for _ in self.end_round_in_turns():
            pass

    def end_round_in_turns(self) -> Generator[Pending, None, None]:
        yield from self._rounds.end_round(self._said)
        if self._open_round is not None:
            self._open_round.end()

    def _said(self) -> list[Any]:
        """What ranks must have alike when they exchange."""
        return self._settings()

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the inner optimizer; it is a fragment of its own.

        All ranks must do so at the same step.
        """
        super().add_param_group(param_group)
        if self._engine.built:
            self._rounds.add(self.param_groups[-1]["params"])

    def add_to_stats(self, stats: Stats, decision: StepDecision) -> Stats:
        return with_rounds(stats, self._engine.stats)

    # Other ranks

    @torch.no_grad()
    def rebind_in_turns(
        self, process_group: ProcessGroup | Comm | None = None
    ) -> Generator[Pending, None, None]:
        yield from self._rounds.rebind(process_group, self._look_around)

    def consolidate_in_turns(self) -> Generator[Pending, None, None]:
        yield from super().consolidate_in_turns()
        yield from self._rounds.consolidate()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """As torch's, of our own options, with the inner optimizer's under "base", and for every
        fragment under "outer" its anchors, its outer optimizer's, and what is on its way. No
        communication.
        """
        saved = super().state_dict()
        for entry in saved["state"].values() if not self.averages_gradients else ():
            entry.pop("residual", None)
        if (fragments := self._rounds.saved()) is not None:
            saved["outer"] = fragments
            warn_of_what_is_missing(self._engine, self._rounds.owned)
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load all of it. A checkpoint without "base" is taken for the inner optimizer's own: then
        all begins anew.

        Raises ValueError, with nothing loaded, when it does not fit. All ranks must load.
        """
        saved = state_dict.get("outer") if isinstance(state_dict, dict) else None
        exchanges = None
        if saved is not None:
            group = self._groups_of(state_dict)[0]
            options.check_writer(group, type(self).__name__)
            exchanges = self._rounds.loaded({**self._own_groups[0], **group}, saved)
        super().load_state_dict(state_dict)
        self._rounds.give_up()
        self._rounds.exchanges = exchanges

    def _begin_anew(self) -> None:
        for group in self._own_groups:
            group.update(round=0, begun=0)
        super()._begin_anew()

    def _contents(self) -> dict[str, Any]:
        return {**super()._contents(), "_outer": self._outer, "_fragments": self._rounds.saved()}

    @torch.no_grad()
    def _revive(self, contents: dict[str, Any], group: ProcessGroup | Comm | None) -> None:
        contents = dict(contents)
        saved = contents.pop("_fragments")
        super()._revive(contents, group)
        if saved is not None:
            self._rounds.exchanges = self._rounds.loaded(self._own_groups[0], saved)
