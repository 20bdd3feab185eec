"""Muon on hidden matrices (Jordan et al., 2024) and AdamW on the rest, as one optimizer; both are
torch's own.

A hidden matrix w of m rows and d columns at one step, with gradient g::

    1  v <- mu v + (1 - mu) g
    2  u <- mu v + (1 - mu) g                    # with Nesterov's momentum; else v
    3  o <- u, its singular values about 1       # a Newton-Schulz iteration, in bfloat16
    4  w <- w - lr (decay w + .2 sqrt(max(m, d)) o)

Line 4 scales updates to the size of AdamW's (Liu et al., 2502.16982), so one learning rate serves
both. Embeddings, the head, vectors and tensors of more dimensions are AdamW's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ._engine.combined import CombinedOptimizer
from ._engine.options import Group, check_adam, is_count, is_numeric, require, require_option

UseMuon = Callable[[str, Tensor], bool]

MUON_OPTIONS = {"momentum", "nesterov", "ns_steps", "ns_coefficients", "adjust_lr_fn"}
ADAMW_OPTIONS = {"betas", "eps", "amsgrad", "maximize", "foreach", "fused", "capturable"}

NUMBER = re.compile(r"(^|\.)\d+(\.|$)")  # the number of a layer in a stack
EMBEDDING = re.compile(
    r"embed|embd|(^|[._])emb([._]|$)|(^|\.)(wte|wpe|tok|tokens?|pos|positions?)(\.|$)"
)
HEAD = re.compile(r"(^|[._])(heads?|lmhead|classifier|logits)(\.|$)|(^|\.)(output|score)\.weight$")


class MuonAdamW(CombinedOptimizer):
    r"""Muon on the hidden matrices of a model, AdamW on its embeddings, head and vectors::

        optimizer = compopt.MuonAdamW(model.named_parameters(), lr=1e-3)
        optimizer = compopt.LocalSteps(optimizer, every=30)

    Like torch.optim.AdamW it averages nothing: DDP does, or a class around it, :class:`LocalSteps`,
    :class:`Average` or :class:`Separate`. It is ``torch.optim.Muon`` with
    ``adjust_lr_fn="match_rms_adamw"`` and ``torch.optim.AdamW``, which are its ``members``; both
    have groups of their own in ``param_groups``. Needs torch 2.9. A matrix that FSDP2 shards is
    gathered in every step, by torch's Muon.

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
        betas, eps: for AdamW.
        use_muon: a function of a tensor's name ("" if it has none) and the tensor, which returns
            True if Muon steps it.

    State: ``momentum_buffer`` of Muon's tensors, ``exp_avg`` and ``exp_avg_sq`` of AdamW's.

    Raises:
        RuntimeError: torch is older than 2.9.
        ValueError: a tensor of Muon's is no matrix, or has fewer rows than FSDP2 has ranks; there
            are matrices without names, and no ``use_muon``.
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
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        use_muon: UseMuon | None = None,
    ):
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(
                f"MuonAdamW needs torch.optim.Muon, which torch has since 2.9, and this is torch "
                f"{torch.__version__}: install a newer one."
            )
        if isinstance(params, Tensor):
            raise TypeError("params must be named parameters or groups, got a Tensor.")
        check_options(
            dict(
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                ns_steps=ns_steps,
                betas=betas,
                eps=eps,
            )
        )
        given: list[Any] = list(params)
        if not given:
            raise ValueError("params is empty: pass model.named_parameters().")
        muon = torch.optim.Muon(
            [{"params": []}],
            lr,  # type: ignore[arg-type]  # a tensor too
            weight_decay,
            momentum,
            nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        adamw = torch.optim.AdamW([{"params": []}], lr, betas, eps, weight_decay)
        for member in (muon, adamw):
            member.param_groups.clear()
        super().__init__([muon, adamw])
        self._use_muon = use_muon
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        parts = [read_group(group) for group in groups]
        self._has_layers = any(
            p.ndim == 2 and is_hidden(name, has_layers=True)
            for part in parts
            for p, names in part.items()
            if isinstance(p, Tensor)
            for name in names
        )
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
            raise ValueError("maximize must be False: torch's Muon has none. Negate the loss.")
        check_options({**self.members[0].defaults, **self.members[1].defaults, **group})
        is_muon = {p: self._is_muon(p, names, group) for p, names in names_of.items()}
        muon, adamw = self.members
        sides = ((muon, True, ADAMW_OPTIONS), (adamw, False, MUON_OPTIONS))
        for member, takes_muon, options_of_other in sides:
            dropped = options_of_other | {"params", "param_names", "use_muon"}
            options = {name: value for name, value in group.items() if name not in dropped}
            chosen = {p: names[0] for p, names in names_of.items() if is_muon[p] == takes_muon}
            if chosen:
                is_named = any(chosen.values())
                params = [(name, p) for p, name in chosen.items()] if is_named else [*chosen]
                member.add_param_group({**options, "params": params})

    def _is_muon(self, p: Tensor, names: list[str], group: Group) -> bool:
        """Return True if Muon steps a tensor; raise if it cannot."""
        if not isinstance(p, Tensor):
            return False  # torch's AdamW says what is wrong
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
        elif not isinstance(use_muon, bool):
            use_muon = all(use_muon(name, p) for name in names)
        if use_muon:
            check_matrix(p, names)
        return bool(use_muon)

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
        counts = "".join(
            f"\n  {type(member).__name__}: {len(params)} tensors, "
            f"{sum(p.numel() for p in params):,} elements"
            for member in self.members
            for params in [[p for group in member.param_groups for p in group["params"]]]
        )
        return f"{type(self).__name__} ({counts}\n  list_parameters() has their names\n)"

    def __getstate__(self) -> dict[str, Any]:
        rule = {"_use_muon": self._use_muon, "_has_layers": self._has_layers}
        return {**super().__getstate__(), **rule}


def check_options(group: Group) -> None:
    """Raise ValueError where an option of a group is out of its range."""
    check_adam(group)
    momentum, steps = group["momentum"], group["ns_steps"]
    is_factor = is_numeric(momentum) and 0 <= momentum < 1
    require_option(is_factor, group, "momentum", "in [0, 1)")
    is_good = is_count(steps) and steps < 100
    require_option(is_good, group, "ns_steps", "an integer from 1 to 99")


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


def check_matrix(p: Any, names: list[str]) -> None:
    """Raise ValueError if torch's Muon cannot step a tensor."""
    if p.ndim != 2:
        raise ValueError(
            f"use_muon chooses {describe(p, names)}, and torch's Muon takes 2 dimensions only."
        )
    # torch's Muon steps a DTensor whole, but if a rank has no rows the update's placement differs
    for n, placement in enumerate(getattr(p, "placements", ())):
        if placement.is_shard() and p.shape[placement.dim] < p.device_mesh.size(n):
            raise ValueError(
                f"{describe(p, names)} is sharded over {p.device_mesh.size(n)} ranks, more than it "
                "has rows, which torch's Muon cannot step: leave it to AdamW, by use_muon=."
            )


def describe(p: Tensor, names: list[str]) -> str:
    """Return a tensor's names and shape."""
    name = " = ".join(filter(None, names)) or "a tensor"
    return f"{name} {tuple(p.shape)}"
