"""SEPARATE: a simple low-rank projection for gradient compression, Algorithms 1 and 3, around any
torch optimizer.

One matrix of m rows and d columns on rank n at step t; g_n is its local gradient, e_n what
compression has left over::

    1  h_n <- g_n + e_n
    2  R <- a Gaussian d x r matrix from (seed, t, tensor), r = ceil(d / ratio);  p_n <- h_n R
    3  p <- mean over ranks of p_n
    4  ghat <- p R^T / r                                       # to the base optimizer
    5  e_n <- beta e_n + (1 - beta) (h_n - p_n R^T / r);  e_n <- 0 when t % reset_interval == 0

With ``projection="orthonormal"`` R is replaced by orthonormal columns Q that span the same space,
and 1/r by 1; with "tracked" by columns that follow the gradient, which takes an exchange more (see
``tracking``).

Where we differ from the paper: beta weights the *old* error. As printed it weights the new one, and
with w = (d + 1) / r, about the ratio, the squared error grows by beta_old^2 + (1 - beta_old)^2 w a
step: without end at the paper's own settings. On the old error that is stable for beta > (w - 1) /
(w + 1) and least at w / (1 + w), "auto". The smaller side of a tensor is projected, and a dense
start of ``warmup_steps`` is possible."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ._engine.base import CompressedOptimizer
from ._engine.options import check_adam
from ._engine.settings import known_of
from ._engine.weakly import weakly
from ._engine.when import OPTIONS
from ._lowrank.projecting import Exchange, Projecting, resets
from ._lowrank.projections import grams_of, pack, reconstruct, squared_norm
from ._lowrank.tracking import follow, followed, join, track
from ._ops.ops import Ops, clip_factor
from ._state.buckets import Bucket, grad_dtype, local
from ._state.layouts import Dense, Layout
from ._wire.comm import ProcessGroup
from ._wire.requests import Agree, AllReduceMean, Asking


def separate(
    bucket: Bucket,
    ops: Ops,
    exchange: Exchange,
    target: Callable[[Bucket, int, Tensor | None], Tensor],
    apply: Callable[[Bucket, int, Tensor], None],
) -> Asking[None]:
    """Algorithm 1, one bucket, one step.

    The averaged gradient of tensor i is written to ``target(bucket, i, whole)`` and handed to
    ``apply``. ``whole`` is where it is already, of a tensor that is averaged whole."""
    h, grads, residual, plan = bucket.group, bucket.grads(), bucket.state["residual"], exchange.plan
    t = h["step"] + 1
    tracked, agreed = yield from track(bucket, ops, grads, plan, exchange.bases, exchange.clipped)
    matrices = join(tracked, exchange.draw())
    sent = pack(
        bucket, ops, grads, plan, matrices, exchange.clipped, exchange.found is not None, agreed
    )  # lines 1, 2
    grams = grams_of(matrices, exchange.clips)
    own = [None if q is None else part.clone() for q, part in zip(plan, sent.parts, strict=False)]
    mean = yield AllReduceMean(sent)  # line 3
    squared = squared_norm(mean, plan, grams, exchange.clips) if any(plan) else None
    bases = followed(plan, mean)
    norm = yield Agree(
        mean, "projected" if any(plan) else "dense", squared
    )  # from here on state changes
    factor = clip_factor(norm, h["max_grad_norm"]) if h["clip"] == "reconstructed" else 1.0
    matrices = join(
        tracked, exchange.draw()
    )  # the same again: what is drawn is not kept while the payload travels
    present = bucket.present(mean)
    follow(bucket, bases, present)
    reset = resets(h, t)
    for i, (q, R) in enumerate(zip(plan, matrices, strict=True)):
        if present[i]:
            bucket.state["step"][i] += 1
            ghat = target(bucket, i, mean.parts[i] if q is None else None)
            reconstruct(ghat, mean.parts[i], q, R, factor, ops)  # line 4
            apply(bucket, i, ghat)
            if q is None and residual[i] is not None and mean.dropped is not None:
                residual[i].view(-1).copy_(mean.dropped_parts[i])
            elif q is None and residual[i] is not None and bucket.owes:
                residual[i].zero_()  # sent, or mere noise: an unbiased projection owes nothing
            if q is not None and q.beta < 1:  # line 5
                if grads[i] is not None:
                    residual[i].add_(grads[i], alpha=(1 - q.beta) * exchange.clipped)
                if mean.seed is not None:
                    own[i].sub_(
                        mean.dropped_parts[i]
                    )  # rounded on its way: what the others got of it
                p = q.of_part(own[i]).to(R.dtype)
                q.matrix(residual[i]).addmm_(p, R.t(), alpha=(q.beta - 1) * q.scale)
        if reset and residual[i] is not None:
            residual[i].zero_()
    bucket.cache["owes"] = any(plan) or (bucket.owes and not all(present))
    if exchange.found is not None:
        cosines = zip(bucket.params, mean.parts[-1].tolist(), present, plan, strict=True)
        exchange.found(
            {p: cosine for p, cosine, any_rank, q in cosines if any_rank and q is not None}
        )


class SeparateAdam(Projecting):
    r"""AdamW on gradients averaged through a random low-rank projection (SEPARATE, Algorithm 1).

    Swap it for ``torch.optim.AdamW`` in a DistributedDataParallel script; its first forward hands
    its all-reduce over.

    Args:
        params: parameters, named parameters or groups, as torch takes them. A group may override
            every option below and say ``compress=False`` or ``True``; by default tensors of at
            least 2 dimensions and 4096 elements are projected, the rest is averaged dense in the
            same message.
        lr, betas, eps, weight_decay, maximize: as in :class:`torch.optim.AdamW`.
        ratio: how many times smaller a projected tensor is on the wire. Its smaller side (the last
            dimension where rows are sharded, or fewer than 64), d long, becomes ceil(d / ratio)
            long; 1 averages dense.
        ef_beta: weight of the old error in the error feedback. "auto": the most stable, w / (1 + w)
            with w = (d + 1) / r; for orthonormal projections 0, so that nothing is ever dropped. 1:
            no error feedback. A number is taken as given, with a warning where the error would grow
            without end.
        reset_interval: steps after which the error is forgotten (None: never). "auto": 128; never
            when tracked.
        seed: the matrices follow from it, the step and the tensor's number; the same on all ranks.
        projection: "gaussian", unbiased; "orthonormal", the projection on the same space: a
            contraction; or "tracked", the projection on a space that follows the gradient's largest
            singular vectors (PowerSGD's power iteration): two smaller exchanges, one after the
            other. It keeps most of the gradient; see ``tracking``.
        rank: columns of a tracked tensor's factors; ``ratio`` says nothing then. A tensor of rows x
            columns takes rank * (rows + columns) values on the wire. Sharded rows are tracked shard
            by shard.
        adaptive: let ratio (and ef_beta, where it is a number) of every tensor follow how well it
            is reconstructed, against the mean over tensors, every ``adapt_interval`` steps
            (G-SEPARATE, Algorithm 3).
        warmup_steps: steps averaged dense before compression starts.
        max_grad_norm: clip to this L2 norm, all groups together (None: no clipping).
        clip: what is clipped. "local": each rank's gradient before it is projected; no overlap with
            backward then. "reconstructed": the averaged gradient; its norm is about sqrt(1 + w)
            times the true one, so that a norm that suits AdamW clips every step.
        payload_dtype: dtype on the wire (None: the gradient's). What rounding to a narrower one
            takes off compressed tensors is kept in ``residual``. torch.int8 sends 1 byte a value
            and a scale for each 128, rounded at random without bias.
        when: "always", or "auto": time dense and compressed steps at the start, and stay dense
            where compression does not pay (see ``stats.when``).
        process_group: the ranks to average over. None: the default group, or one process where
            there is none.

    State beside AdamW's two moments: ``residual``, the error, as large as the parameter, for
    compressed tensors; of a tracked one also ``basis``, rank * columns.

    Raises:
        ValueError: an option out of its range.
        TypeError: complex parameters, or sparse gradients at a step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        ratio: float = 16,
        ef_beta: float | Literal["auto"] = "auto",
        reset_interval: int | Literal["auto"] | None = "auto",
        seed: int = 0,
        projection: Literal["gaussian", "orthonormal", "tracked"] = "gaussian",
        rank: int = 16,
        adaptive: bool = False,
        adapt_interval: int = 2000,
        warmup_steps: int = 0,
        max_grad_norm: float | None = None,
        clip: Literal["local", "reconstructed"] = "local",
        when: Literal["always", "auto"] = "always",
        payload_dtype: torch.dtype | None = None,
        process_group: ProcessGroup | None = None,
        maximize: bool = False,
    ):
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            ratio=ratio,
            ef_beta=ef_beta,
            reset_interval=reset_interval,
            seed=seed,
            projection=projection,
            rank=rank,
            adaptive=adaptive,
            adapt_interval=adapt_interval,
            adapted=None,
            warmup_steps=warmup_steps,
            max_grad_norm=max_grad_norm,
            clip=clip,
            payload_dtype=payload_dtype,
            when=when,
        )
        super().__init__(params, defaults, process_group)

    def check_group(self, group: dict) -> None:
        check_adam(group)
        super().check_group(group)

    def state_specs(self, dtype: torch.dtype) -> dict[str, Layout]:
        return {
            "exp_avg": Dense(dtype),
            "exp_avg_sq": Dense(dtype),
            **super().state_specs(dtype),
        }

    def algorithm(self, bucket: Bucket) -> Asking[None]:
        return separate(
            bucket, self.ops, self.exchange(bucket), weakly(self.target), weakly(self.apply)
        )

    def target(self, bucket: Bucket, i: int, whole: Tensor | None) -> Tensor:
        w = bucket.weight(i)
        fits = whole is not None and whole.dtype == w.dtype
        return (whole if fits else self.ops.scratch(w, w.numel())).view(w.shape)

    def apply(self, bucket: Bucket, i: int, g: Tensor) -> None:
        m, v, step = (bucket.state[name][i] for name in ("exp_avg", "exp_avg_sq", "step"))
        self.ops.adamw(bucket.group, bucket.weight(i), g, m, v, step)
        bucket.publish(i)


class Separate(Projecting):
    """Any torch optimizer, on gradients averaged through a random low-rank projection (SEPARATE,
    Algorithm 1)::

        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = compopt.Separate(base, ratio=16)

    ``param_groups`` are the base's own, so LR schedulers act on it; ``state_dict()`` holds the
    base's under "base". While the base steps, ``p.grad`` is the averaged gradient (None where no
    rank had one); before and after it is this rank's own. A parameter group of the base may say
    ``compress``, ``ratio``, ``rank`` and ``ef_beta`` for its tensors.

    Args:
        base: an optimizer over the model's parameters; one of this package (AdamS) is stopped from
            averaging.
        ratio, ...: all other options are those of :class:`SeparateAdam`.

    State beside the base's: the residual, and the basis of tracked tensors. Not saved: one averaged
    gradient as large as the parameters.

    Raises:
        TypeError: base is no optimizer, or one that evaluates the model more than once a step
            (LBFGS).
        ValueError: base compresses by itself; an option out of its range.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        *,
        ratio: float = 16,
        ef_beta: float | Literal["auto"] = "auto",
        reset_interval: int | Literal["auto"] | None = "auto",
        seed: int = 0,
        projection: Literal["gaussian", "orthonormal", "tracked"] = "gaussian",
        rank: int = 16,
        adaptive: bool = False,
        adapt_interval: int = 2000,
        warmup_steps: int = 0,
        max_grad_norm: float | None = None,
        clip: Literal["local", "reconstructed"] = "local",
        when: Literal["always", "auto"] = "always",
        payload_dtype: torch.dtype | None = None,
        process_group: ProcessGroup | None = None,
    ):
        if not isinstance(base, torch.optim.Optimizer):
            raise TypeError(
                f"base must be a torch optimizer, got {type(base).__name__}: pass e.g. "
                "torch.optim.AdamW(...)."
            )
        if isinstance(base, torch.optim.LBFGS):
            raise TypeError(
                "base must take one gradient a step: LBFGS evaluates the model again within its "
                "step."
            )
        if getattr(base, "averaged_state", ()):
            raise ValueError(
                f"base {type(base).__name__} compresses by itself: wrap one that does not, or use "
                "it alone."
            )
        self.base = base
        self._own_groups: list[dict[str, Any]] = []
        self._own_defaults = dict(
            ratio=ratio,
            ef_beta=ef_beta,
            reset_interval=reset_interval,
            seed=seed,
            projection=projection,
            rank=rank,
            adaptive=adaptive,
            adapt_interval=adapt_interval,
            adapted=None,
            warmup_steps=warmup_steps,
            max_grad_norm=max_grad_norm,
            clip=clip,
            payload_dtype=payload_dtype,
            when=when,
            compress=None,
            step=0,
            **OPTIONS,
        )
        super().__init__(base.param_groups, base.defaults, process_group)

    def _check_defaults(self, defaults: dict[str, Any]) -> None:
        """These are the base's; ours are checked with each group."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list) -> None:
        """torch's constructor sets an empty list; the groups are the base's all the same."""

    @property
    def _option_groups(self) -> list[dict[str, Any]]:
        return self._own_groups

    @property
    def _known_options(self) -> set[str]:
        return set(self._own_defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base, and our options for it.

        All ranks must do so at the same step.
        """
        new = all(param_group is not group for group in self.param_groups)
        if new:
            self.base.add_param_group(param_group)
        group = self.param_groups[-1] if new else param_group
        names = ("param_names", "compress", "ratio", "rank", "ef_beta")
        said = {name: group[name] for name in names if name in group}
        own = {**self._own_defaults, **said, "params": group["params"]}
        try:
            self._admit(own)
        except (TypeError, ValueError):
            if new:
                self.param_groups.pop()
            raise
        self._own_groups.append(own)
        self._lay_out(own)

    def gave_way(self) -> None:
        if isinstance(self.base, CompressedOptimizer):
            self.base._engine.give_way()

    def before_layout(self) -> None:
        super().before_layout()
        if isinstance(self.base, CompressedOptimizer):
            self.base._engine.stand_alone()
        self._averages: dict[Tensor, Tensor] = {}
        self._given: dict[Tensor, Tensor] = {}

    def before_exchange(self) -> None:
        for group in self.param_groups[len(self._own_groups) :]:
            self.add_param_group(group)  # somebody gave it to the base
        super().before_exchange()

    def _specs(self, bucket: Bucket) -> dict[str, Layout]:
        specs = super()._specs(bucket)
        specs.pop("master", None)  # parameters of low precision are the base's business
        return specs

    def _settings(self) -> list:
        base = [known_of(group, self.base.defaults) for group in self.base.param_groups]
        return [*super()._settings(), {"base": type(self.base).__name__}, *base]

    def algorithm(self, bucket: Bucket) -> Asking[None]:
        return separate(
            bucket, self.ops, self.exchange(bucket), weakly(self.target), weakly(self.apply)
        )

    def target(self, bucket: Bucket, i: int, whole: Tensor | None) -> Tensor:
        p = bucket.params[i]
        if p not in self._averages:
            self._averages[p] = torch.empty_like(
                p.detach(), dtype=grad_dtype(p), memory_format=torch.contiguous_format
            )
        return local(self._averages[p])

    def apply(self, bucket: Bucket, i: int, g: Tensor) -> None:
        self._given[bucket.params[i]] = self._averages[bucket.params[i]]

    def committed(self) -> None:
        """Step the base, once, on the averaged gradients."""
        super().committed()
        mine = {p: p.grad for group in self.param_groups for p in group["params"]}
        given, self._given = self._given, {}
        try:
            for p in mine:
                p.grad = given.get(p)
            self.base.step()
        finally:
            for p, grad in mine.items():
                p.grad = grad

    def state_dict(self) -> dict[str, Any]:
        """As torch's, of our own state and options, and the base's ``state_dict()`` under "base".

        No communication.
        """
        saved = super().state_dict()
        for packed, own in zip(saved["param_groups"], self._own_groups, strict=True):
            places = packed["params"]
            packed.clear()
            packed.update({**own, "params": places, **self._signature(own)})
        return {**saved, "base": self.base.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both. A checkpoint without "base" is taken for the base's own: compression then
        starts anew.

        Raises ValueError, with nothing loaded, when it does not fit. All ranks must load.
        """
        groups = self._groups_of(state_dict)
        self._groups_of(state_dict.get("base", state_dict))
        if "base" not in state_dict and any(
            "residual" in entry for entry in state_dict["state"].values()
        ):
            raise ValueError(
                "loaded state dict has residuals but not the base optimizer's state: "
                "torch.distributed.checkpoint's get_optimizer_state_dict leaves that out. Save "
                "optimizer.state_dict() itself."
            )
        known = ("torch", type(self.base).__name__)
        if "base" not in state_dict and groups and groups[0].get("class", "torch") not in known:
            raise ValueError(
                f"loaded state dict is of {groups[0]['class']}, from which "
                f"{type(self.base).__name__} cannot go on: load one of Separate or of the base "
                "optimizer."
            )
        before = self.base.state_dict()
        self.base.load_state_dict(
            copy.deepcopy(state_dict.get("base", state_dict))
        )  # torch's would share its tensors
        if "base" not in state_dict:
            self._begin_anew()
            return
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.base.load_state_dict(before)
            raise

    def _begin_anew(self) -> None:
        """Hold nothing back, and count steps from 0, as a new optimizer does."""
        engine = self._engine
        engine.settle()
        for bucket in engine.buckets:
            for tensors in bucket.state.values():
                for tensor in tensors:
                    if tensor is not None:
                        tensor.zero_()
        for group in self._own_groups:
            group["step"] = 0
        engine.half_step, engine.consolidated = "", None
        engine.rebuild()

    def _contents(self) -> dict[str, Any]:
        contents = super()._contents()
        del contents["param_groups"]
        return {
            **contents,
            "base": self.base,
            "_own_groups": self._own_groups,
            "_own_defaults": self._own_defaults,
        }
