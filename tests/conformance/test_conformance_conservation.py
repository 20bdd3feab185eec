"""Conservation, for every class on every backend, in float32: gradients are applied or stay in residuals.

Beside the table's lines also forms of the classes that send otherwise: OTHERS.
"""

from __future__ import annotations

import copy
import inspect
import itertools

import pytest
import torch
from conformance import OTHERS
from conservation import TOLERANCE, Ledger, everywhere
from pairs import name_of, pairs
from problems import gradients, replicas, step, weights
from slow_rows import slow_but
from table import CASES, DERIVED, FORMS, Case

import compopt

# A shard of one rank has 146,000 compressed elements, of three ranks 48,000.
SHAPES = [(64, 80), (80,), (128, 64), (260, 512), (10, 10), (65, 81)]  # the last ends within sixteen elements
# more than 16,384, which thresholds are sampled from; the last is too narrow to be projected, and only rounded
MEDIUM = [(64, 80), (80,), (130, 129), (65, 81), (2, 4096)]
FEW = SHAPES[:2]  # for Triton's interpreter, which takes seconds for the others

# docs/writing.md's RandomK alone has a dense start, a sparse residual and Average's reducer
ALL = CASES + FORMS + OTHERS + [case for case in DERIVED if case.method == "adamw" and case.build is None]
every_kept = pytest.mark.parametrize(
    "case",
    [case for case in ALL if case.cls.rank_local_state and not case.draws],
    ids=lambda case: case.name,
)

BACKENDS = ["torch", "native"]
PAYLOADS = ["bfloat16", "float16", "int8", "int4", "int2"]


def takes(case: Case, payload: str) -> bool:
    """Return True if the class sends it; one that does not refuses it by name."""
    if "payload_dtype" not in inspect.signature(case.cls).parameters:
        return False
    try:
        case.make([torch.nn.Parameter(torch.ones(64, 80))], payload_dtype=payload)
    except ValueError as error:
        assert "payload_dtype" in str(error)
        return False
    return True


def rows_of_payloads() -> list[tuple[str, str, Case]]:
    """Every pair of two; of the papers' classes what rounds most of what they may send, on both backends."""
    rows = pairs(PAYLOADS, BACKENDS, ALL, where=lambda payload, _, case: takes(case, payload))
    for case in CASES:
        if payload := next((p for p in ("int8", "bfloat16") if case.build is None and takes(case, p)), None):
            rows += [row for backend in BACKENDS if (row := (payload, backend, case)) not in rows]
    return rows


class Audit:
    """Ranks that train on noise, and their books of every step."""

    def __init__(self, case: Case, ranks: int, shapes: list[tuple[int, ...]], **message):
        self.case, self.ranks, self.shapes, self.t = case, ranks, shapes, 0

        def make(params, process_group):
            return case.make(params, process_group=process_group, **{**case.averaging, **message})

        self.world, self.params, self.optimizers = replicas(ranks, weights(shapes, torch.float32), make)
        self.clips = "max_grad_norm" in message
        self.phases: set[str] = set()

    def step(self, grads: list[list[torch.Tensor | None]], previous: Ledger | None = None) -> Ledger:
        for local, given in zip(self.params, grads, strict=True):
            for p, g in zip(local, given, strict=True):
                p.grad = g
        books = Ledger(self.case, self.optimizers, previous)
        step(self.world, self.params, self.optimizers, grads)
        self.t += 1
        phase = self.optimizers[0].stats.phase
        self.phases.add(phase)
        off = books.check(self.optimizers)
        assert off < TOLERANCE[torch.float32], f"step {self.t}, {phase}: {off:.1e}"
        assert not self.clips or books.factor < 0.8
        return books

    def gradients(self) -> list[list[torch.Tensor | None]]:
        return gradients(self.ranks, self.t, self.shapes, torch.float32)

    def train(self, steps: int = 9) -> set[str]:
        """With every tensor absent now and then; the phases it went through."""
        books = None
        for t in range(steps):
            grads = self.gradients()
            for rank, local in enumerate(grads):
                if t % 3 == 2:
                    local[(t + rank) % len(local)] = None  # on this rank
                if t % 4 < (2 if len(local) > 2 else 1):
                    local[t // 2 % len(local)] = None  # on all, for two steps
            books = self.step(grads, books)
        return self.phases

    def residual(self, n: int) -> torch.Tensor:
        """All that any rank holds back of the n-th tensor, whose number may be another in an optimizer's groups."""
        number = next(i for i, p in enumerate(everywhere(self.optimizers[0])) if p is self.params[0][n])
        states = [optimizer.state_dict()["state"][number] for optimizer in self.optimizers]
        return torch.cat([s[name].view(-1) for s in states for name in ("residual", "common") if name in s])


def has_kernels(case: Case) -> bool:
    """Return True if Triton's interpreter, which takes seconds, shows what it does not of another class."""
    return case in CASES + OTHERS and case.build is None


@pytest.mark.parametrize(
    ("case", "ranks"),
    slow_but(lambda case, ranks: ranks > 1 or case in CASES + OTHERS, itertools.product(ALL, (1, 3))),
    ids=name_of,
)
def test_gradients_are_conserved(case, backend, ranks):
    if backend == "triton" and (ranks > 1 or not has_kernels(case)):
        pytest.skip("one rank of a class of its own shows what the kernels do")
    phases = Audit(case, ranks, FEW if backend == "triton" else SHAPES).train()
    assert phases - {"dense"} or case.cls is compopt.AdamS


def is_fast(payload: str, backend: str, case: Case) -> bool:
    """By the C passes all, by operators every second of the table's lines."""
    return backend == "native" or case in CASES[::2]


@pytest.mark.parametrize(
    ("payload", "backend", "case"), slow_but(is_fast, rows_of_payloads()), indirect=["backend"], ids=name_of
)
def test_what_a_payload_rounds_off_is_owed(case, backend, payload):
    ranks, shapes = 3, SHAPES if (payload, backend) == ("int8", "native") else MEDIUM
    if payload in ("bfloat16", "float16"):  # a sum over ranks is rounded once more, unless owners add up in float32
        exact = case.sharded and case.cls in (compopt.ScapeAdamS, compopt.TagcAdamW)
        ranks = 3 if exact else 1
    Audit(case, ranks, shapes, payload_dtype=payload).train()


@pytest.mark.parametrize(
    ("case", "payload_dtype"),
    slow_but(lambda case, payload: case in CASES[::2] or payload is None, itertools.product(ALL, (None, "int8"))),
    ids=name_of,
)
def test_a_clip_takes_what_was_sent_and_nothing_that_is_owed(case, backend, payload_dtype):
    if backend == "triton" and (payload_dtype or not has_kernels(case)):
        pytest.skip("rounding, and wrapping, is not a kernel's work")
    if "max_grad_norm" not in inspect.signature(case.cls).parameters:
        pytest.skip("does not clip")
    # of a norm of 9 to 72 and, of three ranks, 20 to 100
    limit = 6.0 if backend == "triton" else 12.0
    message = dict(payload_dtype=payload_dtype, max_grad_norm=limit)
    try:
        Audit(case, *((1, FEW) if backend == "triton" else (3, MEDIUM)), **message).train()
    except ValueError as error:
        assert payload_dtype and "payload_dtype" in str(error)
        pytest.skip("refuses int8")


@every_kept
@pytest.mark.parametrize(
    ("backend", "saved"),
    slow_but(lambda backend, saved: saved == (backend == "native"), itertools.product(BACKENDS, (False, True))),
    indirect=["backend"],
    ids=str,
)
def test_a_dense_step_sends_what_is_owed_and_absent_tensors_go_on_owing(case, backend, saved):
    """A contraction's residual is sent; an unbiased projection's error is noise, which a dense step drops."""
    run = Audit(case, 2, MEDIUM)
    for _ in range(6):
        run.step(run.gradients())
    for optimizer in run.optimizers:
        if saved:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for group in optimizer.option_groups:
            group["dense_steps"] = 10**6
    if case.method == "scape":
        run.step(run.gradients())  # on the mask that was found one step ago
    residual = run.residual(2)
    assert residual.any()
    for absent in (2, None):
        grads = run.gradients()
        for local in grads if absent else ():
            local[absent] = None
        if case.compressed.get("projection") == "gaussian":
            step(run.world, run.params, run.optimizers, grads)
        else:
            run.step(grads)
        assert run.optimizers[0].stats.phase == "dense" and not run.residual(0).any() and not run.residual(3).any()
        assert torch.equal(run.residual(2), residual) if absent else not run.residual(2).any()
