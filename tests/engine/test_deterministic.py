"""torch.use_deterministic_algorithms(True): no step asks PyTorch for what it then refuses on CUDA.

Nothing here has a GPU, so what is looked at is which operators a step calls, on PyTorch's own backend.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conformance import loss, make_ranks
from pairs import name_of
from table import CASES, FORMS, projecting
from torch.utils._python_dispatch import TorchDispatchMode

# torch.use_deterministic_algorithms' own list of what raises, the operators without a gradient; of cumsum floats only.
REFUSED = {"kthvalue", "histc", "bincount", "put", "put_", "median", "resize_", "nll_loss2d", "ctc_loss"}
OF_FLOATS = {"cumsum", "cumsum_", "cumprod"}


class Called(TorchDispatchMode):
    """Which of these operators were called, and on what."""

    def __init__(self):
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        floats = any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args)
        if name in REFUSED or (name in OF_FLOATS and floats):
            self.found.add(name)
        return func(*args, **kwargs or {})


# of a class that has no such option the line of the table, once
ROWS = [
    (payload_dtype, case)
    for case in [*CASES, *FORMS]
    for payload_dtype in (None, "bfloat16", "int8")
    if payload_dtype is None or ("payload_dtype" in case.bad and not case.sharded)
]


@pytest.mark.parametrize(("payload_dtype", "case"), ROWS, ids=name_of)
def test_a_step_calls_nothing_that_determinism_refuses(case, payload_dtype, monkeypatch):
    monkeypatch.setenv("COMPOPT_BACKEND", "torch")
    options = {"payload_dtype": payload_dtype} if payload_dtype else {}
    ranks = make_ranks(case, 2, **options)
    called = Called()
    with called:
        ranks.train(loss, 6)
    assert not called.found


def test_selection_by_a_sample_calls_nothing_that_determinism_refuses():
    from compopt._ops.operations import Ops

    x, called = torch.randn(200_000, generator=torch.Generator().manual_seed(0)), Called()
    with called:
        Ops().top_k_positions(x, 2000)
    assert not called.found


@pytest.mark.parametrize(("projection", "uses_qr"), [("gaussian", False), ("tracked", True)])
def test_ranks_compare_what_their_devices_compute_where_they_compute_it(projection, uses_qr, monkeypatch):
    """Only a QR differs between devices: who uses none is not refused for one."""
    from compopt._lowrank import matrices

    case = next(case for case in CASES if case.name == "SeparateAdam")
    ranks = make_ranks(dataclasses.replace(case, compressed=projecting(projection)), 2)
    first, second = ranks.optimizers
    mine = dict(first._settings())["random matrices"]
    monkeypatch.setattr(
        matrices,
        "orthonormalize_columns",
        lambda bucket, ops, all_: [torch.linalg.qr(R).Q * (1 + 2**-20) for R in all_],
    )
    others = dict(second._settings())["random matrices"]
    assert len(mine) == len(others) == 1
    assert (mine != others) == uses_qr
