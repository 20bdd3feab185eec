"""The replica check, and ranks that train on the same data."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from ddp_models import Net
from deep import Deep, loss
from ranks import run_ranks
from sim import Ranks
from table import CASES
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

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
    ranks.optimizers[0]._engine.replica_checksum ^= 5  # as after a step that one rank lost
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


MAKERS = {
    "SeparateAdam": compopt.SeparateAdam,
    "RadiusAdamW": lambda params: compopt.RadiusAdamW(params, dense_steps=2),
    "TagcAdamW": lambda params: compopt.TagcAdamW(params, dense_steps=2),
    "Average": lambda params: compopt.Average(torch.optim.AdamW(params)),
    "LocalSteps": lambda params: compopt.LocalSteps(torch.optim.AdamW(params), 2, fragments=2, growth_steps=0),
    "LocalSteps, averaged start": lambda params: compopt.LocalSteps(torch.optim.AdamW(params), 2, dense_steps=2),
}


def train(model, optimizer, seed: int, steps: int = 8) -> list[str]:
    """The warnings about data of so many steps on data drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(torch.randn(8, 96, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if "DistributedSampler" in str(w.message)]


def train_under_ddp(rank: int) -> dict[str, list[list[str]]]:
    results = {}
    for name, make in MAKERS.items():
        torch.manual_seed(0)
        model = DDP(Net())
        same = train(model, make(model.parameters()), seed=0)
        model = DDP(Net())
        results[name] = [same, train(model, make(model.parameters()), seed=rank)]
    return results


@pytest.mark.slow
def test_the_same_data_under_ddp_is_warned_of_once():
    first, second = run_ranks(train_under_ddp, 2)
    for name in MAKERS:
        same, different = first[name]
        assert len(same) == 1, (name, same)
        assert "the same data" in same[0] and "DistributedSampler" in same[0] and "seed" in same[0]
        assert different == [] and second[name] == [[], []]


def train_without_ddp(rank: int) -> dict[str, str]:
    results = {}
    for name, make in MAKERS.items():
        torch.manual_seed(0)
        model = Net()
        try:
            train(model, make(model.parameters()), seed=0)
        except RuntimeError as error:
            results[name] = str(error)
        dist.barrier()
    return results


def test_the_same_data_without_ddp_is_refused():
    for results in run_ranks(train_without_ddp, 2):
        for name in MAKERS:
            assert "all ranks hold bit-identical gradients" in results[name], name
            assert "compopt.attach" in results[name] and "Accelerator(cpu=True)" in results[name]


def start_without_gradients(rank: int) -> list[str]:
    """The first step is skipped everywhere, the second has nothing but zeros: neither shows anything."""
    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = compopt.SeparateAdam(model.parameters())
    for factor in (float("nan"), 0.0):
        (factor * model(torch.randn(8, 96, generator=torch.Generator().manual_seed(0))).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return train(model, optimizer, seed=0)


def test_gradients_are_compared_in_the_first_step_that_has_some():
    first, second = run_ranks(start_without_gradients, 2)
    assert len(first) == 1 and second == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_that_were_averaged_before_are_refused(case, dtype):
    """In the first step that has gradients; steps of zeros before it show nothing. Later steps do not look."""
    ranks = Ranks(2, lambda: nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 3)).to(dtype), case.make)

    def step(same: bool, scale: float = 1.0) -> None:
        for rank, model, _ in ranks:
            drawn = torch.Generator().manual_seed(10 * ranks.steps + (0 if same else rank))
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=drawn).mul_(scale).to(dtype)
        ranks.world.step(ranks.optimizers)
        ranks.steps += 1

    step(True, scale=0.0)
    with pytest.raises(RuntimeError, match=r"bit-identical.*compopt\.attach"):
        for _ in range(5):  # local steps look when they first exchange
            step(True)
    if not isinstance(ranks.optimizers[0], compopt.LocalSteps):
        assert {optimizer._engine.steps for optimizer in ranks.optimizers} == {1}
    step(False)
    step(True)
    step(False)
    ranks.assert_replicas_equal()
