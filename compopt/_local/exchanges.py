"""All fragments of a model, and their exchanges: which begins at a step, and which is applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._engine.engine import Engine
from .._engine.turns import Turns
from .._state.devices import HOST
from .._wire.comm import Comm
from . import rounds
from .fragments import Fragment
from .outer import Outer

Group = dict[str, Any]
Said = Callable[[], list[Any]]  # what ranks must have alike when they exchange


class Exchanges:
    """The fragments of one optimizer, in the order in which all ranks exchange them; ``host``: from
    host memory.
    """

    def __init__(self, groups: list[Group], options: Group, outer: Outer, host: bool):
        self._outer, self._host = outer, host
        self._connected: tuple[Comm, Comm] | None = None  # the ranks, and how they are reached
        self._counted = 0
        parts = deal(groups, options["fragments"])
        self.fragments = [Fragment(part, n, outer, host) for n, part in enumerate(parts) if part]

    def add(self, params: list[Tensor]) -> None:
        """Parameters that have come later are a fragment of their own."""
        if params:
            self.fragments.append(Fragment(params, 0, self._outer, self._host))

    @property
    def on_their_way(self) -> list[Fragment]:
        return [fragment for fragment in self.fragments if fragment.on_its_way]

    def bytes_sent(self) -> int:
        """Since it was last asked."""
        if self._connected is None:
            return 0
        before, self._counted = self._counted, self._connected[1].bytes_sent
        return self._counted - before

    def connect(self, comm: Comm, delay: int, inner: Engine) -> None:
        """Exchange over these ranks; what runs beside others has a process group of its own.

        ``inner`` drives the optimizer whose exchanges these are. Raises ValueError where a group
        cannot carry host memory that it would have to.
        """
        if self._host and not comm.carries(HOST):
            raise ValueError(
                "offload='outer' exchanges tensors in host memory, and the process group has no "
                "backend for those: init_process_group('cpu:gloo,cuda:nccl'), or without a "
                "backend, has one."
            )
        if self._connected is None or self._connected[0] is not comm:
            self._connected = comm, comm.apart() if delay else comm
            self._counted = self._connected[1].bytes_sent
        for fragment in self.fragments:
            fragment.connect(self._connected[1], inner)
            fragment.follow()
            fragment.outer.simulate = inner.face.simulate
            fragment.outer._engine.handed_over = inner.handed_over

    def poll(self) -> None:
        """Go on with what is on its way, without waiting."""
        if self._connected is not None:
            for fragment in self.on_their_way:
                fragment.poll()

    def rejoin(self, new: bool) -> Turns[None]:
        """Over other ranks, of which some lack what others have applied, or are ``new``."""
        assert self._connected is not None
        for fragment in self.fragments:
            yield from fragment.rejoin(self._connected[1], new)

    def give_up(self) -> None:
        for fragment in self.on_their_way:
            fragment.give_up()

    def consolidate(self) -> Turns[None]:
        """What is owed becomes its mean over ranks, but where an exchange is on its way."""
        for fragment in self.fragments:
            if not fragment.on_its_way:
                yield from fragment.outer.consolidate_in_turns()

    def residual_norm(self) -> float:
        norms = [fragment.outer._engine.residual_norm() for fragment in self.fragments]
        return float(sum(norm * norm for norm in norms) ** 0.5)

    # Checkpoints

    def saved(self) -> list[dict[str, Any]]:
        return [fragment.saved() for fragment in self.fragments]

    def load(self, saved: list[dict[str, Any]]) -> None:
        """What ``saved`` returned.

        Raises ValueError where it is of other fragments, or damaged.
        """
        try:
            for fragment, theirs in zip(self.fragments, saved, strict=True):
                fragment.load(theirs)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"loaded state dict has an outer optimizer that is damaged: {error!r}."
            ) from error

    def take(self, options: Group, said: Said) -> Turns[list[Fragment]]:
        """The exchanges of the step that every rank has just taken on its own; those that were
        applied.

        ``options`` hold the round, which may end here.
        """
        t: int = options["step"]
        steps = rounds.length(options, options["begun"] - options["warmup_steps"])
        at, late = t - options["begun"], rounds.delay(options, steps)
        for fragment in self.fragments:
            fragment.mix = options["mix"]
            fragment.due |= rounds.is_due(fragment.place, at, steps, options["fragments"])
        if at >= steps:
            options.update(round=options["round"] + 1, begun=t)
        applied: list[Fragment] = []
        for fragment in self.on_their_way:
            if fragment.apply_at is None or fragment.apply_at <= t:
                yield from fragment.finish()
                applied.append(fragment)
        for fragment in self.fragments:
            if not fragment.due or fragment.on_its_way or fragment in applied:
                continue
            for other in self.on_their_way:  # begun late, after a failure
                yield from other.finish()
                applied.append(other)
            share = rounds.grown(options, steps)
            if (yield from self._exchange(fragment, said, share, t + late if late else None)):
                applied.append(fragment)
        return applied

    def end(self, options: Group, said: Said) -> Turns[list[Fragment]]:
        """Exchange and apply everything now, wherever in its round it is; the next round begins."""
        t: int = options["step"]
        share = rounds.grown(options, max(1, t - options["begun"]))
        for fragment in self.on_their_way:
            yield from fragment.finish()
        if t > options["begun"]:
            options.update(round=options["round"] + 1, begun=t)
        for fragment in self.fragments:
            fragment.mix = 0.0
            yield from self._exchange(fragment, said, share, None)
        return self.fragments

    def _exchange(
        self, fragment: Fragment, said: Said, share: float, apply_at: int | None
    ) -> Turns[bool]:
        """Begin an exchange, and end it unless there is a step at which it is applied; whether it
        was.
        """
        fragment.said = said()  # the same until it has been applied
        fragment.grow(share)
        fragment.begin(apply_at)
        if apply_at is not None:
            fragment.poll()
            return False
        yield from fragment.finish()
        return True


def deal(groups: list[dict[str, Any]], fragments: int) -> list[list[Tensor]]:
    """The parameters of every group, in order, in so many parts of about equal bytes.

    Those of all groups at the same place are together: groups mostly divide layers in two.
    """
    dealt: list[list[Tensor]] = [[] for _ in range(fragments)]
    for group in groups:
        sizes = [p.numel() * p.element_size() for p in group["params"]]
        total, before = max(1, sum(sizes)), 0
        for p, size in zip(group["params"], sizes, strict=True):
            dealt[(2 * before + size) * fragments // (2 * total + 1)].append(p)
            before += size
    return dealt
