"""float32 masters of parameters of lower precision follow what is done to these between steps."""

from __future__ import annotations

import conformance
import pytest
import torch
from conformance import every

LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def train(case, ranks, steps: int, dtype) -> None:
    """Gradients of low precision, as real ones; every rank's own."""
    for _ in range(steps):
        for rank, model, _ in ranks:
            generator = torch.Generator().manual_seed(10 * ranks.steps + rank)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        ranks.world.step(ranks.optimizers)
        ranks.steps += 1


def masters(optimizer) -> list[torch.Tensor]:
    return [value for entry in optimizer.state.values() for name, value in entry.items() if name == "master"]


@every
@LOW
def test_a_clamp_between_steps_holds(case, dtype):
    """In place, by ``.data``, which no version counter sees, and by load_state_dict: the next step begins there."""
    if not case.keeps_masters:
        pytest.skip("parameters of low precision are the inner optimizer's, or refused")
    ranks = conformance.make_ranks(case, 2, dtype)
    train(case, ranks, 3, dtype)
    kept = [m.clone() for m in masters(ranks.optimizers[0])]
    assert any(not torch.equal(m, m.to(dtype).float()) for m in kept), "masters know more than parameters"
    ways = {
        "in place": lambda model: [p.detach().clamp_(-0.02, 0.02) for p in model.parameters()],
        "data": lambda model: [p.data.mul_(p.data.abs() > 0.01) for p in model.parameters()],
        "loaded": lambda model: model.load_state_dict({k: v * 0 + 3 for k, v in model.state_dict().items()}),
    }
    for change in ways.values():
        for model in ranks.models:
            with torch.no_grad():
                change(model)
        before = [p.detach().clone() for p in ranks.models[0].parameters()]
        train(case, ranks, 1, dtype)
        ranks.assert_replicas_equal()
        for p, old in zip(ranks.models[0].parameters(), before, strict=True):
            assert float((p.detach().float() - old.float()).abs().max()) < 0.1, "a step of lr 1e-2 at most"


@every
def test_what_was_not_touched_keeps_its_digits(case):
    if not case.keeps_masters:
        pytest.skip("parameters of low precision are the inner optimizer's, or refused")
    runs = []
    for touched in (False, True):
        ranks = conformance.make_ranks(case, 1, torch.bfloat16, lr=1e-5)
        train(case, ranks, 2, torch.bfloat16)
        weight = ranks.models[0].up.weight
        if touched:
            weight.data[0, 0] = 2.0
        train(case, ranks, 2, torch.bfloat16)
        runs.append(ranks.optimizers[0].state[weight]["master"].view(-1))
    plain, changed = runs
    assert abs(float(changed[0]) - 2.0) < 1e-2
    assert torch.equal(plain[1:], changed[1:])
    assert not torch.equal(plain, plain.bfloat16().float())
