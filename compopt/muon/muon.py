"""Muon on hidden matrices (Jordan et al., 2024) and AdamW on the rest, as one optimizer; AdamW is
torch's own.

A hidden matrix w of m rows and d columns at one step, with gradient g::

    1  v <- mu v + (1 - mu) g
    2  u <- mu v + (1 - mu) g                    # with Nesterov's momentum; else v
    3  o <- u, its singular values about 1       # a Newton-Schulz iteration
    4  w <- w - lr (decay w + .2 sqrt(max(m, d)) o)

With ``normalize="rows"`` (NorMuon, Li et al., 2510.05491) between lines 3 and 4, for each row i::

      s_i <- beta2 s_i + (1 - beta2) mean(o_i^2)
      o_i <- o_i / sqrt(s_i)
      o <- o sqrt(min(m, d)) / |o|             # the norm of an orthogonal matrix

Line 4 scales updates to the size of AdamW's (Liu et al., 2502.16982), so one learning rate serves
both. Embeddings, the head, vectors and tensors of more dimensions are AdamW's.

They are ``torch.optim.Muon``'s, in batches: matrices of one shape, and those of its transpose, take
as many launches as one of them would.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from .._engine.options import Group, check_adam, is_count, is_numeric, require, require_option
from .._inside.bases import CombinedOptimizer
from .._state.tensors import gather_whole, get_grad_dtype, to_local
from .orthogonal import (
    Slice,
    choose_dtype,
    cut_rows,
    cuts_matrices,
    make_batches,
    stack_slices,
    step_stacks,
)

UseMuon = Callable[[str, Tensor], bool | int | Sequence[int]]

MUON_OPTIONS = {"momentum", "nesterov", "ns_steps", "ns_coefficients", "adjust_lr_fn"}
NORMALIZATION = {"normalize", "muon_beta2"}
ADAMW_OPTIONS = {"betas", "eps", "amsgrad", "maximize", "foreach", "fused", "capturable"}

NUMBER = re.compile(r"(^|\.)\d+(\.|$)")  # the number of a layer in a stack
EMBEDDING = re.compile(
    r"embed|embd|(^|[._])emb([._]|$)|(^|\.)(wte|wpe|tok|tokens?|pos|positions?)(\.|$)"
)
HEAD = re.compile(r"(^|[._])(heads?|lmhead|classifier|logits)(\.|$)|(^|\.)(output|score)\.weight$")

# of the Newton-Schulz iteration, by its authors: they raise small singular values fastest
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Elements of a batch, at most: a step takes memory for 4 values of the iteration's dtype for each.
BATCH = 3 * 2**25


class MuonAdamW(CombinedOptimizer):
    r"""Muon on the hidden matrices of a model, AdamW on its embeddings, head and vectors::

        optimizer = compopt.MuonAdamW(model.named_parameters(), lr=1e-3)
        optimizer = compopt.LocalSteps(optimizer, every=30)

    Like torch.optim.AdamW it averages nothing: DDP does, or a class around it, :class:`LocalSteps`,
    :class:`Average` or :class:`Separate`. Its ``members``, a Muon and ``torch.optim.AdamW``, have
    groups of their own in ``param_groups``. The Muon does what ``torch.optim.Muon`` does with
    ``adjust_lr_fn="match_rms_adamw"``, up to the rounding of bfloat16, and its state dicts are the
    same; it orthogonalizes matrices of one shape in one batch, in float32 on CPUs and GPUs that
    have no units for bfloat16. Matrices that FSDP2 shards are gathered in every step.

    Without ``use_muon`` a tensor is Muon's if it has 2 dimensions, its name does not say that it is
    an embedding or a head (embed, wte, tokens, position, lm_head, classifier, output, ...), and it
    is in a numbered layer, as ``blocks.0.mlp.up.weight`` is, if any such tensor is.
    ``list_parameters()`` shows the result: look at it once.

    Args:
        params: ``model.named_parameters()``, or groups of named parameters. A group may override
            the options below, and say ``use_muon=True`` or ``False`` for all its tensors; these
            need no names then. A tensor with two names, as a tied embedding and head, counts once,
            and is Muon's only if both names say so.
        lr, weight_decay: for both. Decay is decoupled, as in :class:`torch.optim.AdamW`.
        momentum, nesterov, ns_steps: for Muon; ``ns_steps`` are the steps of the Newton-Schulz
            iteration.
        normalize, muon_beta2: for Muon; ``"rows"`` is NorMuon: each row of an orthogonalized
            matrix, a neuron, is divided by its root mean square, averaged over steps by
            ``muon_beta2``, and the matrix brought to the norm of an orthogonal one, so one learning
            rate still serves both.
        betas, eps: for AdamW.
        use_muon: a function of a tensor's name ("" if it has none) and the tensor, which returns
            True if Muon steps it. A number instead of True says how many matrices of equal size the
            rows are, as 3 for q, k and v in one; a list of numbers, how many rows each has, as
            (512, 128, 128) for grouped queries: each is orthogonalized by itself. A tensor of 3
            dimensions, as (experts, rows, columns), is a stack of matrices.

    State: ``momentum_buffer`` of Muon's tensors, with ``normalize`` also
    ``second_momentum_buffer``, a number a row; ``exp_avg`` and ``exp_avg_sq`` of AdamW's.

    Raises:
        ValueError: a tensor of Muon's has other than 2 or 3 dimensions, or its rows are not so many
            matrices; there are matrices without names, and no ``use_muon``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        normalize: Literal["rows"] | None = None,
        muon_beta2: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        use_muon: UseMuon | None = None,
    ):
        if isinstance(params, Tensor):
            raise TypeError("params must be named parameters or groups, got a Tensor.")
        options: Group = dict(lr=lr, weight_decay=weight_decay)
        of_muon: Group = dict(momentum=momentum, nesterov=nesterov, ns_steps=ns_steps)
        of_muon |= dict(normalize=normalize, muon_beta2=muon_beta2)
        of_adamw: Group = dict(betas=betas, eps=eps)
        muon = Muon([{"params": []}], **options, **of_muon)
        check_options({**muon.defaults, **of_adamw})
        given: list[Any] = list(params)
        if not given:
            raise ValueError("params is empty: pass model.named_parameters().")
        adamw = torch.optim.AdamW([{"params": []}], **options, **of_adamw)
        for member in (muon, adamw):
            member.param_groups.clear()
        super().__init__([muon, adamw])
        self._use_muon = use_muon
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        parts = [read_group(group) for group in groups]
        of_matrices = [n for part in parts for p, n in part.items() if getattr(p, "ndim", 0) == 2]
        self._has_layers = any(is_hidden(name, True) for names in of_matrices for name in names)
        for group, part in zip(groups, parts, strict=True):
            self._divide(group, part)

    def add_param_group(self, param_group: Group) -> None:
        """Divide a group between Muon and AdamW."""
        self._divide(param_group, read_group(param_group))

    def _divide(self, group: Group, names_of: dict[Tensor, list[str]]) -> None:
        known = {p for one in self.param_groups for p in one["params"]}
        if twice := [describe(p, names) for p, names in names_of.items() if p in known]:
            raise ValueError(f"params has {', '.join(twice[:5])} in more than one group.")
        if group.get("maximize"):
            raise ValueError("maximize must be False: Muon has none. Negate the loss.")
        check_options({**self.members[0].defaults, **self.members[1].defaults, **group})
        rows = {p: self._choose_rows(p, names, group) for p, names in names_of.items()}
        muon, adamw = self.members
        assert isinstance(muon, Muon)
        muon.rows.update({p: counts for p, counts in rows.items() if len(counts) > 1})
        sides = ((muon, True, ADAMW_OPTIONS), (adamw, False, MUON_OPTIONS | NORMALIZATION))
        for member, takes_muon, options_of_other in sides:
            dropped = options_of_other | {"params", "param_names", "use_muon"}
            options = {name: value for name, value in group.items() if name not in dropped}
            chosen = {p: names[0] for p, names in names_of.items() if bool(rows[p]) == takes_muon}
            if chosen:
                is_named = any(chosen.values())
                params = [(name, p) for p, name in chosen.items()] if is_named else [*chosen]
                member.add_param_group({**options, "params": params})

    def _choose_rows(self, p: Tensor, names: list[str], group: Group) -> tuple[int, ...]:
        """Return the rows of each matrix in a tensor, () if AdamW steps it."""
        if not isinstance(p, Tensor):
            return ()  # torch's AdamW says what is wrong
        use_muon = group.get("use_muon", self._use_muon)
        is_rule = use_muon is None or isinstance(use_muon, bool) or callable(use_muon)
        require(is_rule, "use_muon", use_muon, "None, True, False or a function")
        if use_muon is None:
            if p.ndim == 2 and not any(names):
                raise ValueError(
                    f"params has {describe(p, names)} without a name, which may be a hidden matrix "
                    "or an embedding: pass model.named_parameters(), or use_muon=."
                )
            use_muon = p.ndim == 2 and all(is_hidden(name, self._has_layers) for name in names)
        elif callable(use_muon):
            choices = [use_muon(name, p) for name in names]
            use_muon = choices[0] if all(choices) else False
        return count_rows(p, names, use_muon) if use_muon else ()

    def list_parameters(self) -> dict[str, list[str]]:
        """Return the names and shapes of Muon's and of AdamW's tensors."""
        listed: dict[str, list[str]] = {}
        for member in self.members:
            lines = listed.setdefault(type(member).__name__, [])
            for group in member.param_groups:
                names = group.get("param_names") or [""] * len(group["params"])
                lines += [describe(p, [n]) for n, p in zip(names, group["params"], strict=True)]
        return listed

    def __repr__(self) -> str:
        counts = ""
        for member in self.members:
            sizes = [p.numel() for group in member.param_groups for p in group["params"]]
            name = type(member).__name__
            counts += f"\n  {name}: {len(sizes)} tensors, {sum(sizes):,} elements"
        return f"{type(self).__name__} ({counts}\n  list_parameters() has their names\n)"

    def __getstate__(self) -> dict[str, Any]:
        rule = {"_use_muon": self._use_muon, "_has_layers": self._has_layers}
        return {**super().__getstate__(), **rule}


def check_options(group: Group) -> None:
    """Raise ValueError where an option of a group is out of its range."""
    check_adam(group)
    steps, rule = group["ns_steps"], group["adjust_lr_fn"]
    for name in ("momentum", "muon_beta2"):
        is_factor = is_numeric(group[name]) and 0 <= group[name] < 1
        require_option(is_factor, group, name, "in [0, 1)")
    is_good = is_count(steps) and steps < 100
    require_option(is_good, group, "ns_steps", "an integer from 1 to 99")
    is_known = rule in (None, "original", "match_rms_adamw")
    require_option(is_known, group, "adjust_lr_fn", "'match_rms_adamw' or 'original'")
    require_option(group["normalize"] in (None, "rows"), group, "normalize", "None or 'rows'")


def is_hidden(name: str, has_layers: bool) -> bool:
    """Return True if a matrix of this name is neither an embedding nor a head.

    ``has_layers``: the model has numbered layers, and hidden matrices are in them.
    """
    number = NUMBER.search(name)
    outside = name[: number.start()] if number else name
    is_inside = number is not None or not has_layers
    return is_inside and not EMBEDDING.search(name) and not HEAD.search(outside)


def read_group(group: Group) -> dict[Tensor, list[str]]:
    """Return all names of every tensor of a group, "" where it has none."""
    given = group["params"]
    if isinstance(given, set):
        raise TypeError("params must be in an order that is the same in every run, got a set.")
    params: list[Any] = [given] if isinstance(given, Tensor) else list(given)
    names: Iterable[str] = group.get("param_names") or [""] * len(params)
    names_of: dict[Tensor, list[str]] = {}
    for p, name in zip(params, names, strict=True):
        name, p = p if isinstance(p, tuple) else (name, p)
        names_of.setdefault(p, []).append(name)
    return names_of


def count_rows(p: Tensor, names: list[str], parts: int | Sequence[int]) -> tuple[int, ...]:
    """Return the rows of each matrix in a tensor.

    Raises ValueError if the tensor is no stack of such matrices, TypeError if it is complex.
    """
    if p.is_complex():
        raise TypeError(
            f"use_muon chooses {describe(p, names)}, which is complex ({p.dtype}): use "
            "torch.view_as_real."
        )
    if p.ndim not in (2, 3) or not p.is_floating_point():
        raise ValueError(
            f"use_muon chooses {describe(p, names)} of {p.dtype}, and Muon takes floats of 2 or 3 "
            "dimensions only."
        )
    rows = p.shape[-2]
    if isinstance(parts, Sequence):
        if not all(is_count(count) for count in parts) or sum(parts) != rows:
            raise ValueError(
                f"use_muon returns {parts} for {describe(p, names)}: return the rows of each "
                f"matrix, which are {rows} together."
            )
        return tuple(int(count) for count in parts)
    if parts < 0 or rows % parts:
        raise ValueError(
            f"use_muon returns {parts} for {describe(p, names)}, whose {rows} rows are not so many "
            "matrices of equal size."
        )
    return (rows // int(parts),) * int(parts)


def describe(p: Tensor, names: list[str]) -> str:
    """Return a tensor's names and shape."""
    name = " = ".join(filter(None, names)) or "a tensor"
    return f"{name} {tuple(p.shape)}"


# Muon in batches


class Muon(Optimizer):
    """``torch.optim.Muon`` with its options, groups and state, in batches.

    ``rows``: the rows of each matrix of a tensor, where there is more than one.
    """

    def __init__(self, params: ParamsT, **options: Any):
        self.rows: dict[Tensor, tuple[int, ...]] = {}
        given = {"ns_coefficients": COEFFICIENTS, "eps": 1e-7, "adjust_lr_fn": "match_rms_adamw"}
        super().__init__(params, given | options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rows": self.rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take another state. Options that groups of a checkpoint lack stay as they are."""
        before = getattr(self, "param_groups", [])
        super().__setstate__(state)
        for group, own in zip(self.param_groups, before, strict=False):
            group.update({name: own[name] for name in NORMALIZATION if name not in group})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all tensors that have a gradient."""
        for group in self.param_groups:
            by_kind: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    by_kind.setdefault((p.dtype, p.device), []).append(p)
            for params in by_kind.values():
                self._step_alike(params, {**group, "lr": float(group["lr"])})

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that ranks which step alike must share, beside groups."""
        params = [p for group in self.param_groups for p in group["params"]]
        dtypes = sorted({str(choose_dtype(p.device)) for p in params})
        return {"iteration in": dtypes, "rows": [self._rows_of(p) for p in params]}

    def _rows_of(self, p: Tensor) -> tuple[int, ...]:
        """Return the rows of each matrix of a tensor."""
        return self.rows.get(p, (p.shape[-2],))

    def _step_alike(self, params: Sequence[Tensor], group: Group) -> None:
        """Step tensors of one dtype on one device."""
        self._update_momenta(params, group)
        torch._foreach_mul_([to_local(p) for p in params], 1 - group["lr"] * group["weight_decay"])
        slices = [one for p in params for one in cut_rows(p, self._rows_of(p))]
        batches = make_batches(slices, BATCH)
        sides = [side for batch in batches for side in batch]
        variances = self._read_variances(sides, group) if group["normalize"] else []
        waiting = itertools.zip_longest(sides, variances)  # no variances: None for each
        remaining = Counter(one.p for one in slices)
        updates: dict[Tensor, Tensor] = {}
        for batch in batches:
            tensors = [one.p for side in batch for one in side]
            self._read_updates(tensors, group, updates)
            stacks = [stack_slices(side, updates, choose_dtype(params[0].device)) for side in batch]
            remaining.subtract(tensors)
            updates = {p: update for p, update in updates.items() if remaining[p]}
            step_stacks(stacks, waiting, group)
        if variances:
            self._write_variances(sides, variances)

    def make_state(self, p: Tensor, group: Group) -> dict[str, Any]:
        """Return the state of a tensor before its first step, without communication.

        The mean squares of rows are of all rows if ranks share a matrix: all compute the whole.
        """
        state = {"momentum_buffer": torch.zeros_like(p, dtype=get_grad_dtype(p))}
        if group["normalize"]:
            rows = p.detach()[..., :1]
            if cuts_matrices(p):
                rows = to_local(p.detach()).new_empty((*p.shape[:-1], 1))
            state["second_momentum_buffer"] = torch.zeros_like(rows)
        return state

    def _update_momenta(self, params: Sequence[Tensor], group: Group) -> None:
        for p in params:
            state = self.state[p]
            is_whole = "second_momentum_buffer" in state or not group["normalize"]
            if "momentum_buffer" not in state or not is_whole:
                for name, value in self.make_state(p, group).items():
                    state.setdefault(name, value)
        given = [p.grad for p in params if p.grad is not None]
        momenta = [to_local(self.state[p]["momentum_buffer"]) for p in params]
        torch._foreach_lerp_(momenta, [to_local(grad) for grad in given], 1 - group["momentum"])

    def _read_updates(
        self, tensors: Iterable[Tensor], group: Group, known: dict[Tensor, Tensor]
    ) -> None:
        """Add what is to be orthogonalized, whole, of tensors of which it is not known."""
        params = [p for p in dict.fromkeys(tensors) if p not in known]
        updates = [to_local(self.state[p]["momentum_buffer"]) for p in params]
        if group["nesterov"] and params:
            grads = [to_local(p.grad) for p in params if p.grad is not None]
            updates = [*torch._foreach_lerp(grads, updates, group["momentum"])]
        for p, update in zip(params, updates, strict=True):
            known[p] = gather_whole(p, update) if cuts_matrices(p) else update

    # The mean squares of rows

    def _read_variances(self, sides: Sequence[Sequence[Slice]], group: Group) -> list[Tensor]:
        """Return those of each side, (matrices, rows), in float32 or more, times ``muon_beta2``."""
        views = [[self._view_variance(one) for one in side] for side in sides]
        flat = torch.cat([view.reshape(-1) for side in views for view in side])
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32)).mul_(group["muon_beta2"])
        parts = flat.split([sum(view.numel() for view in side) for side in views])
        return [part.view(-1, side[0].rows) for part, side in zip(parts, sides, strict=True)]

    def _write_variances(self, sides: Sequence[Sequence[Slice]], values: Sequence[Tensor]) -> None:
        views, parts = [], []
        for side, value in zip(sides, values, strict=True):
            of_side = [self._view_variance(one) for one in side]
            split = value.view(-1).split([view.numel() for view in of_side])
            parts += [part.view(view.shape) for part, view in zip(split, of_side, strict=True)]
            views += of_side
        torch._foreach_copy_(views, parts)

    def _view_variance(self, one: Slice) -> Tensor:
        """Return those of a slice in the state."""
        return one.view_rows(to_local(self.state[one.p]["second_momentum_buffer"]))
