"""What drives local steps: the rank's own step, the exchanges that follow it, and other ranks.

It stands beside the ``Engine``, which drives the averaged start and knows groups and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._engine import gradients
from .._engine.engine import Engine
from .._engine.peers import gather_rows
from .._engine.recovery import catch_up, tell_what_is_lost
from .._engine.turns import Turns
from .._engine.weakly import weakly
from .._wire.comm import Comm, ProcessGroup
from .._wire.requests import CommunicationError
from . import inner as inner_step
from .exchanges import Exchanges, Group, Said
from .fragments import Fragment
from .outer import Outer
from .stats import report


class LocalEngine:
    """The rounds of one optimizer around ``inner``; ``outer_for`` makes the outer one by its
    options.
    """

    def __init__(
        self,
        engine: Engine,
        inner: torch.optim.Optimizer,
        outer_for: Callable[[Group], Outer],
    ):
        self.engine, self.inner, self._outer_for = engine, inner, outer_for
        # none before the first local step, and on one process
        self.exchanges: Exchanges | None = None
        self._warned = False  # that parameters were not finite

    @property
    def options(self) -> Group:
        return self.engine.option_groups[0]

    def _make(self, options: Group) -> Exchanges:
        host = self.engine.face.offload == "outer"
        return Exchanges(self.inner.param_groups, options, self._outer_for(options), host)

    def connect(self) -> None:
        """Exchange over the ranks there are, if there are others."""
        engine, h = self.engine, self.options
        if engine.dense:
            self.exchanges = None
            h["begun"] = h["step"] + 1  # with other ranks a round begins after this step
            return
        if self.exchanges is None:
            h["begun"] = max(h["begun"], h["warmup_steps"])
            self.exchanges = self._make(h)
        self.exchanges.connect(engine.comm, h["delay"], engine)

    def add(self, params: list[Tensor]) -> None:
        """Parameters that have come later are a fragment of their own."""
        if self.exchanges is not None:
            self.exchanges.add(params)

    # Stepping

    def poll(self) -> None:
        """Go on with what is on its way, without waiting."""
        if self.exchanges is not None:
            self.exchanges.poll()

    def step(self, said: Said, limit: int) -> Turns[None]:
        """The rank's own step, and what is due of a round after it.

        ``said``: what ranks must have alike; ``limit``: of steps skipped in a row.
        """
        engine, h = self.engine, self.options
        norm = inner_step.take(engine, self.inner, h["max_grad_norm"])
        applied: list[Fragment] = []
        try:
            if self.exchanges is not None:
                applied = yield from self.exchanges.take(h, said)
        except CommunicationError as error:
            gradients.drop_scale(engine)
            raise CommunicationError(
                f"step {engine.steps} was taken on rank {engine.comm.rank}, but not the exchange "
                f"that follows it: {error}. It is tried again after the next step."
            ) from error
        finally:
            engine.handed_over = False
        taken = math.isfinite(norm)
        report(engine, h, self.exchanges, norm, applied, taken)
        self._warned = inner_step.mend(self.inner, applied, engine, self._warned)
        inner_step.watch_skips(engine, taken, limit)

    def end_round(self, said: Said) -> Turns[None]:
        """Exchange and apply what ranks have moved, wherever in its round each fragment is."""
        if self.exchanges is None:
            return
        engine, last = self.engine, self.engine.stats
        applied = yield from self.exchanges.end(self.options, said)
        report(engine, self.options, self.exchanges, last.grad_norm, applied)
        engine.stats = replace(engine.stats, bytes_sent=engine.stats.bytes_sent + last.bytes_sent)
        self._warned = inner_step.mend(self.inner, applied, engine, self._warned)

    # Other ranks

    def rebind(
        self, group: ProcessGroup | Comm | None, look_around: Callable[[], None]
    ) -> Turns[None]:
        """Go on over another group. Ranks that lack what others have applied, or are new, take it
        from those.

        ``look_around``: see which ranks there are.
        """
        engine = self.engine
        before = engine.connection.size if engine.connection else 0
        self.give_up()
        engine.runtime.forget()
        engine.connect_to(group)
        comm, new = engine.comm, self.exchanges is None
        if (yield from self._past_start(comm)):
            look_around()
            if self.exchanges is not None:
                yield from self.exchanges.rejoin(new)
        else:
            yield from catch_up(engine, comm)
        owed = self.exchanges.residual_norm if self.exchanges is not None else engine.residual_norm
        engine.stats.residual_norm = weakly(owed)
        tell_what_is_lost(engine, before, comm.size, owed)

    def _past_start(self, comm: Comm) -> Turns[bool]:
        """Whether any rank is past the averaged start; if so, all take over the count of steps and
        rounds of the one that is furthest.
        """
        engine, h = self.engine, self.options
        words = [h["step"], h["round"], h["begun"], self.exchanges is not None]
        message = torch.tensor(words, dtype=torch.int64, device=engine.device)
        rows: list[list[int]] = (yield from gather_rows(message, comm)).tolist()
        counts = [row[:-1] for row in rows if row[-1]]
        if counts:
            step, rounds, begun = max(counts)
            for own in engine.option_groups:
                own.update(step=step, round=rounds, begun=begun)
        return bool(counts)

    def give_up(self) -> None:
        """Nothing that is on its way will come."""
        if self.exchanges is not None:
            self.exchanges.give_up()

    # Checkpoints

    def consolidate(self) -> Turns[None]:
        """What is owed becomes its mean over ranks, but where an exchange is on its way."""
        if self.exchanges is not None:
            yield from self.exchanges.consolidate()

    @property
    def owned(self) -> list[Engine]:
        """Those of the outer optimizers."""
        fragments = self.exchanges.fragments if self.exchanges is not None else []
        return [fragment.outer._engine for fragment in fragments]

    def saved(self) -> list[dict[str, Any]] | None:
        return self.exchanges.saved() if self.exchanges is not None else None

    def loaded(self, options: Group, saved: list[dict[str, Any]]) -> Exchanges:
        """The fragments that ``saved`` returned, over the ranks that there are.

        Raises ValueError where they are of other tensors, or damaged.
        """
        exchanges, comm = self._make(options), self.engine.look_around()
        if not self.engine.dense:
            exchanges.connect(comm, options["delay"], self.engine)
        exchanges.load(saved)
        return exchanges
