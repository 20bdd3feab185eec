"""The replica check: every part of the parameters is compared within the interval, at no collective of its own."""

from __future__ import annotations

import pytest
import torch
from deep import Deep, loss
from sim import Ranks
from torch import nn

import compopt
from compopt._engine import handshake
from compopt._engine.handshake import checksum_sum, find_part, sum_part


@pytest.mark.parametrize("every", [1, 2, 3, 7, 24, 25, 50, 99, 100, 101, 1000])
def test_all_parts_are_due_within_the_interval(every):
    """A change after step s is in a sum by step s + every - 1, and in the message of the step after that."""
    due = {number: part for number in range(1, 4 * every + 2) if (part := find_part(number, every))}
    (parts,) = {parts for _, parts in due.values()}
    for s in range(every + 1):
        window = range(s + 1, s + max(every, 2))  # a step to sum and a step to tell
        assert {due[n][0] % parts for n in window if n in due} == {*range(parts)}
    assert not any(find_part(number, 0) for number in range(9))


def test_all_bytes_are_in_one_part(monkeypatch):
    """A change of any element, of whatever dtype and layout, changes the sum of its part only."""
    monkeypatch.setattr(handshake, "PART_BYTES", 1)
    monkeypatch.setattr(handshake, "TENSOR_BYTES", 1)
    tensors = [
        torch.randn(7),
        torch.randn(3, 5).t(),
        torch.zeros(0),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(9, dtype=torch.float64)[1:],
        torch.randn(6)[1:2],
    ]

    def sums(parts: int) -> list[int]:
        return [checksum_sum(sum_part(tensors, part, parts)) for part in range(parts)]

    for parts in (1, 2, 5, 24):
        before = sums(parts)
        for tensor in tensors:
            for index in range(tensor.numel()):
                old, at = tensor.clone(), tuple(map(int, torch.unravel_index(torch.tensor(index), tensor.shape)))
                tensor[at] += 1
                assert sum(a != b for a, b in zip(before, sums(parts), strict=True)) in (1, 2)  # cut in two
                tensor.copy_(old)
        assert sums(parts) == before


def test_equal_tensors_have_equal_sums_wherever_they_are():
    values = torch.randn(1001)
    elsewhere = torch.cat([torch.zeros(1), values])[1:]
    strided = torch.stack([values, values])[:, ::1].t()[:, 0]
    for part in range(3):
        sums = {checksum_sum(sum_part([one], part, 3)) for one in (values, elsewhere, strided)}
        assert len(sums) == 1


def make(size: int = 2, **options) -> Ranks:
    return Ranks(
        size,
        lambda: Deep(6),
        lambda ps, process_group: compopt.SeparateAdam(ps, lr=1e-3, dense_steps=2, process_group=process_group),
    )


@pytest.mark.parametrize(("at", "in_parts"), [(5, False), (6, False), (5, True), (40, True)])
def test_it_is_on_by_default(at, in_parts, monkeypatch):
    monkeypatch.setattr(handshake, "PART_BYTES", 1 if in_parts else handshake.PART_BYTES)
    ranks = make()
    assert ranks.optimizers[0].check_replicas_every == 100
    ranks.train(loss, at)
    p = [*ranks.models[1].parameters()][at % 6]
    with torch.no_grad():
        p.view(-1)[at] *= 1 + 1e-6
    with pytest.raises(ValueError, match=r"equal before, .*PEFT's AdaLoRA.* check_replicas_every = 0"):
        ranks.train(loss, 100)
    limit = 99 if in_parts else 8  # the model is small: all is compared every fourth step
    assert ranks.optimizers[0].stats.applied_steps <= at + limit


def test_a_frozen_parameter_that_parts_is_found():
    ranks = make()
    for model in ranks.models:
        next(model.parameters()).requires_grad_(False)
    ranks.train(loss, 3)
    with torch.no_grad():
        next(ranks.models[0].parameters()).view(-1)[0] += 1
    with pytest.raises(ValueError, match="equal before"):
        ranks.train(loss, 100)


def test_it_adds_nothing_to_what_is_sent():
    """Neither a collective nor a byte."""
    sent = []
    for every in (0, 1, 100):
        ranks = make()
        ranks.world.record = True
        for optimizer in ranks.optimizers:
            optimizer.check_replicas_every = every
        ranks.train(loss, 12)
        sent.append([(kind, [t.shape for t in tensors]) for kind, tensors in ranks.world.log])
    assert sent[0] == sent[1] == sent[2]


def test_a_handshake_forgets_the_last_sum():
    """Parameters loaded between a sum and its comparison are not taken for a difference."""
    ranks = make()
    for optimizer in ranks.optimizers:
        optimizer.check_replicas_every = 1
    ranks.train(loss, 3)
    saved = [optimizer.state_dict() for optimizer in ranks.optimizers]
    ranks.optimizers[0]._session.replica_checksum ^= 5  # as after a step that one rank lost
    for optimizer, state in zip(ranks.optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    ranks.train(loss, 3)
    ranks.assert_replicas_equal()


class CountsOwnData(torch.optim.SGD):
    """Like SAM, begins after some steps to look at the rank's own gradient."""

    own: list[torch.Tensor]

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if self.steps > 3:
                    p.sub_(self.own[p].sign(), alpha=1e-8)
        self.steps += 1


def test_a_base_that_begins_later_to_depend_on_the_rank():
    made = []

    def make_optimizer(ps, process_group):
        base = CountsOwnData(ps, lr=1e-2)
        base.steps, base.own = 0, {p: torch.full_like(p, float(len(made)) + 0.5) - 1 for p in ps}
        made.append(base)
        return compopt.Separate(base, dense_steps=2, process_group=process_group)

    ranks = Ranks(2, lambda: Deep(6), lambda ps, process_group: make_optimizer([*ps], process_group))
    with pytest.raises(ValueError, match="base optimizer that evaluates the model again"):
        ranks.train(loss, 104)
    assert 4 <= ranks.optimizers[0].stats.applied_steps <= 104


def test_parameters_of_several_kinds():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(5, 3)
            self.b = nn.Linear(3, 7).to(torch.bfloat16)

    def mixed(model, rank, step):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        return model.b(model.a(x).bfloat16()).float().square().mean()

    def new(ps, process_group):
        return compopt.RadiusAdamW(ps, lr=1e-2, process_group=process_group)

    ranks = Ranks(3, Mixed, new)
    for optimizer in ranks.optimizers:
        optimizer.check_replicas_every = 9
    ranks.train(mixed, 20)
    with torch.no_grad():
        ranks.models[2].b.bias[6] += 1
    with pytest.raises(ValueError, match=r"rank 2 has"):
        ranks.train(mixed, 9)


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"delay": 2}])
@pytest.mark.parametrize("what", ["anchor", "frozen"])
def test_local_steps_compare_what_is_equal_within_a_round(options, what):
    def local(ps, process_group):
        inner = torch.optim.SGD(ps, lr=1e-2)
        return compopt.LocalSteps(inner, every=4, growth_steps=0, process_group=process_group, **options)

    def model() -> Deep:
        deep = Deep(6)
        deep.layers[0].weight.requires_grad_(False)
        return deep

    ranks = Ranks(2, model, local)
    ranks.train(loss, 9)
    with torch.no_grad():
        frozen = ranks.models[1].layers[0].weight
        changed = frozen if what == "frozen" else ranks.optimizers[1]._sync.anchors.tensors[7].anchor
        changed.view(-1)[5] += 1e-6
    with pytest.raises(ValueError, match=f"{'parameter 0' if what == 'frozen' else 'anchor 7'}.*equal before"):
        ranks.train(loss, 12 if options else 8)
