"""Muon on hidden matrices (Jordan et al., 2024) and AdamW on the rest, as one optimizer; AdamW is
torch's own.

A hidden matrix w of m rows and d columns at one step, with gradient g::

    1  v <- mu v + (1 - mu) g
    2  u <- mu v + (1 - mu) g                    # with Nesterov's momentum; else v
    3  o <- u, its singular values about 1       # a Newton-Schulz iteration
    4  w <- w - lr (decay w + .2 sqrt(max(m, d)) o)

Line 4 scales updates to the size of AdamW's (Liu et al., 2502.16982), so one learning rate serves
both. Embeddings, the head, vectors and tensors of more dimensions are AdamW's.

They are ``torch.optim.Muon``'s, in batches: matrices of one shape, and those of its transpose, take
as many launches as one of them would.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ._engine.combined import CombinedOptimizer
from ._engine.options import Group, check_adam, is_count, is_numeric, require, require_option
from ._state.tensors import gather_whole, take_local_part, to_local

UseMuon = Callable[[str, Tensor], bool | int]

MUON_OPTIONS = {"momentum", "nesterov", "ns_steps", "ns_coefficients", "adjust_lr_fn"}
ADAMW_OPTIONS = {"betas", "eps", "amsgrad", "maximize", "foreach", "fused", "capturable"}

NUMBER = re.compile(r"(^|\.)\d+(\.|$)")  # the number of a layer in a stack
EMBEDDING = re.compile(
    r"embed|embd|(^|[._])emb([._]|$)|(^|\.)(wte|wpe|tok|tokens?|pos|positions?)(\.|$)"
)
HEAD = re.compile(r"(^|[._])(heads?|lmhead|classifier|logits)(\.|$)|(^|\.)(output|score)\.weight$")

# of the Newton-Schulz iteration, by its authors: they raise small singular values fastest
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Elements of a batch, at most: a step takes up to 14 bytes of memory for each.
BATCH = 2**26


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
        betas, eps: for AdamW.
        use_muon: a function of a tensor's name ("" if it has none) and the tensor, which returns
            True if Muon steps it. A number instead of True says how many matrices of equal size the
            rows are, as 3 for q, k and v in one: each is orthogonalized by itself. A tensor of 3
            dimensions, as (experts, rows, columns), is a stack of matrices.

    State: ``momentum_buffer`` of Muon's tensors, ``exp_avg`` and ``exp_avg_sq`` of AdamW's.

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
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        use_muon: UseMuon | None = None,
    ):
        if isinstance(params, Tensor):
            raise TypeError("params must be named parameters or groups, got a Tensor.")
        options: Group = dict(lr=lr, weight_decay=weight_decay)
        of_muon: Group = dict(momentum=momentum, nesterov=nesterov, ns_steps=ns_steps)
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
        parts = {p: self._count_parts(p, names, group) for p, names in names_of.items()}
        muon, adamw = self.members
        assert isinstance(muon, Muon)
        muon.parts.update({p: n for p, n in parts.items() if n > 1})
        sides = ((muon, True, ADAMW_OPTIONS), (adamw, False, MUON_OPTIONS))
        for member, takes_muon, options_of_other in sides:
            dropped = options_of_other | {"params", "param_names", "use_muon"}
            options = {name: value for name, value in group.items() if name not in dropped}
            chosen = {p: names[0] for p, names in names_of.items() if bool(parts[p]) == takes_muon}
            if chosen:
                is_named = any(chosen.values())
                params = [(name, p) for p, name in chosen.items()] if is_named else [*chosen]
                member.add_param_group({**options, "params": params})

    def _count_parts(self, p: Tensor, names: list[str], group: Group) -> int:
        """Return how many matrices the rows of a tensor are, 0 if AdamW steps it; raise if Muon
        cannot.
        """
        if not isinstance(p, Tensor):
            return 0  # torch's AdamW says what is wrong
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
            use_muon = min(int(use_muon(name, p)) for name in names)
        if use_muon:
            check_matrices(p, names, use_muon)
        return int(use_muon)

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
    momentum, steps, rule = group["momentum"], group["ns_steps"], group["adjust_lr_fn"]
    is_factor = is_numeric(momentum) and 0 <= momentum < 1
    require_option(is_factor, group, "momentum", "in [0, 1)")
    is_good = is_count(steps) and steps < 100
    require_option(is_good, group, "ns_steps", "an integer from 1 to 99")
    is_known = rule in (None, "original", "match_rms_adamw")
    require_option(is_known, group, "adjust_lr_fn", "'match_rms_adamw' or 'original'")


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


def check_matrices(p: Tensor, names: list[str], parts: int) -> None:
    """Raise ValueError if a tensor is no stack of ``parts`` matrices, TypeError if complex."""
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
    if parts < 0 or p.shape[-2] % parts:
        raise ValueError(
            f"use_muon returns {parts} for {describe(p, names)}, whose {p.shape[-2]} rows are not "
            "so many matrices of equal size."
        )


def describe(p: Tensor, names: list[str]) -> str:
    """Return a tensor's names and shape."""
    name = " = ".join(filter(None, names)) or "a tensor"
    return f"{name} {tuple(p.shape)}"


# Muon in batches


class Muon(Optimizer):
    """``torch.optim.Muon`` with its options, groups and state, in batches.

    ``parts``: how many matrices the rows of a tensor are, where there is more than one.
    """

    def __init__(self, params: ParamsT, **options: Any):
        self.parts: dict[Tensor, int] = {}
        given = {"ns_coefficients": COEFFICIENTS, "eps": 1e-7, "adjust_lr_fn": "match_rms_adamw"}
        super().__init__(params, given | options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all tensors that have a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            for batch in make_batches(params, self._shape_of):
                self._step_batch(batch, group)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that ranks which step alike must share, beside groups."""
        params = [p for group in self.param_groups for p in group["params"]]
        dtypes = sorted({str(choose_dtype(p.device)) for p in params})
        return {"iteration in": dtypes, "parts": [self.parts.get(p, 1) for p in params]}

    def _shape_of(self, p: Tensor) -> tuple[int, int]:
        """Return the rows and columns of a tensor's matrices."""
        return p.shape[-2] // self.parts.get(p, 1), p.shape[-1]

    def _step_batch(self, params: Sequence[Tensor], group: Group) -> None:
        """Step tensors whose matrices have one shape, or its transpose."""
        updates = dict(zip(params, self._update_momenta(params, group), strict=True))
        lr, dtype = float(group["lr"]), choose_dtype(params[0].device)
        sides: dict[tuple[int, int], list[Tensor]] = {}
        for p in params:
            sides.setdefault(self._shape_of(p), []).append(p)
        stacks = [
            stack_matrices([updates.pop(p) for p in side], shape, dtype)
            for shape, side in sides.items()
        ]
        counts = [len(stack) for stack in stacks]
        wide = [stack if stack.shape[1] <= stack.shape[2] else stack.mT for stack in stacks]
        del stacks
        options = group["ns_coefficients"], group["ns_steps"], group["eps"]
        orthogonal = orthogonalize(torch.cat(wide) if len(wide) > 1 else wide[0], *options)
        for (shape, side), stack in zip(sides.items(), orthogonal.split(counts), strict=True):
            weights = [to_local(p) for p in side]
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            results = unstack(stack if shape[0] <= shape[1] else stack.mT, side)
            torch._foreach_add_(weights, results, alpha=-lr * scale(shape, group["adjust_lr_fn"]))

    def _update_momenta(self, params: Sequence[Tensor], group: Group) -> list[Tensor]:
        """Update the momentum of every tensor; return what is to be orthogonalized, whole."""
        given = [p.grad for p in params if p.grad is not None]
        for p, grad in zip(params, given, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(grad)
        momenta = [to_local(self.state[p]["momentum_buffer"]) for p in params]
        grads = [to_local(grad) for grad in given]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        updates: Sequence[Tensor] = momenta
        if group["nesterov"]:
            updates = torch._foreach_lerp(grads, momenta, group["momentum"])
        pairs = zip(params, updates, strict=True)
        return [gather_whole(p, x) if cuts_matrices(p) else x for p, x in pairs]


def make_batches(
    params: Iterable[Tensor], shape_of: Callable[[Tensor], tuple[int, int]]
) -> list[list[Tensor]]:
    """Divide tensors into batches, equally on all ranks: one shape of matrices and its transpose,
    one dtype, one device, and no more than ``BATCH`` elements if they are several.
    """
    by_kind: dict[Any, list[list[Tensor]]] = {}
    for p in params:
        kind = (*sorted(shape_of(p)), p.dtype, p.device)
        batches = by_kind.setdefault(kind, [[]])
        if batches[-1] and sum(q.numel() for q in batches[-1]) + p.numel() > BATCH:
            batches.append([])
        batches[-1].append(p)
    return [batch for batches in by_kind.values() for batch in batches]


def choose_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the iteration: bfloat16, as in torch's Muon, if the device has units for
    it; else float32, which is more exact and 3 to 20 times as fast as bfloat16 emulated.
    """
    if device.type == "cuda":
        has_units = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        has_units = onednn_takes_bfloat16()
        if platform.machine() in ("x86_64", "AMD64"):  # where that may be by emulation
            units = (torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported)
            has_units = has_units and any(unit() for unit in units)
    else:
        has_units = True
    return torch.bfloat16 if has_units else torch.float32


def onednn_takes_bfloat16() -> bool:
    is_available = torch.backends.mkldnn.is_available()
    return is_available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def stack_matrices(tensors: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Copy the matrices of all tensors to one of shape (number, rows, columns)."""
    matrices = [tensor.reshape(-1, *shape) for tensor in tensors]
    counts = [len(each) for each in matrices]
    stack = tensors[0].new_empty((sum(counts), *shape), dtype=dtype)
    torch._foreach_copy_(stack.split(counts), matrices)
    return stack


def unstack(stack: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of each parameter, in its dtype: of a sharded one this rank's."""
    stack = stack.new_empty(stack.shape, dtype=params[0].dtype).copy_(stack)  # contiguous, too
    shapes = [p.shape if cuts_matrices(p) else to_local(p).shape for p in params]
    sizes = [shape.numel() // stack[0].numel() if len(stack) else 0 for shape in shapes]
    wholes = [part.view(s) for part, s in zip(stack.split(sizes), shapes, strict=True)]
    pairs = zip(params, wholes, strict=True)
    return [take_local_part(p, x) if cuts_matrices(p) else x for p, x in pairs]


def orthogonalize(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Bring the singular values of matrices, at least as wide as high, to about 1.

    A step makes s to a s + b s^3 + c s^5, of all singular values s at once.
    """
    a, b, c = coefficients
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def scale(shape: tuple[int, int], rule: str | None) -> float:
    """Return the factor of an orthogonal update: ``adjust_lr_fn`` of ``torch.optim.Muon``."""
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(shape))
    return math.sqrt(max(1.0, shape[0] / shape[1]))


def cuts_matrices(p: Tensor) -> bool:
    """Return True if this rank has a part only of some matrices of a sharded tensor."""
    cuts = [one for one in getattr(p, "placements", ()) if not one.is_replicate()]
    return any(not (one.is_shard() and one.dim < p.ndim - 2) for one in cuts)
