"""Anchors: what parameters were when ranks were last equal, and the optimizer that steps them.

An anchor has its parameter's shape, in float32 where the parameter is of lower precision, on its
device or in host memory. The anchor of a parameter that was never trained is the parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._engine.base import CompressedOptimizer, without_integrations
from .._state.buckets import local
from .._state.devices import HOST, pinned
from .._state.tensors import laid_out_as

Group = dict[str, Any]
MakeOuter = Callable[[list[Tensor]], CompressedOptimizer]


@dataclass(eq=False, slots=True)
class Anchored:
    """A parameter, its anchor, and the fragment in which they are exchanged."""

    param: Tensor
    fragment: int
    anchor: nn.Parameter
    owns_anchor: bool  # else the anchor is the parameter itself
    has_moved: bool = False  # or may have, since its last exchange

    def start(self) -> Tensor:
        """Where the rank began: the anchor, as the parameter shows it."""
        return local(self.anchor.detach()).to(self.param.dtype)

    def value(self) -> Tensor:
        """The parameter, on its anchor's device."""
        return local(self.param.detach()).to(local(self.anchor).device)

    def moved_since(self) -> Tensor:
        """The difference to what the parameter was when the exchange began."""
        wide = local(self.anchor).dtype
        moved = self.value().to(wide) - self.start().to(wide)
        return moved if self.anchor.grad is None else moved.add_(local(self.anchor.grad))

    def write_back(self, since: Tensor | None, mix: float) -> None:
        """Line 5 of the module ``local_steps``; ``since``: what the rank moved since line 2."""
        w, new = local(self.param.detach()), local(self.anchor.detach())
        if mix:
            value = self.value().to(new.dtype)
            new = torch.lerp(new, value if since is None else value - since, mix)
        w.copy_(new if since is None else new + since)


class Anchors:
    """The anchors of all parameters, and the outer optimizer that has them for its parameters.

    ``fragments[i]`` is the fragment of parameter i. ``make_outer`` is given the anchors of the
    first ``count`` fragments; those of later ones, of groups that were added, join afterwards. The
    outer optimizer's groups are cut where fragments end, so that it can step one fragment alone.
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
        self.tensors = [self._anchor(p, n) for p, n in zip(params, fragments, strict=True)]
        first: list[Tensor] = [t.anchor for t in self.tensors if t.fragment < count]
        with without_integrations():
            self.outer = make_outer(first)
        check_outer(self.outer, first)
        cut_groups(self.outer, {t.anchor: t.fragment for t in self.tensors})
        self.outer._session.has_pseudo_gradients = True
        self._rates: list[tuple[float, float]] = []
        self._begin_momentum(self.tensors)
        for late in sorted(set(fragments) - set(range(count))):
            self._extend_outer([t for t in self.tensors if t.fragment == late])

    def _anchor(self, p: Tensor, fragment: int) -> Anchored:
        if p.requires_grad:
            return Anchored(p, fragment, nn.Parameter(wide_copy(p, self._on_host)), True)
        shown = p.detach().to(HOST if self._on_host else p.device)
        return Anchored(p, fragment, nn.Parameter(shown, requires_grad=False), False)

    def add(self, params: Sequence[Tensor]) -> None:
        """Anchor the parameters of a group that was added: a fragment of their own."""
        number = max([self.count - 1, *(t.fragment for t in self.tensors)]) + 1
        new = [self._anchor(p, number) for p in params]
        self.tensors += new
        self._extend_outer(new)

    def _extend_outer(self, tensors: list[Anchored]) -> None:
        self.outer.add_param_group({"params": [t.anchor for t in tensors]})
        self._begin_momentum(tensors)

    def _begin_momentum(self, tensors: Iterable[Anchored]) -> None:
        """Make the momentum of SGD, which makes it in its first step: a rank that joins later has
        as many tensors as the others. Note rates and momenta of new groups.
        """
        base = getattr(self.outer, "base", None)
        if not isinstance(base, torch.optim.SGD):
            return
        for group in base.param_groups[len(self._rates) :]:
            self._rates.append((group["lr"], group["momentum"]))
        if base.defaults["momentum"] and not base.defaults["dampening"]:
            for t in tensors:
                if t.owns_anchor:
                    zeros = torch.zeros_like(t.anchor.detach())
                    base.state[t.anchor].setdefault("momentum_buffer", zeros)

    def set_outer_share(self, share: float) -> None:
        """Set rate and momentum of an outer optimizer around SGD, from those that average
        parameters (0) to its own (1).
        """
        for group, (lr, momentum) in zip(self.outer.param_groups, self._rates, strict=False):
            # without momentum SGD would not renew v
            least = torch.finfo(torch.float64).tiny if momentum else 0.0
            group.update(lr=1 + (lr - 1) * share, momentum=max(momentum * share, least))

    # Fragments

    @property
    def fragments(self) -> set[int]:
        return {t.fragment for t in self.tensors}

    def within(self, fragments: Collection[int]) -> list[Anchored]:
        return [t for t in self.tensors if t.fragment in fragments]

    def groups_of(self, fragments: Collection[int]) -> list[Group]:
        """The groups of the outer optimizer that hold these fragments."""
        anchors = {t.anchor for t in self.within(fragments)}
        return [g for g in self.outer._option_groups if not anchors.isdisjoint(g["params"])]

    @property
    def exchanges(self) -> int:
        """The number of exchanges that anchors have taken in, counted by fragment."""
        return sum(group["step"] for group in self.outer._option_groups)

    @torch.no_grad()
    def note_training(self) -> None:
        """Note that trainable parameters may move; from then on they have anchors of their own."""
        for t in self.tensors:
            if t.param.requires_grad:
                t.has_moved = True
                if not t.owns_anchor:
                    t.anchor.data, t.owns_anchor = wide_copy(t.param, self._on_host), True
                    self._begin_momentum([t])

    # An exchange

    def set_pseudo_gradients(self, fragments: Collection[int]) -> float:
        """Line 2: d, into the anchors' ``grad``. What cannot have moved has none, and its anchor
        requires none. Returns the squared norm.
        """
        moved = []
        for t in self.within(fragments):
            t.anchor.requires_grad_(t.has_moved)
            if t.has_moved:
                moved.append(t.start().to(local(t.anchor).dtype) - t.value())
                t.anchor.grad, t.has_moved = laid_out_as(t.anchor.detach(), moved[-1]), False
        return float(torch.nn.utils.get_total_norm(moved)) ** 2 if moved else 0.0

    def sent(self, fragments: Collection[int]) -> list[Anchored]:
        """The parameters of these fragments that are part of their last exchange."""
        return [t for t in self.within(fragments) if t.anchor.requires_grad]

    def cancel(self, fragments: Collection[int]) -> None:
        """Their exchange is not applied."""
        for t in self.sent(fragments):
            t.has_moved = True
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for t in self.tensors:
            t.anchor.grad = None

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "fragments": [t.fragment for t in self.tensors],
            "anchors": [t.anchor.detach() if t.owns_anchor else None for t in self.tensors],
            "moved": [t.has_moved for t in self.tensors],
            "sent": [t.anchor.requires_grad for t in self.tensors],
            "pseudo_gradients": [t.anchor.grad for t in self.tensors],
            "optimizer": self.outer._saved(),
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned.

        Raises ValueError where it is of other tensors.
        """
        names = "anchors", "pseudo_gradients", "moved", "sent"
        for t, anchor, d, moved, sent in zip(self.tensors, *(saved[n] for n in names), strict=True):
            for value in (anchor, d):
                if value is not None and value.shape != t.param.shape:
                    raise ValueError(
                        f"loaded state dict has an anchor of shape {tuple(value.shape)} for a "
                        f"parameter of shape {tuple(t.param.shape)}."
                    )
            if anchor is not None:
                t.anchor.data, t.owns_anchor = wide_copy(t.param, self._on_host), True
                t.anchor.copy_(anchor)
            t.has_moved = bool(moved)
            t.anchor.requires_grad_(bool(sent))
            t.anchor.grad = None if d is None else laid_out_as(t.anchor.detach(), local(d).clone())
        self.outer.load_state_dict(saved["optimizer"])


def mend_moments(inner: Optimizer, tensors: Iterable[Anchored]) -> None:
    """Zero what an optimizer keeps of these parameters and is not finite."""
    for t in tensors:
        for value in inner.state.get(t.param, {}).values():
            if isinstance(value, Tensor) and not bool(local(value).isfinite().all()):
                value.zero_()


def wide_copy(p: Tensor, on_host: bool) -> Tensor:
    """A copy in at least float32."""
    wide = torch.promote_types(p.dtype, torch.float32)
    if on_host:
        return pinned(p.detach().to(HOST, copy=True).to(wide), p.device)
    return p.detach().to(wide, copy=True)


def deal(groups: list[Group], fragments: int) -> tuple[list[Tensor], list[int]]:
    """All parameters, and the fragment of each: every group is dealt in order, in parts of about
    equal bytes.

    Those of all groups at the same place are together: groups mostly divide layers in two.
    """
    params: list[Tensor] = []
    dealt: list[int] = []
    for group in groups:
        sizes = [p.numel() * p.element_size() for p in group["params"]]
        total, before = max(1, sum(sizes)), 0
        for p, size in zip(group["params"], sizes, strict=True):
            params.append(p)
            dealt.append((2 * before + size) * fragments // (2 * total + 1))
            before += size
    return params, dealt


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


def cut_groups(outer: CompressedOptimizer, fragment_of: dict[Tensor, int]) -> None:
    """Cut each group of an optimizer into one for every fragment in it."""
    if len(set(fragment_of.values())) == 1:
        return
    for groups in {
        id(groups): groups for groups in (outer.param_groups, outer._option_groups)
    }.values():
        groups[:] = [
            {**group, "params": [p for p in group["params"] if fragment_of[p] == fragment]}
            for group in groups
            for fragment in sorted({fragment_of[p] for p in group["params"]})
        ]
    outer._session.rebuild_buckets()
