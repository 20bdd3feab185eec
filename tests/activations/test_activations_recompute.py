"""Activation checkpointing, torch.compile and warm-up: a compressor inside what others do with a model."""

from __future__ import annotations

import copy

import pytest
import torch
from codecs_table import COMPRESSORS, HIDDEN, make, sample
from torch import nn
from torch.utils.checkpoint import checkpoint

from compopt.activations import PowerSGD, RandomK, ReceiveCompressed, SendCompressed
from compopt.activations.recompute import MAX_FORWARDS

HOW = {"plain": None, "reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False}}
ORDERS = {
    "one at a time": "Ff",
    "two at once": "FFff",
    "a pipeline's": "FFfFff",
}  # F a forward, f the oldest's backward


class Net(nn.Module):
    """Two layers around a compressor, with dropout: checkpointing must repeat that too."""

    def __init__(self, codec: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.below, self.codec, self.above = nn.Linear(HIDDEN, HIDDEN), codec, nn.Linear(HIDDEN, 2)

    def part(self, x):
        return self.above(torch.relu(nn.functional.dropout(self.codec(self.below(x)), 0.2)))

    def forward(self, x, how):
        return self.part(x) if how is None else checkpoint(self.part, x, **how)


def gradients(name: str, how: dict | None, order: str) -> list[torch.Tensor]:
    """Of everything, after three rounds of forwards and backwards in that order."""
    net, waiting, results, k = Net(make(name)).double(), [], [], 0
    torch.manual_seed(9)
    for _ in range(3):
        for what in order:
            if what == "F":
                k += 1
                x = sample(k).requires_grad_()
                waiting.append((x, net(x, how)))
            else:
                x, y = waiting.pop(0)
                y.square().sum().backward()
                results += [y.detach(), x.grad]
    return [*results, *(p.grad for p in net.parameters()), *net.buffers()]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_checkpointed_gradients_are_those_without(name, order):
    plain = gradients(name, None, ORDERS[order])
    for how in ({"use_reentrant": True}, {"use_reentrant": False}):
        for ours, theirs in zip(gradients(name, how, ORDERS[order]), plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["RandomK", "PowerSGD"])
def test_forwards_that_cannot_be_told_apart_raise_instead_of_mixing_draws(name):
    for how in ({"use_reentrant": True}, {"use_reentrant": False}):
        net = Net(make(name)).double()
        unknown = net(sample().requires_grad_(), {**how, "preserve_rng_state": False})
        with pytest.raises(RuntimeError, match="preserve_rng_state"):
            unknown.sum().backward()
        ys = []
        for seed in range(2):
            torch.manual_seed(0)
            ys.append(net(sample(seed).requires_grad_(), how))
        with pytest.raises(RuntimeError, match="with its random state"):
            ys[0].sum().backward()


def test_the_same_seed_at_every_step_is_no_reason_to_raise():
    net = Net(make("RandomK")).double()
    for step in range(3):
        torch.manual_seed(0)
        net(sample(step).requires_grad_(), {"use_reentrant": False}).sum().backward()


def test_a_graph_that_is_kept_may_be_gone_through_twice():
    net, x = Net(make("PowerSGD")).double(), sample().requires_grad_()
    y = net(x, {"use_reentrant": False}).square().sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_a_second_recomputation_after_another_forward_is_refused():
    """As zero-bubble schedules have it: gradients of inputs, another micro-batch, gradients of weights."""
    net, x = Net(make("RandomK")).double(), sample().requires_grad_()
    how = {"use_reentrant": False}
    y = net(x, how).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    net(sample(1), how)
    with pytest.raises(RuntimeError, match="Zero-bubble schedules recompute a forward twice"):
        torch.autograd.grad(y, list(net.above.parameters()))


def test_what_is_kept_is_bounded_and_nothing_is_kept_without_checkpointing():
    codec, x = PowerSGD(2, HIDDEN), sample().float().requires_grad_()
    for _ in range(3):
        codec(x)
    assert not codec._replay._draws
    for _ in range(MAX_FORWARDS + 10):
        with torch.no_grad():
            codec(x)
    assert len(codec._replay._draws) == MAX_FORWARDS


def test_evaluation_moves_no_basis():
    codec = PowerSGD(2, HIDDEN)
    before = codec.basis.clone()
    codec.eval()(sample().float())
    assert torch.equal(codec.basis, before)
    with torch.inference_mode():
        codec.train()(sample().float())
    codec.load_state_dict({"basis": before})  # an inference tensor could not be loaded into
    assert torch.equal(codec.basis, before)
    codec.train()(sample().float())
    assert not torch.equal(codec.basis, before)


def test_random_positions_follow_from_the_seed_and_the_number_of_the_forward():
    x = sample()
    first, second, other = RandomK(0.25), RandomK(0.25), RandomK(0.25, seed=1)
    torch.manual_seed(1)
    one = [first(x) for _ in range(3)]
    torch.manual_seed(2)  # ranks differ in this
    two = [second(x) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0], one[1]) and not torch.equal(one[0], other(x))


def test_torch_compile_leaves_boundaries_as_they_are():
    def step(compiled: bool, name: str):
        torch.manual_seed(0)
        send = SendCompressed(nn.Linear(HIDDEN, HIDDEN), COMPRESSORS[name]())
        receive = ReceiveCompressed(nn.Linear(HIDDEN, 2), COMPRESSORS[name](), (3, 5, HIDDEN))
        run = torch.compile(lambda x: receive(*send(x)), backend="aot_eager") if compiled else None
        x = sample().float().requires_grad_()
        for _ in range(2):
            y = run(x) if compiled else receive(*send(x))
            y.square().sum().backward()
        return [
            y.detach(),
            x.grad,
            *(p.grad for p in (*send.parameters(), *receive.parameters()) if p.grad is not None),
        ]

    for name in ("RandomK", "PowerSGD", "QuantizeBack4"):
        for ours, theirs in zip(step(True, name), step(False, name), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["RandomK", "PowerSGD", "QuantizeBack4", "AutoEncoder"])
def test_torch_compile_leaves_a_compressor_as_it_is(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), COMPRESSORS[name](), nn.Linear(HIDDEN, 2))
    plain, x = copy.deepcopy(model), sample().float()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), plain(x))


def test_a_copy_of_a_compressor_goes_on_by_itself():
    codec = make("RandomK")
    codec(sample())
    twin = copy.deepcopy(codec)
    assert torch.equal(codec(sample()), twin(sample()))
