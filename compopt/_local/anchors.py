"""Anchors: parameters as of the last exchange, the same on all ranks, and the outer optimizer that
steps them.

An anchor has its parameter's shape, in float32 where the parameter is of lower precision, on its
device or in host memory. A parameter has one from its first local step on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._engine.collective_generators import CollectiveGenerator
from .._engine.optimizer import CompressedOptimizer, without_integrations
from .._engine.optimizer_base import OptimizerBase
from .._engine.options import Group
from .._engine.resharding import catch_up
from .._ops.norms import total_norm
from .._state.tensors import HOST, distribute_like, pin, to_local
from .._wire.collectives import Communicator, get_replicate_size

MakeOuter = Callable[[list[Tensor]], CompressedOptimizer]


@dataclass(eq=False, slots=True)
class Anchored:
    """A parameter, its anchor, and the fragment in which they are exchanged."""

    param: Tensor
    fragment: int
    anchor: nn.Parameter
    has_moved: bool = False  # or may have, since its last exchange

    def pseudo_gradient(self) -> Tensor:
        """Return line 2 of the module ``local_steps``, on the anchor's device. The rank began at
        the anchor in the parameter's dtype.
        """
        anchor = to_local(self.anchor.detach())
        start = anchor.to(self.param.dtype).to(anchor.dtype)
        return start - to_local(self.param.detach()).to(anchor.device)

    def moved_since(self) -> Tensor:
        """Return what the rank moved since its exchange began: the pseudo-gradient of then, less
        the present one.
        """
        assert self.anchor.grad is not None
        return to_local(self.anchor.grad) - self.pseudo_gradient()

    def write_param(self, since: Tensor | None = None) -> None:
        """Write line 5 to the parameter; ``since``: what the rank moved since line 2."""
        new = to_local(self.anchor.detach())
        to_local(self.param.detach()).copy_(new if since is None else new + since)


class Anchors:
    """The anchors of parameters, and the outer optimizer that has them for its parameters.

    ``fragments[i]`` is the fragment of parameter i, -1 if it has no anchor yet. Each fragment is a
    group of the outer optimizer, which can step it alone. Parameters that are added or trained
    later are in fragments from number ``count`` on.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        fragments: Sequence[int],
        count: int,
        make_outer: MakeOuter,
        on_host: bool,
    ):
        self.count, self._on_host = count, on_host
        self.outer: CompressedOptimizer
        self.tensors: list[Anchored] = []  # in the order of the outer optimizer's parameters
        # learning rate and momentum of an outer SGD's groups: its own, and as set last
        self._own_rates: list[dict[str, float]] = []
        self._last_rates: list[dict[str, float]] = []
        self.are_in_params = False
        for number in sorted(set(fragments) - {-1}):
            members = [p for p, n in zip(params, fragments, strict=True) if n == number]
            self._add_fragment(number, members, None if self.tensors else make_outer)
        self.outer._session.has_pseudo_gradients = True

    def _add_fragment(
        self, number: int, params: Iterable[Tensor], make_outer: MakeOuter | None = None
    ) -> None:
        """Make anchors of these parameters, and add them to the outer optimizer as a group.

        SGD's momentum buffers are created now, not in its first step, so that a rank that joins
        later has as many tensors as the others.
        """
        added = [Anchored(p, number, nn.Parameter(copy_wide(p, self._on_host))) for p in params]
        self.tensors += added
        anchors: list[Tensor] = [t.anchor for t in added]
        if make_outer is None:
            self.outer.add_param_group({"params": anchors})
        else:
            self.outer = _call_make_outer(make_outer, anchors)
            check_outer(self.outer, anchors)
        base = getattr(self.outer, "base", None)
        if not isinstance(base, torch.optim.SGD):
            return
        for group in base.param_groups[len(self._own_rates) :]:
            rates = {name: group[name] for name in ("lr", "momentum")}
            self._own_rates.append(rates)
            self._last_rates.append(dict(rates))
        if base.defaults["momentum"] and not base.defaults["dampening"]:
            for anchor in anchors:
                base.state[anchor]["momentum_buffer"] = torch.zeros_like(anchor.detach())

    def set_outer_share(self, share: float) -> None:
        """Set learning rate and momentum of an outer SGD, from plain averaging of parameters
        (``share`` 0: rate 1, momentum 0) to the optimizer's own values (1). What a scheduler has
        set in its groups since the last call is its own from now on.
        """
        rates = zip(self.outer.param_groups, self._own_rates, self._last_rates, strict=False)
        for group, own, last in rates:
            own.update({name: group[name] for name in own if group[name] != last[name]})
            # SGD updates its momentum buffer only if momentum is not zero
            least = torch.finfo(torch.float64).tiny if own["momentum"] else 0.0
            last["lr"] = 1 + (own["lr"] - 1) * share
            last["momentum"] = max(own["momentum"] * share, least)
            group.update(last)

    @torch.no_grad()
    def note_training(self, params: Sequence[Tensor]) -> None:
        """Note that the trainable ones of all ``params`` may move. Those without an anchor become a
        new fragment.
        """
        if new := self.list_new(params):
            self._add_fragment(max(self.count, 1 + max(self.fragments)), new)
        for t in self.tensors:
            t.has_moved |= t.param.requires_grad

    def list_new(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return those of ``params`` that are trainable and have no anchor yet."""
        known = {t.param for t in self.tensors}
        return [p for p in params if p.requires_grad and p not in known]

    # The other ranks

    def connect_outer(self, optimizer: OptimizerBase, is_delayed: bool) -> None:
        """Exchange anchors over the ranks of ``optimizer``, that of the inner steps. Delayed
        exchanges run beside training, so they get process groups of their own.
        """
        session, outer = optimizer._session, self.outer._session
        self.outer.simulate, comm = optimizer.simulate, session.comm
        if is_delayed:
            comm = comm.with_own_group()
            outer.given_shard_communicators = [
                shards.with_own_group() for shards in session.shard_communicators
            ]
        if outer.group is not comm and not session.is_single_process:
            outer.waits = session.waits
            outer.connect_to(self.outer, comm)

    def catch_up(self, is_new: bool) -> CollectiveGenerator[bool]:
        """Copy anchors from a rank that is ahead. On a rank that is new or lacks an exchange, the
        parameters of the exchanged fragments become their anchors; others keep what they moved.

        Returns whether any became its anchor.
        """
        outer, before = self.outer._session, self.count_exchanges()
        outer.forget_in_flight()
        outer.forget_masks(self.outer.mask_state)
        late: set[int] = set()
        try:
            yield from catch_up(self.outer, outer.comm, is_new)
        finally:  # also if a signal arrived while anchors were written
            applied = self.count_exchanges()
            late.update(n for n in self.fragments if is_new or applied[n] > before[n])
            for t in self.list_members(late):
                t.write_param()
                t.has_moved = False
        return bool(late)

    # In the model

    @contextmanager
    def put_into_params(self, underway: Collection[int]) -> Iterator[None]:
        """Write anchors to the parameters that may have moved; restore these after the block.

        Within another such block nothing is done. ``underway``: fragments with an exchange in
        flight.
        """
        if self.are_in_params:
            yield
            return
        sent = {*self.list_sent(underway)}
        moved = [t for t in self.tensors if t.has_moved or t in sent]
        with torch.no_grad():
            values = [(p, p.clone()) for p in (to_local(t.param.detach()) for t in moved)]
            for t in moved:
                t.write_param()
        self.are_in_params = True
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in values:
                    p.copy_(value)
            self.are_in_params = False

    # Fragments

    @property
    def fragments(self) -> set[int]:
        return {t.fragment for t in self.tensors}

    def list_members(self, fragments: Collection[int]) -> list[Anchored]:
        """Return the parameters of these fragments."""
        return [t for t in self.tensors if t.fragment in fragments]

    def groups_of(self, fragments: Collection[int]) -> list[Group]:
        """Return the groups of the outer optimizer that hold these fragments."""
        anchors = {t.anchor for t in self.list_members(fragments)}
        return [g for g in self.outer._option_groups if not anchors.isdisjoint(g["params"])]

    def count_exchanges(self) -> dict[int, int]:
        """Return the number of exchanges that were applied to each fragment."""
        return {n: sum(group["step"] for group in self.groups_of({n})) for n in self.fragments}

    @property
    def applied_exchanges(self) -> int:
        """The number of exchanges that were applied to anchors, counted by group."""
        return sum(group["step"] for group in self.outer._option_groups)

    # An exchange

    def set_pseudo_gradients(self, fragments: Collection[int]) -> dict[Tensor, Tensor]:
        """Set the anchors' ``grad`` to d, line 2, and return it by parameter. An anchor whose
        parameter cannot have moved has no ``grad``, and requires none.
        """
        moved = {}
        for t in self.list_members(fragments):
            t.anchor.requires_grad_(t.has_moved)
            if t.has_moved:
                moved[t.param] = d = t.pseudo_gradient()
                t.anchor.grad, t.has_moved = distribute_like(t.anchor.detach(), d), False
        return moved

    def list_sent(self, fragments: Collection[int]) -> list[Anchored]:
        """Return the parameters of these fragments that are part of their last exchange."""
        return [t for t in self.list_members(fragments) if t.anchor.requires_grad]

    def clear_gradients(self) -> None:
        for t in self.tensors:
            t.anchor.grad = None

    def restore_moved(self, fragments: Collection[int]) -> None:
        """Undo ``set_pseudo_gradients``, of an exchange that is not applied."""
        for t in self.list_sent(fragments):
            t.has_moved = True
        self.clear_gradients()


def copy_wide(p: Tensor, on_host: bool) -> Tensor:
    """Return a copy in at least float32."""
    wide = torch.promote_types(p.dtype, torch.float32)
    if on_host:
        return pin(p.detach().to(HOST, copy=True).to(wide), p.device)
    return p.detach().to(wide, copy=True)


def assign_to_fragments(groups: list[Group], fragments: int) -> list[int]:
    """Return the fragment of every parameter, -1 if it is frozen.

    Each group is cut, in order, into ``fragments`` parts of about equal bytes. Fragment i has part
    i of every group, so the parameters of one layer mostly stay together.
    """
    assigned: list[int] = []
    for group in groups:
        sizes = [p.numel() * p.element_size() * p.requires_grad for p in group["params"]]
        total, before = max(1, sum(sizes)), 0
        for p, size in zip(group["params"], sizes, strict=True):
            place = (2 * before + size) * fragments // (2 * total + 1)
            assigned.append(place if p.requires_grad else -1)
            before += size
    return assigned


def _call_make_outer(make_outer: MakeOuter, anchors: list[Tensor]) -> CompressedOptimizer:
    """Return the outer optimizer over these anchors.

    Raises TypeError or ValueError, which names ``outer``, where that is no function of a list of
    anchors, or raises one.
    """
    try:
        with without_integrations():
            return make_outer(anchors)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"outer must make an optimizer over a list of anchors, and it failed: {error}. E.g. "
            "outer=lambda params: compopt.Average(torch.optim.SGD(params, lr=0.7))."
        ) from error


def check_outer(outer: object, anchors: list[Tensor]) -> None:
    """Raise where what was made for the anchors cannot exchange them."""
    if not isinstance(outer, CompressedOptimizer):
        raise TypeError(
            f"outer must make an optimizer of compopt, got {type(outer).__name__}: e.g. lambda "
            "params: compopt.Average(torch.optim.SGD(params, lr=0.7))."
        )
    stepped = [p for group in outer.param_groups for p in group["params"]]
    if len(stepped) != len(anchors) or any(map(lambda p, q: p is not q, stepped, anchors)):
        raise ValueError("outer must step all parameters that it is given, in their order.")


def squared_norm_of_part(
    tensors: dict[Tensor, Tensor], shards: list[Communicator], device: torch.device
) -> Tensor:
    """Return this rank's part of the squared norm of ``tensors``, one for each parameter.

    The sum over ``shards`` is that of the whole model: a part that several ranks hold counts once.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for p, t in tensors.items():
        by_copies.setdefault(get_replicate_size(p, shards), []).append(t)
    squared = torch.zeros((), dtype=torch.float64, device=device)
    for copies, ts in by_copies.items():
        norm = total_norm(ts).to(device, torch.float64)
        squared += norm.square() / copies
    return squared


def reset_moments(inner: Optimizer, tensors: Iterable[Anchored]) -> None:
    """Zero the state of these parameters in ``inner`` that is not finite."""
    for t in tensors:
        for value in inner.state.get(t.param, {}).values():
            if isinstance(value, Tensor) and not bool(to_local(value).isfinite().all()):
                value.zero_()
