"""A fragment: the tensors of a model that are exchanged together, and their anchors.

An anchor is what a tensor was when ranks were last equal, in float32 where the tensor is below. The
outer optimizer, one of ours, has the anchors for its parameters, and what a rank moved away from
them for its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from .._engine.decision import StepDecision
from .._engine.engine import Engine
from .._engine.owner import making_own
from .._engine.peers import gather_rows
from .._engine.recovery import catch_up
from .._engine.turns import Turns
from .._state.tensors import laid_out_as
from .._wire.comm import Comm
from .._wire.control import Words
from .._wire.pending import Pending
from .anchors import anchor_of, bring_, differences, moved_since, wide_copy
from .outer import Outer, begin_momentum, check_outer

# what an exchange waits for when it could be applied, and is not yet to be
HELD = Pending("an exchange whose time has not come", None, lambda: None)


class Fragment:
    """One fragment, and its exchange while that is on its way.

    ``place``: which of a round's exchanges it takes part in. ``settings``: what else ranks must
    have alike when they exchange it. ``host``: anchors, and so all that the outer optimizer keeps,
    are in host memory, and are exchanged from there.
    """

    def __init__(self, params: list[Tensor], place: int, outer: Outer, host: bool):
        self.params, self.place, self._host = params, place, host
        self.anchors = [anchor_of(p, host) for p in params]
        # of which the anchor is not its own yet
        self._frozen = {i for i, p in enumerate(params) if not p.requires_grad}
        with making_own():
            self.outer = outer(list(self.anchors))
        check_outer(self.outer, self.anchors)
        self._own = begin_momentum(self.outer)
        self._grown = 1.0
        self.outer._engine.owner = self
        self.said: list[Any] = []
        self.mix = 0.0
        self.applied = 0  # exchanges that this rank's parameters have in them
        self.due = False  # to be exchanged at the next step
        # the step at which what is on its way is applied
        self.apply_at: int | None = None
        self.lost = False  # this rank's parameters are not finite, and it takes the others'
        self.norms = (0.0, 0.0)  # squared: the mean of the ranks' own, and that of their mean
        self._turns: Generator[Pending, None, None] | None = None
        self._waiting: Pending | None = None
        self._error: Exception | None = None
        self._open = True
        self._squared = 0.0
        self._moved: list[Tensor] = []
        # which tensors may differ from their anchors, and those of an exchange that is not applied
        # yet; some of them may be frozen by now
        self._trained: set[int] = set()
        self._sent: set[int] = set()

    def connect(self, comm: Comm, source: Engine) -> None:
        """Exchange over these ranks from now on. ``source`` drives the optimizer that moves the
        parameters.
        """
        self.source = source
        if self.outer._engine.group is not comm:
            self.outer._engine.connect_to(comm)

    def grow(self, share: float) -> None:
        """The outer optimizer, where it is around SGD, on its way from averaging parameters (0) to
        its own rate and momentum (1).
        """
        if share == self._grown:
            return
        self._grown = share
        for group, (lr, momentum) in zip(self.outer.param_groups, self._own, strict=False):
            group.update(lr=1 + (lr - 1) * share, momentum=momentum * share)

    # An exchange

    @property
    def on_its_way(self) -> bool:
        return self._turns is not None

    @torch.no_grad()
    def begin(self, apply_at: int | None) -> None:
        """Take what this rank moved, and begin to exchange it. None: it is applied at once."""
        self.apply_at, self._open, self.due = apply_at, apply_at is None, True
        self._sent |= self._trained | self._requiring()
        self._trained = set()
        self._differ()
        self._turns = self.outer.step_in_turns()

    def poll(self) -> None:
        """Go on with what is on its way, as far as nobody has to wait; what goes wrong is told by
        ``finish``.
        """
        while self._turns is not None and self._error is None and self._waiting is not HELD:
            if self._waiting is not None and not self._waiting.ready:
                return
            try:
                self._waiting = next(self._turns, HELD)
            except Exception as error:
                self._error = error

    @torch.no_grad()
    def finish(self) -> Turns[None]:
        """Wait for what is on its way, and apply it.

        Raises what became of it, with nothing applied; it is then begun anew at the next step.
        """
        assert self._turns is not None
        self._open = True
        try:
            if self._error is not None:
                raise self._error
            if self._waiting is not None and self._waiting is not HELD:
                yield self._waiting
            yield from self._turns
            self.due = False
            if self.mix:  # parameters still differ
                self._trained |= self._sent
            self._sent = set()
        finally:
            self._let_go()

    def give_up(self) -> None:
        """Nothing that is on its way will come."""
        if self._turns is not None:
            self._turns.close()
            self.outer._engine.runtime.forget()
            self._let_go()

    def _let_go(self) -> None:
        self._turns = self._waiting = self._error = None
        self._moved = []
        for anchor in self.anchors:
            anchor.grad = None

    def _differ(self) -> None:
        """The anchors' gradients: anchor - w. A tensor that cannot have moved has none."""
        moved = differences(self.params, self.anchors, sorted(self._sent))
        for i, anchor in enumerate(self.anchors):
            anchor.requires_grad_(i in self._sent)
            anchor.grad = laid_out_as(anchor.detach(), moved[i]) if i in moved else None
        norm = float(torch.nn.utils.get_total_norm([*moved.values()])) if moved else 0.0
        self.lost = not math.isfinite(norm)  # the rank then sends nothing
        self._squared = 0.0 if self.lost else norm * norm
        for anchor in self.anchors if self.lost else ():
            anchor.grad = None

    # Checkpoints

    def saved(self) -> dict[str, Any]:
        """What is needed to go on; what is on its way begins anew, with the same differences."""
        grads = [anchor.grad for anchor in self.anchors] if self.on_its_way else None
        return {
            "trained": sorted(self._trained | self._sent),
            "anchors": [anchor.detach() for anchor in self.anchors],
            "outer": self.outer._saved(),
            "applied": self.applied,
            "grown": self._grown,
            "due": self.due,
            "differences": grads,
            "apply_at": self.apply_at,
            "squared": self._squared,
            "lost": self.lost,
        }

    @torch.no_grad()
    def load(self, saved: dict[str, Any]) -> None:
        """What ``saved`` returned.

        Raises ValueError where it is of other tensors.
        """
        theirs, ours = ([tuple(x.shape) for x in xs] for xs in (saved["anchors"], self.anchors))
        if theirs != ours:
            raise ValueError(
                f"loaded state dict has anchors of shapes {theirs}, the optimizer's parameters "
                f"are of {ours}."
            )
        self._trained, self._sent = set(saved["trained"]), set()
        self.follow()
        for i, value in enumerate(saved["anchors"]):
            if i in self._trained:
                self.anchors[i].requires_grad_()
                self.anchors[i].copy_(value)
        self.outer.load_state_dict(saved["outer"])
        self.applied, self.due = saved["applied"], saved["due"]
        self._grown = saved["grown"]
        if saved["differences"] is None:
            return
        self._sent = set(self._trained)
        self.apply_at, self._open = saved["apply_at"], saved["apply_at"] is None
        self._squared, self.lost = saved["squared"], saved["lost"]
        for anchor, grad in zip(self.anchors, saved["differences"], strict=True):
            anchor.grad = None if grad is None else grad.clone()
        self._turns = self.outer.step_in_turns()

    @torch.no_grad()
    def rejoin(self, comm: Comm, new: bool) -> Turns[None]:
        """Over other ranks: who is ``new``, or lacks an exchange, takes the anchors."""
        self.give_up()
        engine = self.outer._engine
        engine.runtime.forget()
        engine.forget_chosen()
        engine.connect_to(comm)
        yield from catch_up(engine, comm, new)
        behind = new or engine.steps != self.applied
        if behind:
            self.take_anchors()
            self.applied = engine.steps
        # what was given up begins anew in the next step, on all ranks
        due = [int(self.due and not behind)]
        flag = torch.tensor(due, dtype=torch.int64, device=engine.device)
        self.due = bool((yield from gather_rows(flag, comm)).any())

    # What the outer optimizer asks of its owner

    def compared(self) -> Engine:
        return self.source

    def settings(self) -> list[Any]:
        return self.said

    def words(self) -> dict[str, Words]:
        return {"moved": [self._squared]}

    def before_commit(self) -> Turns[None]:
        while not self._open:
            yield HELD
        if self.apply_at is not None:
            self._moved = [
                moved_since(p, a) for p, a in zip(self.params, self.anchors, strict=True)
            ]

    def committed(self, decision: StepDecision) -> None:
        """The anchors are the new ones: bring them to the parameters."""
        self.norms = decision.agreed["moved"][0], decision.norm**2
        self.take_anchors(self._moved)

    def take_anchors(self, moved: list[Tensor] | None = None) -> None:
        """w <- mix * w + (1 - mix) * anchor, of w when the exchange began; then what the rank moved
        since.
        """
        for i, (p, anchor) in enumerate(zip(self.params, self.anchors, strict=True)):
            if not (moved is None or self.lost or i in self._sent):
                continue  # frozen: whatever has changed it is not ours to undo
            since = moved[i] if moved and not self.lost else None
            bring_(p, anchor, since, 0.0 if self.lost or moved is None else self.mix)
        self.applied += 1

    # Tensors that are frozen or not

    def _requiring(self) -> set[int]:
        return {i for i, p in enumerate(self.params) if p.requires_grad}

    @torch.no_grad()
    def follow(self) -> None:
        """Take note of what is trained, and give it an anchor of its own: that of a frozen
        parameter is the parameter itself.
        """
        self._trained |= self._requiring()
        for i in self._trained & self._frozen:
            self.anchors[i].data = wide_copy(self.params[i], self._host)
        self._frozen -= self._trained
