"""SEPARATE: a simple low-rank projection for gradient compression, Algorithms 1 and 3, around any
torch optimizer.

One matrix of m rows and d columns on rank n at step t; g_n is its local gradient, e_n its
residual::

    1  h_n <- g_n + e_n
    2  R <- a Gaussian d x r matrix from (seed, t, tensor), r = ceil(d / ratio);  p_n <- h_n R
    3  p <- mean over ranks of p_n
    4  ghat <- p R^T / r                                       # to the base optimizer
    5  e_n <- beta e_n + (1 - beta) (h_n - p_n R^T / r);  e_n <- 0 when t % reset_interval == 0

With ``projection="tracked"`` R is replaced by orthonormal columns that follow the gradient, and 1/r
by 1, which needs one more exchange.
Lines 1, 2, 4 and 5 of a stack of matrices are in ``stacks.py``; Algorithm 3 (ratios that adapt) is
in ``projecting_optimizer.py``.

Differences from the paper: beta weights the *old* error. As printed it weights the new one, and
with w = (d + 1) / r, about the ratio, the squared error then grows in each step by the factor
beta_old^2 + (1 - beta_old)^2 w: without bound at the paper's own settings. Weighting the old error
is stable for beta > (w - 1) / (w + 1), and the error is least at w / (1 + w), "auto". The smaller
side of a tensor is projected, and there may be a dense start of ``dense_steps``.

All rows of a matrix share one R, where the paper draws a vector as long as the whole gradient for
every number it sends. This sends equally many numbers with the same mean squared error, and draws m
times fewer. But the error lies in the gradient's column space, so Lemma 4.2 does not hold. For a
gradient of rank 1, 16 x 128 at ratio 16, the squared error along one direction of the same column
space is .125 |g|^2; with one vector per number it is .008, and the lemma's bound is 3 / 128 = .023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._engine.options import (
    TRIAL_OPTIONS,
    Group,
    ResidualDtype,
    TorchOptions,
    check_adam,
    check_torch_options,
    read_int8,
)
from .._engine.reducer import AdamWUpdate, Update, write_averages
from .._fsdp.fsdp_backward import GatherDtype, step_fsdp_shards
from .._inside.bases import OneOrSeveral
from .._inside.wrapper import Wrapper
from .._ops.norms import clip_factor, scale_all_
from .._ops.operations import Ops
from .._state.bucket import Bucket
from .._state.layouts import Layout, LocalShape
from .._wire.groups import ProcessGroup, Ranks
from .._wire.payload import PayloadDtype
from .._wire.requests import Agree, RequestGenerator
from .projecting_optimizer import ProjectingOptimizer
from .projection_options import check_group_sizes, resolve_options
from .projection_reducer import ProjectionReducer
from .stacks import keep_unsent_of_stack, reconstruct

if TYPE_CHECKING:
    from typing_extensions import Unpack


def separate(
    bucket: Bucket, ops: Ops, reducer: ProjectionReducer, update: Update
) -> RequestGenerator[None]:
    """Algorithm 1, one bucket, one step; ``update`` takes the averaged gradients."""
    mean = yield from reducer.reduce()  # lines 1 to 3
    squared, drop_absent = reducer.squared_norm, reducer.drop_absent
    norm = yield Agree(mean, reducer.phase, squared, drop_absent=drop_absent)

    # from here on state changes
    reducer.draw_random_columns()  # again: what is random is not kept in between
    factor = clip_factor(norm, bucket.group["max_grad_norm"])
    have_gradients = mean.have_gradients
    inputs = reducer, update, have_gradients, factor
    if isinstance(update, AdamWUpdate):  # fused implementations know AdamW only
        yield from ops.run_batched(update_tensors, bucket, *inputs)  # lines 4 and 5
    else:
        update_tensors(bucket, ops, *inputs)
    reducer.commit_state(have_gradients, factor)


def update_tensors(
    bucket: Bucket,
    ops: Ops,
    reducer: ProjectionReducer,
    update: Update,
    have_gradients: list[bool],
    factor: float,
) -> None:
    """Do lines 4 and 5 and the update for all tensors with a gradient on any rank."""
    mean, dense = reducer.mean, [i for i in reducer.dense if have_gradients[i]]
    bucket.count_steps(have_gradients)
    for stack in reducer.stacks_with_gradients(have_gradients):
        ghat = update.memory_for_stack(bucket, stack.indices)
        reconstruct(ops, stack, factor, ghat)  # line 4
        update.apply(bucket, [*stack.indices], [*ghat.unbind()])
        keep_unsent_of_stack(stack, factor)  # line 5
    if dense:
        parts = [mean.parts[i] for i in dense]
        averages = write_averages(update.memory_for(bucket, dense, parts), parts)
        scale_all_(averages, factor)
        update.apply(bucket, dense, averages)
        reducer.keep_unsent_dense(dense, mean, factor)


def choose_generator(
    optimizer: SeparateAdam | Separate, bucket: Bucket, update: Update
) -> RequestGenerator[None]:
    """Return the generator that steps a bucket: Algorithm 1, or the step inside FSDP2."""
    ops, fsdp_backward = optimizer.ops, optimizer.fsdp_backward
    if fsdp_backward is None:
        return separate(bucket, ops, optimizer.make_reducer(bucket), update)
    norm_factors = optimizer.squared_norm_factors(bucket)
    return step_fsdp_shards(bucket, ops, fsdp_backward, update, norm_factors)


class SeparateAdam(ProjectingOptimizer):
    r"""AdamW on gradients averaged through a low-rank projection (SEPARATE, Algorithm 1).

    It replaces ``torch.optim.AdamW`` in a DistributedDataParallel script; at the first forward pass
    it takes over from DDP's all-reduce. If ``fully_shard`` shards the parameters over these ranks,
    it replaces FSDP2's reduce-scatter (docs/fsdp.md).

    Args:
        params: parameters, named parameters or groups, as torch takes them. A group may override
            every option below and say ``compress=False`` or ``True``; by default tensors of at
            least 2 dimensions and 4096 elements are projected, the others are averaged dense in the
            same message.
        lr, betas, eps, weight_decay, maximize: as in :class:`torch.optim.AdamW`, with its defaults.
            The paper trains GPT-2 345M with lr 6e-4, betas (0.9, 0.95), weight_decay 0.1.
        amsgrad, torch_options: ``foreach``, ``fused`` and ``capturable`` are ignored: the backend
            decides how to compute. ``amsgrad=True`` and ``differentiable=True`` are refused.
        projection: "tracked": onto a space that follows the gradient's largest singular vectors
            (PowerSGD's power iteration), in two smaller exchanges, one after the other. It keeps
            most of the gradient. "gaussian": the paper's, random and unbiased.
        rank: columns of a tracked tensor's factors (None: 16). A tensor of rows x columns sends
            rank * (rows + columns) values. Sharded rows are tracked shard by shard. Changed in a
            parameter group during a run, on all ranks, it begins with new bases. Random projections
            refuse it.
        ratio: the factor by which a random projection makes a tensor smaller (None: 16). Its
            smaller side (the last dimension where rows are sharded, or fewer than 64) shrinks from
            d to ceil(d / ratio); 1 averages dense. Tracked projections refuse it.
        ef_beta: weight of the old error in the error feedback. "auto": the most stable, w / (1 + w)
            with w = (d + 1) / r; 0 for tracked projections, which then drop nothing. 1: no error
            feedback. A warning says if the error would grow without bound.
        reset_interval: steps after which the error is set to 0 (None: never). "auto": 128; never
            when tracked.
        seed: determines the matrices, with the step and the tensor's number; equal on all ranks.
        adaptive: every ``adapt_interval`` steps, adapt the ratio of every tensor (and its ef_beta,
            if that is a number) to the quality of its reconstruction, relative to the mean over
            tensors (G-SEPARATE, Algorithm 3).
        dense_steps: steps averaged dense before compression starts. None: 10 for tracked
            projections, else none; there 15 % of the run is a good start. Tracked, 400 steps of a
            GPT of 0.86 M parameters ended at 1.018 times AdamW's loss without a start, 1.016 after
            10 steps, 1.017 after 50.
        when, process_group, simulate: as in :class:`RadiusAdamW`.
        max_grad_norm: clip the average over ranks of gradient and error to this L2 norm, all groups
            together, inside the step (None: no clipping). Its norm is computed from the payload: a
            Gaussian projection gives an unbiased estimate, ``|p|^2 / r``; tracked columns give the
            norm of the part they span, which is smaller. ``stats.grad_norm`` is that number.
        payload_dtype: as in :class:`RadiusAdamW`; "auto": int8 for tracked projections, else the
            gradient's.
        gather_dtype: "int8": FSDP2 gathers matrices, embeddings too, in int8, with a scale for each
            128 values, rounded to the nearest. All ranks compute with the rounded values; the
            shards that are updated are not rounded (docs/fsdp.md). None: gathered as FSDP2 does.
        residual_dtype: what ``residual`` is stored in between steps. "int8": blocks of 128 values
            with a scale each, rounded at random without bias, 1.03 bytes per element in place of 4;
            a step takes longer. A checkpoint has float32 either way, and loads into both.

    State beside AdamW's two moments, for compressed tensors: ``residual``, the error, as large as
    the parameter; for tracked ones also ``basis``, rank * columns.

    Raises:
        ValueError: an option is out of its range.
        TypeError: complex parameters, or sparse gradients at a step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        ratio: float | None = None,
        ef_beta: float | Literal["auto"] = "auto",
        reset_interval: int | Literal["auto"] | None = "auto",
        seed: int = 0,
        projection: Literal["gaussian", "tracked"] = "tracked",
        rank: int | None = None,
        adaptive: bool = False,
        adapt_interval: int = 2000,
        dense_steps: int | None = None,
        max_grad_norm: float | None = None,
        when: Literal["always", "auto"] = "always",
        payload_dtype: PayloadDtype | Literal["auto"] = "auto",
        gather_dtype: GatherDtype = None,
        residual_dtype: ResidualDtype = None,
        process_group: ProcessGroup | Ranks | None = None,
        simulate: bool = False,
        maximize: bool = False,
        **torch_options: Unpack[TorchOptions],
    ):
        check_torch_options(type(self), amsgrad, torch_options)
        self.residual_dtype = read_int8("residual_dtype", residual_dtype)
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            **resolve_options(projection, ratio, rank, payload_dtype, dense_steps),
            ef_beta=ef_beta,
            reset_interval=reset_interval,
            seed=seed,
            adaptive=adaptive,
            adapt_interval=adapt_interval,
            adapted=None,
            max_grad_norm=max_grad_norm,
            when=when,
        )
        self.gather_dtype = read_int8("gather_dtype", gather_dtype)
        super().__init__(params, defaults, process_group, simulate)

    def add_param_group(self, param_group: Group) -> None:
        check_group_sizes(param_group, self.defaults)
        super().add_param_group(param_group)

    def check_group(self, group: Group) -> None:
        check_adam(group)
        super().check_group(group)

    def state_layouts(self, dtype: torch.dtype) -> dict[str, Layout]:
        return {
            "exp_avg": LocalShape(dtype),
            "exp_avg_sq": LocalShape(dtype),
            **super().state_layouts(dtype),
        }

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        # of the current backend: ranks may fall back to PyTorch's
        return choose_generator(self, bucket, AdamWUpdate(self.ops))


class Separate(Wrapper, ProjectingOptimizer):
    """Any torch optimizer, on gradients averaged through a low-rank projection (SEPARATE,
    Algorithm 1)::

        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = compopt.Separate(sgd)

    ``param_groups`` are the base's own, so LR schedulers act on it; ``state_dict()`` holds the
    base's under "base". While the base steps, ``p.grad`` is the averaged gradient (None where no
    rank had one); before and after it is this rank's own. A parameter group of the base may say
    ``compopt_compress``, ``compopt_ratio``, ``compopt_rank`` and ``compopt_ef_beta`` for its
    tensors.

    Args:
        base: an optimizer over the model's parameters, or a list of several over disjoint ones; one
            of this package (AdamS) does not average any more.
        ratio, ...: all other options are those of :class:`SeparateAdam`.

    State beside the base's: the residual, and the basis of tracked tensors. Memory that is not
    saved: one averaged gradient as large as the parameters.

    Raises:
        TypeError: base is no optimizer, or evaluates the model more than once per step (LBFGS).
        ValueError: base compresses by itself; two of several have the same parameters; an option is
            out of its range.
    """

    options_in_base = ("compress", "ratio", "rank", "ef_beta")

    def __init__(
        self,
        base: OneOrSeveral,
        *,
        ratio: float | None = None,
        ef_beta: float | Literal["auto"] = "auto",
        reset_interval: int | Literal["auto"] | None = "auto",
        seed: int = 0,
        projection: Literal["gaussian", "tracked"] = "tracked",
        rank: int | None = None,
        adaptive: bool = False,
        adapt_interval: int = 2000,
        dense_steps: int | None = None,
        max_grad_norm: float | None = None,
        when: Literal["always", "auto"] = "always",
        payload_dtype: PayloadDtype | Literal["auto"] = "auto",
        gather_dtype: GatherDtype = None,
        residual_dtype: ResidualDtype = None,
        process_group: ProcessGroup | Ranks | None = None,
        simulate: bool = False,
    ):
        self.residual_dtype = read_int8("residual_dtype", residual_dtype)
        options = dict(
            **resolve_options(projection, ratio, rank, payload_dtype, dense_steps),
            ef_beta=ef_beta,
            reset_interval=reset_interval,
            seed=seed,
            adaptive=adaptive,
            adapt_interval=adapt_interval,
            max_grad_norm=max_grad_norm,
            when=when,
        )
        self.gather_dtype = read_int8("gather_dtype", gather_dtype)
        super().__init__(
            base, {**options, "adapted": None, **TRIAL_OPTIONS}, process_group, simulate
        )

    def _options_for(self, group: Group) -> Group:
        check_group_sizes(self._select_options(group), self._wrapper_defaults)
        return super()._options_for(group)

    def algorithm(self, bucket: Bucket) -> RequestGenerator[None]:
        return choose_generator(self, bucket, self._update)
