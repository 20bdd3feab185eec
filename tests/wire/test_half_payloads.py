"""Payloads of 16 bits: what every rank sends and owes. What arrives is in test_conformance_conservation.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import conformance
import pytest
import torch
from sim import Ranks
from table import CASES, Case, by_name
from torch import nn

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
