"""SEPARATE's reducer: matrices are sent projected, the other tensors sent dense.

``ProjectionReducer`` reduces a bucket. Each tensor is sent dense, projected on random columns, or
on tracked columns. Its part of a payload holds what this rank sends of it, and after the exchange
the average over ranks. Lines are those of SEPARATE's Algorithm 1, see ``compopt.separate``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._engine.reducer import ReduceScatterReducer
from .._ops.norms import clip_factor, scale_, stacked_squared_norms
from .._ops.operations import Ops
from .._ops.update_helpers import Factored
from .._state.buckets import Bucket
from .._state.masks import Mask
from .._state.tensors import upload
from .._wire.payload import Payload
from .._wire.requests import AllReduceMean, RequestGenerator
from .matrices import RandomMatrices
from .options import is_clipped, is_reset_step
from .projections import Projection, orthonormalize_each


@dataclass(frozen=True)
class ReducerInputs:
    """The tensors of one bucket at one step, and how they are reduced.

    ``draw_matrices`` draws R of those that are projected on random columns. ``local_factor`` clips
    the local gradient. ``norm_is_reproducible`` asks for a norm that does not depend on the number
    of threads, since every rank clips by the norm that it computes. ``params_with_basis`` are the
    parameters whose basis has been computed by a step. ``on_cosines`` receives the cosines of
    Algorithm 3 in a step that adapts to them. ``dense_reducer`` reduces what is not projected where
    the bucket is cut into shards.
    """

    tensors: Sequence[DenseTensor | ProjectedTensor]
    draw_matrices: Callable[[], RandomMatrices]
    local_factor: float
    sends_residuals: bool
    norm_is_reproducible: bool
    params_with_basis: set[Tensor]
    on_cosines: Callable[[dict[Tensor, float]], None] | None = None
    dense_reducer: ReduceScatterReducer | None = None


class ProjectionReducer:
    """Lines 1 to 5 of Algorithm 1, for all tensors of one bucket."""

    def __init__(self, bucket: Bucket, ops: Ops, inputs: ReducerInputs):
        self.bucket, self.ops, self.inputs = bucket, ops, inputs
        self.tensors, self.local_factor = inputs.tensors, inputs.local_factor
        # tensors by their index in the bucket
        pairs = [*enumerate(self.tensors)]
        self.projected = {i: x for i, x in pairs if isinstance(x, ProjectedTensor)}
        self.tracked = {i: x for i, x in pairs if isinstance(x, TrackedTensor)}
        self.next_bases: dict[int, Tensor] = {}

    @property
    def phase(self) -> str:
        return "projected" if self.projected else "dense"

    def reduce(self) -> RequestGenerator[Payload]:
        """Do lines 1 to 3. Tracked tensors exchange P first, and compute the next basis from p."""
        dense_reducer = self.inputs.dense_reducer
        if dense_reducer is not None and not self.projected:
            self.mean = yield from dense_reducer.reduce()
            return self.mean
        mean_of_P = None
        if self.tracked:
            mean_of_P = yield from self._exchange_P()
        self.draw_matrices()
        payload = self._encode(mean_of_P)
        if self.projected:  # copy what this rank sends: the all-reduce overwrites the payload
            parts = [payload.parts[i] for i in self.projected]
            memory = torch.empty_like(payload.body[: sum(map(len, parts))])
            copies = list(memory.split([len(part) for part in parts]))
            torch._foreach_copy_(copies, parts)
            for tensor, copy in zip(self.projected.values(), copies, strict=True):
                tensor.p = copy
        mean: Payload = yield AllReduceMean(payload)
        self.mean = mean
        averages = [x.projection.view_as_projected(mean.parts[i]) for i, x in self.tracked.items()]
        self.next_bases = dict(zip(self.tracked, orthonormalize_each(averages), strict=True))
        if dense_reducer is not None and dense_reducer.sent_dense:
            yield from dense_reducer.reduce()
        return mean

    def _exchange_P(self) -> RequestGenerator[Payload]:
        """Do lines 1 and 2 of ``TrackedTensor``: compute R of each. Return the averaged payload."""
        lengths = [0] * len(self.tensors)
        for i, tensor in self.tracked.items():
            lengths[i] = tensor.projection.d * tensor.projection.r
        dtype = self.bucket.group["payload_dtype"]
        payload = self.bucket.make_payload(lengths, dtype, use=1)
        self.ops.write_header(payload, self.bucket.grads())
        for i, tensor in self.tracked.items():
            P = tensor.view_as_P(payload.unrounded_parts[i])
            tensor.multiply_h(tensor.Q, P, transposed=True)
        mean: Payload = yield AllReduceMean(payload.round(), has_next=True)  # line 1
        averages = [x.view_as_P(mean.parts[i]).to(x.Q.dtype) for i, x in self.tracked.items()]
        bases = orthonormalize_each(averages)
        for tensor, R in zip(self.tracked.values(), bases, strict=True):  # line 2
            tensor.R = R
        return mean

    def draw_matrices(self) -> None:
        """Do line 2: draw R, which is valid until matrices of another bucket are drawn."""
        for tensor, R in zip(self.tensors, self.inputs.draw_matrices(), strict=True):
            if isinstance(tensor, ProjectedTensor) and R is not None:
                tensor.R = R

    def _encode(self, mean_of_P: Payload | None) -> Payload:
        """Do lines 1 and 2: make the bucket's payload.

        Its header is copied from ``mean_of_P``, on which all ranks have agreed already.
        """
        bucket, inputs = self.bucket, self.inputs
        if not self.projected and self.local_factor == 1:  # one pass, where the backend has one
            residual: list[Tensor | None] = [*bucket.state["residual"]]
            add = residual if inputs.sends_residuals else None
            return self.ops.encode(bucket, bucket.grads(), Mask(bucket), add)
        lengths = [tensor.length for tensor in self.tensors]
        if inputs.on_cosines:
            lengths.append(len(self.tensors))
        payload = bucket.make_payload(lengths, bucket.group["payload_dtype"])
        if mean_of_P is None:
            self.ops.write_header(payload, bucket.grads())
        else:
            header_length = len(payload.flat) - len(payload.body)
            payload.flat[:header_length].copy_(mean_of_P.flat[:header_length])
        for i, tensor in self.projected.items():
            tensor.multiply_h(
                tensor.R, tensor.projection.view_as_projected(payload.unrounded_parts[i])
            )
        self._write_dense_tensors(payload)
        if inputs.on_cosines:
            payload.unrounded_parts[-1].zero_()
            for i, projected in self.projected.items():
                payload.unrounded_parts[-1][i] = projected.compute_cosine(
                    payload.unrounded_parts[i]
                )
        return payload.round()

    def _write_dense_tensors(self, payload: Payload) -> None:
        pairs = zip(self.tensors, payload.unrounded_parts, strict=False)
        dense = [(tensor, part) for tensor, part in pairs if isinstance(tensor, DenseTensor)]
        with_grad = [(part, x.grad.reshape(-1)) for x, part in dense if x.grad is not None]
        if with_grad:
            parts = [part for part, _ in with_grad]
            torch._foreach_copy_(parts, [g for _, g in with_grad])
            if self.local_factor != 1:
                torch._foreach_mul_(parts, self.local_factor)
        for tensor, part in dense:
            if tensor.grad is None:
                part.zero_()
            if tensor.residual is not None and tensor.sends_residual:
                part.add_(tensor.residual.view(-1))

    def squared_norm(self) -> Tensor | None:
        """Return the squared norm of the averaged gradients, one number for each tensor; None where
        it is that of the payload.

        It is the norm before reconstruction. With a Gaussian R the mean of |h R|^2 / r is |h|^2;
        orthonormal columns give the norm of the part of h that they span.
        """
        if not self.projected:
            return None
        parts = self.mean.parts[: len(self.tensors)]
        squares = stacked_squared_norms(parts, self.inputs.norm_is_reproducible)
        scales = [
            self.projected[i].projection.scale if i in self.projected else 1.0
            for i in range(len(parts))
        ]
        if {*scales} == {1.0}:
            return squares
        return squares * upload(scales, torch.float64, self.mean.flat.device)

    # Inside FSDP2: this rank's shard of the average

    def read_owned_parts(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Do line 4 for the rows that this rank owns."""
        self.draw_matrices()
        reducer = self.inputs.dense_reducer
        dense_parts = iter(() if reducer is None else reducer.read_owned_parts(dtype))
        for i in range(len(self.tensors)):
            if i in self.projected:
                start, stop = self.bucket.shards.own_ranges[i]
                tensor, width = self.projected[i], self.projected[i].projection.columns
                rows = tensor.reconstruct_rows(self.mean.parts[i], start // width, stop // width)
                yield rows.reshape(-1)
            else:
                yield next(dense_parts)

    def feed_back(self, have_gradients: list[bool]) -> None:
        """Do line 5, without a clip of the average."""
        reducer = self.inputs.dense_reducer
        if reducer is not None and reducer.sent_dense:
            reducer.feed_back(have_gradients)
        for i, tensor in self.projected.items():
            if have_gradients[i]:
                tensor.feed_back(self.mean, i, 1.0)

    def next_state(self, i: int) -> dict[str, Tensor]:
        return {"basis": self.next_bases[i]} if i in self.next_bases else {}

    # Under DDP: the commit of unsharded tensors

    def clip_factor(self, norm: float) -> float:
        """Return the factor that clips the averaged gradient."""
        group = self.bucket.group
        return clip_factor(norm, group["max_grad_norm"]) if is_clipped(group, "average") else 1.0

    def commit_state(self, have_gradients: list[bool], factor: float) -> None:
        """Reset residuals where they are due, store the next bases, and report the cosines."""
        bucket, group = self.bucket, self.bucket.group
        if is_reset_step(group, group["step"] + 1):
            bucket.flat["residual"].zero_()
        updated = [i for i in self.next_bases if have_gradients[i]]
        if updated:
            state = [bucket.state["basis"][i].view(self.next_bases[i].shape) for i in updated]
            torch._foreach_copy_(state, [self.next_bases[i] for i in updated])
            self.inputs.params_with_basis.update(bucket.model_params[i] for i in updated)
        remains = not all(have_gradients) or (self.inputs.sends_residuals and factor != 1)
        bucket.cache["has_residual"] = bool(self.projected) or (bucket.has_residual and remains)
        if self.inputs.on_cosines:
            cosines = self.mean.parts[-1].tolist()  # means over ranks
            self.inputs.on_cosines(
                {bucket.params[i]: cosines[i] for i in self.projected if have_gradients[i]}
            )

    # For fused implementations of lines 4 and 5 with AdamW (see ``_ops.update_helpers``)

    @property
    def has_factors(self) -> bool:
        """True where every averaged gradient is dense, or a product of narrow matrices."""
        return len(self.projected) == len(self.tracked)

    def list_factored(self, mean: Payload, indices: Sequence[int]) -> list[Factored]:
        factored = []
        for i in (i for i in indices if i in self.tracked):
            x = self.tracked[i]
            rows, columns = x.projection.rows, x.projection.columns
            errors = None if mean.seed is None else mean.rounding_error_parts[i]
            factored.append(Factored(i, rows, columns, x.R, mean.parts[i], x.p, errors))
        return factored

    def list_dense(self, indices: Sequence[int]) -> list[int]:
        return [i for i in indices if i not in self.projected]

    def feed_back_dense(self, i: int, mean: Payload, factor: float) -> None:
        self.tensors[i].feed_back(mean, i, factor)

    def error_share(self, factor: float) -> float:
        shares = [1 - tensor.projection.beta for tensor in self.tracked.values()]
        return factor * shares[0] if shares else 0.0


# One tensor at one step


@dataclass
class DenseTensor:
    """A tensor whose gradient is averaged dense.

    ``residual`` is what earlier steps, projected or rounded, have not sent (None: nothing ever
    remains); it may be non-zero only where ``has_residual``. ``sends_residual`` is false for the
    noise of an unbiased projection, which is not worth sending. ``local_factor`` clips the local
    gradient.
    """

    grad: Tensor | None
    residual: Tensor | None
    local_factor: float = 1.0
    length: int = 0
    has_residual: bool = False
    sends_residual: bool = False

    def average_in(self, part: Tensor) -> Tensor | None:
        """Return memory that already holds the averaged gradient, if any."""
        return part

    def reconstruct(self, part: Tensor, factor: float, out: Tensor) -> Tensor:
        """Write ``factor`` times the averaged gradient to ``out``, which may be ``part``."""
        if out.data_ptr() != part.data_ptr():
            out.view(-1).copy_(part)
        scale_(out, factor)
        return out

    def feed_back(self, mean: Payload, i: int, factor: float) -> None:
        """Set the residual to the rounding error of this rank's payload.

        ``factor`` has clipped the average. Of the old residual 1 - ``factor`` stays; of the new
        rounding error ``factor`` is added.
        """
        if self.residual is None or not (self.has_residual or mean.rounding_errors is not None):
            return
        self.residual.mul_(1 - factor if self.sends_residual else 0.0)
        if mean.rounding_errors is not None:
            self.residual.view(-1).add_(mean.rounding_error_parts[i], alpha=factor)


@dataclass
class ProjectedTensor:
    """A tensor of which p_n = h_n R is averaged: SEPARATE's lines 1, 2, 4 and 5 for one matrix.

    ``residual`` is e_n, ``projection`` gives R its shape, ``local_factor`` clips the local
    gradient. ``R`` is drawn again before each use; ``p`` is a copy of what this rank sends.
    """

    grad: Tensor | None
    residual: Tensor
    local_factor: float
    projection: Projection
    ops: Ops
    R: Tensor = field(init=False)
    p: Tensor = field(init=False)

    @property
    def length(self) -> int:
        return self.projection.m * self.projection.r

    def multiply_h(self, right: Tensor, out: Tensor, transposed: bool = False) -> None:
        """Do lines 1 and 2: write ``h right``, or ``h^T right``, to ``out``, with h = e + g.

        ``out`` may be of another dtype.
        """
        projection, e, g = self.projection, self.residual, self.grad
        if adds_products(e) and (g is None or g.dtype == e.dtype == out.dtype):
            terms = [(projection.view_as_matrix(e), 1.0)]
            if g is not None:
                terms.append((projection.view_as_matrix(g.contiguous()), self.local_factor))
        else:
            h = self.ops.scratch(e, e.numel()).view(e.shape)
            if g is None:
                h.copy_(e)
            else:
                torch.add(e, g, alpha=self.local_factor, out=h)
            terms = [(projection.view_as_matrix(h), 1.0)]
        for n, (matrix, factor) in enumerate(terms):
            matrix = matrix.t() if transposed else matrix
            for R, rows, out_rows in projection.iterate_blocks(right, matrix, out):
                if n > 0:
                    add_product_(out_rows, rows, R, factor)
                elif out.dtype == R.dtype:
                    torch.matmul(rows, R, out=out_rows)
                else:
                    out_rows.copy_(rows @ R)

    def compute_cosine(self, part: Tensor) -> Tensor | float:
        """Return the cosine between the local gradient and its reconstruction (Algorithm 3)."""
        projection, R = self.projection, self.R
        if self.grad is None:
            return 0.0
        g = projection.view_as_matrix(self.grad.contiguous()).to(R.dtype)
        ghat = self._expand(projection.view_as_projected(part).to(R.dtype), R, torch.empty_like(g))
        lengths = torch.linalg.vector_norm(g) * torch.linalg.vector_norm(ghat)
        cosine: Tensor = (g * ghat).sum() / lengths.clamp_min(torch.finfo(R.dtype).tiny)
        return cosine

    def average_in(self, part: Tensor) -> Tensor | None:
        return None  # it exists only as a reconstruction

    def reconstruct(self, part: Tensor, factor: float, out: Tensor) -> Tensor:
        """Do line 4: write ``factor`` times the averaged gradient to ``out``."""
        projection, R = self.projection, self.R
        p = projection.view_as_projected(part).to(R.dtype) * (projection.scale * factor)
        if out.dtype == R.dtype:
            self._expand(p, R, projection.view_as_matrix(out))
            return out
        wide = self.ops.scratch(R, out.numel()).view(out.shape)
        self._expand(p, R, projection.view_as_matrix(wide))
        return out.copy_(wide)

    def reconstruct_rows(self, part: Tensor, first: int, last: int) -> Tensor:
        """Do line 4 for some rows of the tensor as a matrix."""
        projection, R = self.projection, self.R
        p = projection.view_as_projected(part).to(R.dtype)
        if projection.transposes:
            rows = R.new_empty(last - first, projection.m)
            self._expand(p, R[..., first:last, :], rows.t())
            return rows.mul_(projection.scale)
        height = projection.block_height
        if height is None:
            p, first, last = p[first:last], 0, last - first
        else:  # only the blocks that contain these rows
            begin, end = first // height, math.ceil(last / height)
            R, p = R[begin:end], p[begin * height : end * height]
            first, last = first - begin * height, last - begin * height
        blocks = self._expand(p, R, R.new_empty(len(p), projection.d))
        return blocks[first:last].mul_(projection.scale)

    def _expand(self, p: Tensor, R: Tensor, out: Tensor) -> Tensor:
        """Write ``p R^T`` to ``out``."""
        for matrix, rows, out_rows in self.projection.iterate_blocks(R, p, out):
            torch.matmul(rows, matrix.mT, out=out_rows)
        return out

    def feed_back(self, mean: Payload, i: int, factor: float) -> None:
        """Line 5: e <- beta e + (1 - beta) (g + e - p R^T / r) = e + (1 - beta) (g - p R^T / r).

        p is what the other ranks received from this one, after rounding. Where the average was
        clipped by ``factor``, only that share of the new error is taken.
        """
        e, g, projection, R = self.residual, self.grad, self.projection, self.R
        if projection.beta == 1:
            return
        new = (1 - projection.beta) * factor
        if mean.seed is not None:
            self.p.sub_(mean.rounding_error_parts[i])
        p = projection.view_as_projected(self.p).to(R.dtype)
        if g is not None:
            e.add_(g, alpha=new * self.local_factor)
        for matrix, rows, e_rows in projection.iterate_blocks(R, p, projection.view_as_matrix(e)):
            add_product_(e_rows, rows, matrix.mT, -new * projection.scale)


@dataclass
class TrackedTensor(ProjectedTensor):
    """A tensor that is projected on columns which follow its gradient.

    The projection is PowerSGD's power iteration (Vogels, Karimireddy and Jaggi, NeurIPS 2019,
    Algorithm 1). H_n, the gradient plus residual of rank n, is (d, m) here: the transpose of the
    matrix that ``Projection`` calls H. Q, (m, r), is the basis of the step before::

        1  P <- mean over ranks of H_n Q
        2  R <- orthonormal columns that span those of P
        3  p_n <- H_n^T R;  p <- mean over ranks of p_n         # SEPARATE, on H_n^T, with this R
        4  Hhat <- R p^T;  the residual is H_n - R p_n^T
        5  Q <- orthonormal columns that span those of p

    The space that is sent follows the gradient's largest singular vectors, one power iteration a
    step. R is the same on all ranks, since P is. The mean of the residuals is exact for any R, so P
    may be sent as int8 like p.

    Two things differ from the paper. The residual is what the rank itself has not sent, instead of
    its distance from the average; the mean is the same, and it does not grow. Q is orthonormal, so
    that the columns of P differ in size by singular values instead of their squares, and int8
    keeps the small ones.
    """

    Q: Tensor

    def view_as_P(self, part: Tensor) -> Tensor:
        """View a part of the first payload as P, (d, r); it is stored by columns."""
        return part.view(self.projection.r, self.projection.d).t()


def adds_products(e: Tensor) -> bool:
    """True where multiplying e and g and adding the products beats writing and reading e + g."""
    return e.device.type != "cpu"


def add_product_(x: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """Add ``factor * a b`` to ``x``; all are matrices, or stacks of matrices."""
    if x.dim() == 2:
        x.addmm_(a, b, alpha=factor)
    else:
        x.baddbmm_(a, b, alpha=factor)
