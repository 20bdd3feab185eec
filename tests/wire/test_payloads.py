"""Payloads: ``payload_dtype`` as people write it, what every rank sends and owes, calls to a backend as NCCL."""

from __future__ import annotations

import functools
import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

import conformance
import pytest
import torch
import torch.distributed as dist
from pairs import name_of
from sim import Ranks
from slow_rows import slow_but
from table import CASES, FORMS, Case, by_name
from torch import nn

import compopt
from compopt._wire.codec import PAYLOAD_CODECS
from compopt.tagc.zero1_adamw import UPDATE_DTYPES, UpdateDtype

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from _fake_ranks import fake_ranks

from compopt._wire.collectives import Communicator, bitwise_or_rows
from compopt._wire.payload import Payload
from compopt._wire.requests import AllGather, AllReduceMean

SENDING = [case for case in CASES + FORMS if "payload_dtype" in inspect.signature(case.cls).parameters]
every = pytest.mark.parametrize("case", SENDING, ids=lambda case: case.name)
WRONG = ["torch.int8", "", torch.int32, torch.float8_e4m3fn, torch.complex64, 8, ["int8"]]
NAMES = [name for name in PAYLOAD_CODECS if isinstance(name, str)]


def takes(case, name: str) -> bool:
    if name == "int2":
        return case.cls in (compopt.Average, compopt.LocalSteps)
    return PAYLOAD_CODECS[name].bits is None or not case.sharded


def names_in(optimizer) -> list[object]:
    saved = [group["payload_dtype"] for group in optimizer.state_dict()["param_groups"]]
    return [group["payload_dtype"] for group in optimizer.option_groups] + saved


@pytest.mark.parametrize("case", slow_but(lambda case: case in SENDING[::2], SENDING), ids=lambda case: case.name)
def test_each_name_sends_what_it_says(case):
    bytes_of = {}
    for name in filter(lambda name: takes(case, name), [*NAMES, None]):
        run = conformance.make_ranks(case, 2, payload_dtype=name and getattr(torch, name, name))
        assert set(names_in(run.optimizers[0])) == {name}
        run.train(conformance.loss, 3)
        bytes_of[name] = run.optimizers[0].stats.bytes_sent
    assert bytes_of[None] == bytes_of["float32"] < bytes_of["float64"]
    assert bytes_of["bfloat16"] <= bytes_of["float16"] < bytes_of["float32"]
    assert case.sharded or bytes_of["int8"] < bytes_of["float16"]
    assert "int2" not in bytes_of or bytes_of["int2"] < bytes_of["int4"] < bytes_of["int8"]


@pytest.mark.parametrize(
    ("case", "word"),
    [(case, "flt32") for case in SENDING] + [(SENDING[0], word) for word in WRONG],
    ids=name_of,
)
def test_another_word_is_refused_by_a_list_of_those_there_are(case, word):
    p = torch.nn.Parameter(torch.ones(64, 64))
    with pytest.raises(
        ValueError, match=r"payload_dtype must be None, 'int8', .*'float16', 'bfloat16', 'float32'"
    ) as message:
        case.make([p], payload_dtype=word)
    assert repr(word) in str(message.value) and "torch.dtype of that name" in str(message.value)


def test_a_group_may_have_its_own():
    p, q = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    optimizer = compopt.RadiusAdamW([{"params": [p], "payload_dtype": torch.int8}, {"params": [q]}])
    assert names_in(optimizer) == ["int8", None] * 2
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "payload_dtype": torch.float16})
    assert names_in(optimizer)[2] == "float16"


@every
def test_a_checkpoint_with_either_form_loads(case):
    """A state dict that was edited may hold the torch.dtype."""
    run = conformance.make_ranks(case, 2, payload_dtype="bfloat16")
    run.train(conformance.loss, 5)
    run.world.consolidate(run.optimizers)
    saved = run.optimizers[0].state_dict()
    for group in saved["param_groups"]:
        group["payload_dtype"] = torch.bfloat16
    other = conformance.make_ranks(case, 2)
    for optimizer in other.optimizers:
        optimizer.load_state_dict(conformance.through_a_file(saved))
        assert set(names_in(optimizer)) == {"bfloat16"}
    other.train(conformance.loss, 3)
    other.assert_replicas_equal()


@every
def test_set_by_hand_a_torch_dtype_is_saved_by_its_name_and_ranks_do_not_differ_by_it(case):
    run = conformance.make_ranks(case, 2)
    for optimizer, given in zip(run.optimizers, ("float16", torch.float16), strict=True):
        for group in optimizer.option_groups:
            group["payload_dtype"] = given
    run.train(conformance.loss, 4)
    run.finish_round(conformance.loss)
    run.assert_replicas_equal()
    other = conformance.make_ranks(case, 2, payload_dtype="float16")
    other.train(conformance.loss, 4)
    other.finish_round(conformance.loss)
    assert run.optimizers[0].stats.bytes_sent == other.optimizers[0].stats.bytes_sent
    assert [optimizer.state_dict()["param_groups"][0]["payload_dtype"] for optimizer in run.optimizers] == 2 * [
        "float16"
    ]


def test_update_dtypes_are_those_of_the_annotation():
    (literal,) = [one for one in get_args(UpdateDtype) if get_args(one)]
    assert get_args(literal) == UPDATE_DTYPES


BACKENDS = pytest.mark.parametrize("backend", ["torch", "auto"])


@BACKENDS
@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "scale"), [("RadiusAdamW", 1.0), ("ScapeAdamS", 10.0)])
def test_every_rank_owes_what_it_sent_too_little(name, scale, model, backend, monkeypatch):
    """Of dense steps at 2 ranks: message and residual are the gradient and the residual before, also of bfloat16
    models, which send in the gradients' dtype."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    payload = torch.bfloat16 if model == torch.float32 else None
    ranks = conformance.make_ranks(by_name[name], 2, model, dense_steps=9, payload_dtype=payload)
    ranks.world.record = True
    bucket = ranks.optimizers[0]._buckets[0]
    matrices = [[model.up.weight, model.down.weight] for model in ranks.models]
    before = [[torch.zeros(p.shape, dtype=torch.float64) for p in local] for local in matrices]
    residuals = 0.0
    for _ in range(4):
        ranks.world.log.clear()
        ranks.train(conformance.loss, 1)
        ((_, messages),) = [entry for entry in ranks.world.log if entry[0] == "AllReduceMean"]
        for rank, _, optimizer in ranks:
            body = messages[rank][-bucket.numel :].double().split(bucket.lengths)
            for i, p in enumerate(matrices[rank]):
                sent = body[[q is p for q in optimizer._buckets[0].params].index(True)].view(p.shape)
                after = optimizer.state[p]["residual"].double()
                came = p.grad.double() + scale * before[rank][i]
                torch.testing.assert_close(sent + scale * after, came, rtol=1e-5, atol=1e-7)
                before[rank][i], residuals = after, residuals + float(after.abs().sum())
    assert (residuals > 0) == (model == torch.float32), "a gradient of bfloat16 is sent as it is"


def test_a_float32_gradient_of_a_bfloat16_parameter_is_sent_as_it_is():
    """``payload_dtype=None`` is the gradient's dtype, which need not be the parameter's."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this PyTorch knows no dtype of gradients but the parameter's")

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = (nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(2))
            self.wide.grad_dtype = torch.float32

    def loss(model: Wide, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        return ((model.wide.float() + model.narrow.float()) * x).sum()

    def make(case: Case, params: Any, process_group: Any) -> torch.optim.Optimizer:
        return case.make(params, process_group=process_group, payload_dtype=None)

    for case in CASES:
        if case.build:
            continue  # around torch's AdamW, which does not take such gradients
        ranks = Ranks(2, Wide, partial(make, case))
        ranks.world.record = True
        ranks.train(loss, 5)
        ranks.assert_replicas_equal()
        assert {model.wide.grad.dtype for model in ranks.models} == {torch.float32}
        kinds = {t.dtype for kind, sent in ranks.world.log if "Mean" in kind for t in sent}
        assert kinds - {torch.float64} == {torch.float32, torch.bfloat16}  # TAGC agrees on a norm
        assert ranks.optimizers[0].stats.bytes_dense == 64 * 64 * (4 + 2)


SINGLE = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@pytest.fixture
def called(monkeypatch) -> list:
    results = []

    def noted(name: str, call):
        @functools.wraps(call)
        def note(*args, **options):
            results.append((name, *[a for a in args if not isinstance(a, torch.Tensor | list)]))
            return call(*args, **options)

        return note

    for name in ("all_reduce", "all_gather", SINGLE):
        monkeypatch.setattr(dist, name, noted(name, getattr(dist, name)))
    return results


@pytest.mark.parametrize("backend, mean", [("nccl", 8.0), ("gloo", 2.0), ("xccl", 2.0)])
def test_a_mean_is_the_backends_where_it_has_one(monkeypatch, backend, mean, called):
    monkeypatch.setattr(Communicator, "get_backend", lambda comm, device: backend)
    with fake_ranks(4):
        answer = Communicator().start(AllReduceMean(torch.full((3,), 8.0))).wait()  # a sum leaves this rank's numbers
    assert answer.tolist() == [mean] * 3
    assert called == [("all_reduce", dist.ReduceOp.AVG)] if backend == "nccl" else [("all_reduce",)]


@pytest.mark.parametrize("backend, name", [("nccl", SINGLE), ("xccl", SINGLE), ("gloo", "all_gather")])
def test_a_gather_is_into_one_tensor_where_the_backend_can(monkeypatch, backend, name, called):
    monkeypatch.setattr(Communicator, "get_backend", lambda comm, device: backend)
    payload = Payload(torch.ones(300), 1, 0, [299], PAYLOAD_CODECS["int8"], torch.empty(299), (1,))
    with fake_ranks(4):
        rows = Communicator().start(AllGather(torch.arange(6.0).view(2, 3))).wait()
        answer = Communicator().start(AllReduceMean(payload)).wait()
        while answer is not payload:
            answer = answer.wait()
    assert rows.shape == (4, 2, 3) and called == [(name,)] * 2
    if name == SINGLE:
        assert torch.equal(rows, torch.arange(6.0).view(2, 3).expand(4, 2, 3))


@pytest.mark.parametrize("ranks", range(1, 10))
def test_the_or_of_rows_leaves_none_out(ranks):
    rows = torch.zeros(ranks, 12, dtype=torch.uint8)
    rows[torch.arange(ranks), torch.arange(ranks)] = 1 << torch.arange(ranks).to(torch.uint8) % 8
    assert torch.equal(bitwise_or_rows(rows), rows.sum(0, dtype=torch.uint8))
