"""The C passes of tracked columns (kernels/native/lowrank.c) beside the end of every tile, against their references."""

from __future__ import annotations

import pytest
import torch
from sim import Ranks
from table import projecting
from torch import nn

import compopt
from compopt._backends.native import library
from compopt._backends.native.native_lowrank import multiply_stacks, orthonormalize_columns, update_separate
from compopt._backends.native.native_lowrank import write_dense as native_write_dense
from compopt._backends.native.native_ops import NativeOps
from compopt._engine.reducer import AdamWUpdate
from compopt._ops.operations import Ops
from compopt._state.residuals import Residuals
from compopt._wire.payload import Payload
from compopt.separate.projection_reducer import ProjectionReducer, write_dense
from compopt.separate.projections import Projection
from compopt.separate.separate import update_tensors
from compopt.separate.stacks import ProjectedStack, multiply

pytestmark = pytest.mark.skipif(not library.find_objects(), reason="needs the compiled passes")
RANKS = (1, 3, 4, 16, 17, 33, 64, 65, 130)  # steps of 16 columns; 64 of them are summed at once
SHAPES = [(1, 1), (1, 300), (300, 1), (5, 7), (8, 16), (9, 31), (16, 256), (19, 257), (33, 529)]
ISAS = [isa for isa in ("avx512", "avx2", "neon", "portable") if isa in library.list_isas()]


class Tensors:
    """A bucket with two tensors of every shape and r, a stack each, and a vector; numbers of a step of them.

    Of every fifth tensor this rank has no gradient, and of every seventh none has.
    """

    def __init__(self, ops: Ops, payload_dtype: object = None, beta: float = 0.0, **options):
        random = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        shapes = [(17,)] + [shape for shape in SHAPES for _ in range(2 * len(RANKS))]
        params = [nn.Parameter(randn(*shape)) for shape in reversed(shapes)]
        for i, p in enumerate(params):
            p.grad = None if i % 5 == 4 else randn(*p.shape)
        groups = [{"params": params, "compress": True}]
        optimizer = compopt.SeparateAdam(groups, lr=0.1, payload_dtype=payload_dtype, **options)
        (bucket,) = optimizer._buckets
        self.bucket, self.ops, self.optimizer = bucket, ops, optimizer
        assert [tuple(p.shape) for p in bucket.params] == shapes
        for name in ("exp_avg", "exp_avg_sq", "residual"):
            bucket.flat[name].copy_(randn(len(bucket.flat[name]))).abs_()
        bucket.step_counts.copy_(torch.arange(len(params)) % 3)
        self.stacks = []
        for n in range((len(params) - 1) // 2):
            (rows, columns), r, indices = SHAPES[n // len(RANKS)], RANKS[n % len(RANKS)], range(2 * n + 1, 2 * n + 3)
            projection = Projection(rows, columns, True, columns, rows, r, "tracked", beta)
            grads, residual = bucket.grads()[indices.start : indices.stop], Residuals(bucket).stack(indices)
            stack = ProjectedStack(indices, projection, grads, residual, Q=randn(2, columns, r), R=randn(2, rows, r))
            stack.sent = randn(2 * columns * r)
            self.stacks.append(stack)
        lengths = [17, *(stack.projection.m * stack.projection.r for stack in self.stacks for _ in range(2))]
        self.mean = bucket.make_payload(lengths, bucket.group["payload_dtype"])
        self.mean.flat.copy_(randn(len(self.mean.flat)))
        if self.mean.rounding_errors is not None:
            self.mean.rounding_errors.copy_(0.1 * randn(len(self.mean.rounding_errors)))
        self.reducer = ProjectionReducer(bucket, ops, self.stacks, lambda stacks: None, False, set())
        self.reducer.mean = self.mean
        for stack, part in zip(self.stacks, self.reducer._parts_of(self.mean, self.mean.body), strict=True):
            stack.mean = part

    def products(self, function, makes_P: bool, payload: Payload | None = None) -> list[torch.Tensor]:
        sizes = [(x.projection.d if makes_P else x.projection.m, x.projection.r) for x in self.stacks]
        out = [torch.full((2 * r * n,), torch.nan) for n, r in sizes]
        right = [x.Q if makes_P else x.R for x in self.stacks]
        function(self.bucket, self.ops, self.stacks, right, out, makes_P, payload)
        return out

    def stepped(self, function, factor: float) -> dict[str, torch.Tensor]:
        have = [i % 7 != 3 for i in range(len(self.bucket.params))]
        function(self.bucket, self.ops, self.reducer, AdamWUpdate(self.ops), have, factor)
        state = {name: self.bucket.flat[name] for name in ("exp_avg", "exp_avg_sq", "residual")}
        weights = torch.cat([p.detach().view(-1) for p in self.bucket.params])
        return {**state, "weights": weights, "step": self.bucket.step_counts}


@pytest.mark.parametrize("makes_P", [True, False])
def test_products_are_those_of_the_reference(makes_P):
    """Also where a gradient is absent, and nothing is read or written beside a product."""
    ours = Tensors(NativeOps()).products(multiply_stacks, makes_P)
    theirs = Tensors(Ops()).products(multiply, makes_P)
    for p, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-4, atol=1e-4)


def test_gradients_are_marked_as_by_the_reference():
    """NaN, infinity, an element whose square overflows, many whose squares do; at the end of a tensor too."""
    tensors, reference = Tensors(NativeOps()), Tensors(Ops())
    for n, bad in enumerate([torch.nan, torch.inf, 1e20, 1e18]):
        for x in (tensors, reference):
            for i in range(3 * n, len(x.bucket.params), 13):
                g = x.bucket.params[i].grad
                if g is not None and g.numel() > 1:  # torch squares no single element
                    g.view(-1)[-(n % 2)] = bad
    for x, function in ((tensors, multiply_stacks), (reference, multiply)):
        x.products(function, True, x.mean)
    marks, wanted = tensors.mean.header, reference.mean.header
    assert wanted.isnan().sum() > 10 and (wanted == 0).sum() > 10 and (wanted == 1).sum() > 10
    torch.testing.assert_close(marks, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("adds", [False, True])
def test_dense_tensors_are_written_as_by_the_reference(adds):
    """To their places alone, also where this rank has no gradient."""
    results = []
    for ops, function in ((NativeOps(), native_write_dense), (Ops(), write_dense)):
        bucket = Tensors(ops).bucket
        indices = [i for i in range(len(bucket.params)) if i % 3 != 1]
        lengths = [n if i % 3 != 1 else 2 for i, n in enumerate(bucket.lengths)]
        memory = torch.full((sum(lengths) + 5,), torch.nan)
        function(bucket, ops, memory, lengths, indices, adds)
        results.append(memory)
    assert results[0].isnan().sum() == 5 + 2 * (len(bucket.params) - len(indices))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


CASES = {
    "float32": ({}, 1.0),
    "clipped": ({"maximize": True}, 0.25),
    "int8": ({"payload_dtype": torch.int8}, 1.0),
    "int4, clipped": ({"payload_dtype": "int4", "weight_decay": 0.5, "betas": (0.5, 0.9)}, 0.5),
    "bfloat16": ({"payload_dtype": torch.bfloat16, "maximize": True}, 1.0),
    "part of the old error is kept": ({"payload_dtype": "int8", "beta": 0.75, "eps": 0.1}, 1.0),
    "no error feedback": ({"payload_dtype": "int8", "beta": 1.0}, 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_the_reference(case):
    options, factor = CASES[case]
    ours = Tensors(NativeOps(), **options).stepped(update_separate, factor)
    theirs = Tensors(Ops(), **options).stepped(update_tensors, factor)
    for name, wanted in theirs.items():
        torch.testing.assert_close(ours[name], wanted, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: name + text)


def test_rows_that_are_kept_between_steps_follow_state_that_moves_and_other_tensors():
    """A second step with state in other memory, and a third in which other tensors have gradients."""
    results = []
    for ops, function in ((NativeOps(), update_separate), (Ops(), update_tensors)):
        tensors = Tensors(ops)
        tensors.stepped(function, 1.0)
        for name in ("exp_avg", "exp_avg_sq"):
            tensors.bucket._use_storage(name, tensors.bucket.flat[name].clone())
        tensors.stepped(function, 1.0)
        have = [i % 5 != 2 for i in range(len(tensors.bucket.params))]
        function(tensors.bucket, ops, tensors.reducer, AdamWUpdate(ops), have, 1.0)
        results.append(tensors.stepped(function, 1.0))
    for name, wanted in results[1].items():
        torch.testing.assert_close(
            results[0][name], wanted, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: name + text
        )


def bits(monkeypatch, isa: str) -> dict[str, torch.Tensor]:
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", isa)
    ops = NativeOps()
    assert ops.isa == isa
    tensors = Tensors(ops, payload_dtype="int8")
    products = {
        str(flag): torch.cat([p.reshape(-1) for p in tensors.products(multiply_stacks, flag)]) for flag in (0, 1)
    }
    return products | tensors.stepped(update_separate, 0.5)


@pytest.mark.parametrize("isa", ISAS)
def test_every_processor_computes_the_same_bits_on_any_number_of_threads(monkeypatch, isa):
    wanted = bits(monkeypatch, "portable")
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            for name, ours in bits(monkeypatch, isa).items():
                assert torch.equal(ours, wanted[name]), (name, threads)
        finally:
            torch.set_num_threads(1)


class Net(nn.Module):
    """Matrices of odd sizes, in stacks and alone; a convolution; one without gradients; a matrix of few rows."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(67, 131), (35,), (67, 131), (130, 150), (24, 9, 3, 3), (150, 130), (67, 131), (3, 300)]
        self.many = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.many.append(nn.Parameter(torch.randn(90, 80).t()))  # its memory is not in order: torch's operators
        self.unused = nn.Parameter(torch.randn(67, 131))


def loss(model: Net, rank: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1 + 10 * step + rank)
    used = [p for i, p in enumerate(model.many) if (i + rank) % 4 or step != 2]  # on one rank or on none
    return sum(((p - torch.randn(p.shape, generator=random)) ** 2).sum() for p in used)


RUNS = [
    {"rank": 1},
    {"rank": 17, "max_grad_norm": 5.0},
    {"rank": 65, "max_grad_norm": 5.0},
    {"rank": 33, "maximize": True, "ef_beta": 0.5},
    {"rank": 3, "payload_dtype": torch.bfloat16},
    {"rank": 4, "payload_dtype": torch.float64},
]


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_runs_are_those_of_the_reference(monkeypatch, options):
    worlds = []
    for backend in ("native", "torch"):
        monkeypatch.setenv("COMPOPT_BACKEND", backend)

        def make(params, **more):
            return compopt.SeparateAdam(params, lr=1e-2, **projecting("tracked", dense_steps=1, **options), **more)

        world = Ranks(2, Net, make)
        world.train(loss, 5)
        world.assert_replicas_equal()
        assert world.optimizers[0].stats.phase == "projected" and world.optimizers[0].backend == backend
        worlds.append(world)
    tolerance = 1e-2 if options.get("payload_dtype") == torch.bfloat16 else 1e-3
    for p, q in zip(*(world.models[0].parameters() for world in worlds), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_another_precision_are_taken_or_left_to_torch(dtype):
    p = nn.Parameter(torch.randn(64, 80))
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch keeps gradients in the parameter's precision")
    p.grad_dtype = dtype
    optimizer = compopt.SeparateAdam([p], **projecting("tracked", rank=4), simulate=True)
    for _ in range(2):
        p.grad = torch.randn(64, 80).to(dtype)
        optimizer.step()
    assert optimizer.stats.phase == "projected" and optimizer.backend == "native"


def orthonormal(bucket, ops: Ops, stacks: list[torch.Tensor]) -> list[torch.Tensor]:
    return orthonormalize_columns(bucket, ops, [x.mT.reshape(-1) for x in stacks], [(*x.shape,) for x in stacks])


def narrow(n: int, r: int, kind: str) -> torch.Tensor:
    """Three matrices (n, r), stored by columns."""
    x = torch.randn(3, r, n, generator=torch.Generator().manual_seed(0))
    if kind == "with zeros":
        x[0], x[1, 0], x[1, r // 2] = 0, 0, 0
    elif kind == "dependent":
        x[1] = x[1, :1]
        x[2, -1] = 2 * x[2, 0]
    elif kind == "triangular":  # nothing below the diagonal: no reflection
        x.tril_()
    return x.mul_({"tiny": 1e-38, "large": 1e30}.get(kind, 1)).mT


@pytest.mark.parametrize("kind", ["random", "with zeros", "dependent", "triangular", "tiny", "large"])
def test_orthonormal_columns_are_those_of_lapack(kind):
    shapes = [(n, r) for n in (1, 5, 16, 17, 40, 130) for r in (1, 3, 4, 9, 16, 33) if r <= n]
    stacks = [narrow(n, r, kind) for n, r in shapes]
    bucket = Tensors(NativeOps()).bucket
    for (n, r), x, Q in zip(shapes, stacks, orthonormal(bucket, NativeOps(), stacks), strict=True):
        expected = torch.linalg.qr(x.double()).Q
        assert Q.is_contiguous() and Q.dtype == torch.float32
        assert torch.allclose(Q.mT @ Q, torch.eye(r).expand(3, r, r), rtol=0, atol=2e-6), (n, r)
        left = x.double() - Q.double() @ (Q.double().mT @ x.double())
        assert float(left.norm()) <= 1e-6 * float(x.double().norm()), (n, r)
        exact = 1 if kind == "dependent" else 3  # what stands on dependent columns is rounding
        assert torch.allclose(Q[:exact].double(), expected[:exact], rtol=0, atol=3e-5), (n, r)


def test_orthonormal_columns_are_zero_where_rows_are():
    stacks = [narrow(n, r, "random") for n in (5, 16, 17, 130) for r in (1, 4, 16, 33) if r <= n]
    for x in stacks:
        x[:, ::3] = 0
        x[1] = 0
    bucket = Tensors(NativeOps()).bucket
    for x, Q in zip(stacks, orthonormal(bucket, NativeOps(), stacks), strict=True):
        for matrix, columns in zip(x, Q, strict=True):
            rest = matrix.any(1) if matrix.any() else torch.arange(len(matrix)) < x.shape[2]
            assert not columns[~rest].any() and columns[rest].any(1).all(), x.shape
            assert float((matrix - columns @ (columns.mT @ matrix)).norm()) <= 1e-5 * float(matrix.norm())


@pytest.mark.parametrize("isa", ISAS)
def test_every_processor_computes_the_same_orthonormal_columns_on_any_number_of_threads(monkeypatch, isa):
    # the large ones are long in work: threads are at it together
    stacks = [narrow(n, r, "random") for n, r in ((17, 5), (130, 16), (64, 33), *[(3000, 16)] * 6)]

    def columns(isa: str) -> list[torch.Tensor]:
        monkeypatch.setenv("COMPOPT_NATIVE_ISA", isa)
        ops = NativeOps()
        return orthonormal(Tensors(ops).bucket, ops, stacks)

    expected, threads = columns("portable"), torch.get_num_threads()
    try:
        for torch_threads in (1, 3):
            torch.set_num_threads(torch_threads)
            assert all(map(torch.equal, columns(isa), expected))
    finally:
        torch.set_num_threads(threads)


def test_ranks_compare_the_columns_that_their_backend_computes(monkeypatch):
    optimizer = compopt.SeparateAdam([nn.Parameter(torch.ones(64, 64))], lr=0.1)
    name = "random matrices"
    with monkeypatch.context() as patch:
        patch.setattr(library.load_library(), "orthonormalize", lambda *_: -1)
        unwritten = dict(optimizer.list_fixed_settings())[name]
    assert dict(optimizer.list_fixed_settings())[name] != unwritten
