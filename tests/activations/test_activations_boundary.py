"""Stage boundaries in one process: what both ends compare, state-dict keys, warm-up and dropping the compressors."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from codecs_table import COMPRESSORS, HIDDEN, SHAPE, sample
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from compopt.activations import (
    ALONE,
    AutoEncoder,
    Compressor,
    Identity,
    PowerSGD,
    Quantize,
    RandomK,
    ReceiveCompressed,
    SendCompressed,
    TopK,
    drop_compressors,
    set_compression,
)
from compopt.activations.pipeline import _ReturnBeside, _SendBeside

ONE_PROCESS = [n for n in COMPRESSORS if not n.startswith("Quantize") or n == "QuantizeBack4"]


def ends(sender, receiver, shape=SHAPE):
    return SendCompressed(nn.Identity(), sender), ReceiveCompressed(nn.Identity(), receiver, shape)


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_equal_ends_understand_each_other_and_the_label_weighs_nothing(name):
    send, receive = ends(COMPRESSORS[name](), COMPRESSORS[name]())
    x = sample().float()
    payload = send(x)
    assert payload[-1].numel() == 0
    sent = sum(t.numel() * t.element_size() for t in payload)
    assert sent == COMPRESSORS[name]().bytes(SHAPE)
    assert torch.equal(receive(*payload), COMPRESSORS[name]()(x))


@pytest.mark.parametrize(
    ("sender", "receiver", "words"),
    [
        (TopK(0.25), RandomK(0.25), "kind of compressor"),
        (TopK(0.25), TopK(0.5), "settings"),
        (RandomK(0.25), RandomK(0.25, seed=1), "settings"),
        (AutoEncoder(HIDDEN, 3), AutoEncoder(HIDDEN, 2), "settings"),
        (AutoEncoder(HIDDEN, 3), AutoEncoder(HIDDEN, 3, seed=1), "settings"),
        (PowerSGD(2, HIDDEN), PowerSGD(2, HIDDEN, seed=1), "settings"),
        (PowerSGD(2, HIDDEN), PowerSGD(3, HIDDEN), "settings"),
        (Quantize(4, gradient_bits=2), Quantize(8, gradient_bits=2), "settings"),
        (Quantize(4, gradient_bits=2), Quantize(4, gradient_bits=4), "settings"),
        (Quantize(4, gradient_bits=2), Quantize(4, gradient_bits=2, scale="tensor"), "settings"),
        (Quantize(4, gradient_bits=2), Quantize(4, True, gradient_bits=2), "settings"),
    ],
)
def test_ends_that_differ_say_so_at_the_first_message(sender, receiver, words):
    send, receive = ends(sender, receiver)
    with pytest.raises(RuntimeError, match=f"two ends of a stage boundary differ in .*{words}.*This one: "):
        receive(*send(sample().float()))


def test_shapes_and_precisions_that_differ_are_said_too():
    send, receive = ends(TopK(0.25), TopK(0.25), (3, 4, HIDDEN))
    with pytest.raises(RuntimeError, match="differ in the activation's shape or dtype"):
        receive(*send(sample().float()))
    with pytest.raises(RuntimeError, match="expects a payload of SendCompressed"):
        receive(sample().float())
    with pytest.raises(RuntimeError, match="expects a payload of SendCompressed"):
        receive(sample().float(), torch.ones(3))
    send, receive = ends(Identity(), Identity())
    set_compression(send, False)
    with pytest.raises(RuntimeError, match="differ in the kind of compressor"):
        receive(*send(sample().float()))


class Rounded(Compressor):
    """A compressor of one's own, whose values have another precision than the activation."""

    def compress(self, x, ranks=ALONE):
        return x.bfloat16(), None

    def decompress(self, values, side, shape):
        return values.float().view(shape)

    def bytes(self, shape, dtype=torch.float32):
        return 2 * math.prod(shape)


def test_values_may_have_another_precision_than_the_activation():
    send, receive = ends(Rounded(), Rounded())
    x = sample().float()
    assert torch.equal(receive(*send(x)), x.bfloat16().float())


def test_a_stage_that_returns_no_single_tensor_is_refused():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(TypeError, match="must return one tensor that is no DTensor; Pair returned tuple"):
        SendCompressed(Pair(), TopK(0.25))(sample())


def stage(width=HIDDEN):
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(5), nn.Linear(width, width))


def test_a_wrapped_stage_keeps_its_keys_and_loads_what_was_saved_without_a_wrapper():
    plain = stage()
    middle = SendCompressed(ReceiveCompressed(stage(), AutoEncoder(HIDDEN, 3), SHAPE), AutoEncoder(HIDDEN, 2))
    model = nn.Module()
    model.part = middle
    local = {"incoming.encoder", "incoming.decoder", "outgoing.encoder", "outgoing.decoder"}
    assert set(middle.state_dict()) == set(plain.state_dict()) | local
    assert [key for key in middle.state_dict() if key not in local] == list(plain.state_dict())
    assert set(model.state_dict()) == {f"part.{key}" for key in middle.state_dict()}
    assert set(get_model_state_dict(middle)) == set(middle.state_dict())

    missing = middle.load_state_dict(plain.state_dict(), strict=False)
    assert {key.removeprefix("stage.") for key in missing.missing_keys} == local and not missing.unexpected_keys
    for key, value in plain.state_dict().items():
        assert torch.equal(middle.state_dict()[key], value)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.add_(1.0)
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    set_model_state_dict(middle, {key: value.clone() for key, value in middle.state_dict().items()})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**model.state_dict(), "part.9.weight": torch.ones(1)})


class Scaled(nn.Module):
    """A stage with names that a wrapper uses too."""

    def __init__(self):
        super().__init__()
        self.weight, self.stage = nn.Parameter(torch.ones(HIDDEN)), nn.Linear(HIDDEN, HIDDEN)


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda stage: stage])
def test_a_stage_may_have_a_child_named_stage(wrap):
    model = wrap(SendCompressed(Scaled(), TopK(0.25)))
    assert set(model.state_dict()) == set(wrap(Scaled()).state_dict())
    other = wrap(Scaled()).state_dict()
    model.load_state_dict(other)
    loaded = model.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in other.items())


def test_a_copy_of_a_wrapped_stage_that_copies_itself_is_wrapped_too():
    """torch.export and torch.fx make such stages."""
    graph = torch.fx.symbolic_trace(stage())
    model = SendCompressed(graph, TopK(0.25))
    copied = copy.deepcopy(model)
    assert type(copied) is SendCompressed and copied.stage is not graph
    x = sample().float()
    assert all(torch.equal(a, b) for a, b in zip(copied(x), model(x), strict=True))


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_under_autocast_a_payload_has_the_activation_s_precision(name):
    """A residual stream stays in float32 there."""
    results = []
    for enabled in (False, True):
        x, y = sample().float().requires_grad_(), sample().float().requires_grad_()
        send, receive = ends(COMPRESSORS[name](), COMPRESSORS[name]())
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            received, summed = receive(*send(x)), COMPRESSORS[name]()(y)
        (received.square() + summed.square()).sum().backward()
        results.append((received, summed, x.grad, y.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_stage_may_change_in_place_what_it_receives():
    """Also where the gradient returns beside the payload, of which a stub says that it is the first."""
    pair = SimpleNamespace(send_gradient=lambda gradient: 0)
    values, x = torch.ones(3, requires_grad=True), torch.tensor([-1.0, 1.0])
    y = nn.ReLU(inplace=True)(_ReturnBeside.apply(values, x, pair))
    y.sum().backward()
    assert y.tolist() == [0.0, 1.0] and values.grad.tolist() == [-1.0] * 3


def test_what_a_sender_returns_can_be_detached_in_place():
    """As zero-bubble schedules do with the output of a stage in the middle."""
    x = sample().requires_grad_()
    values, _ = Quantize(2).compress(x.detach())
    payload = _SendBeside.apply(x, values, SimpleNamespace())
    assert torch.equal(payload.detach_().view(torch.uint8), values.view(torch.uint8))


def test_dropping_leaves_a_model_that_never_had_compressors():
    plain = stage()
    wrapped = SendCompressed(ReceiveCompressed(plain, AutoEncoder(HIDDEN, 3), SHAPE), AutoEncoder(HIDDEN, 2))
    dropped = drop_compressors(wrapped)
    assert dropped is plain
    model = nn.Sequential(SendCompressed(stage(), TopK(0.1)), nn.Linear(HIDDEN, HIDDEN))
    model[1].compressor = AutoEncoder(HIDDEN, 3)
    keys = set(model.state_dict())
    assert drop_compressors(model) is model
    assert set(model.state_dict()) == keys - {"1.compressor.encoder", "1.compressor.decoder"}
    assert isinstance(model[0], nn.Sequential) and isinstance(model[1].compressor, Identity)
    twice = nn.Module()
    twice.down = twice.up = TopK(0.1)
    drop_compressors(twice)
    assert isinstance(twice.down, Identity) and isinstance(twice.up, Identity)


def test_warm_up_sends_everything_until_compression_is_turned_on():
    send, receive = ends(TopK(0.25), TopK(0.25))
    x, codec = sample().float(), TopK(0.25)
    model = nn.ModuleList([send, receive, codec])
    set_compression(model, False)
    assert torch.equal(receive(*send(x)), x) and torch.equal(codec(x), x)
    set_compression(model, True)
    assert (receive(*send(x)) != 0).sum() == 30 and (codec(x) != 0).sum() == 30


def test_one_auto_encoder_may_serve_both_ends_and_two_start_as_one():
    shared, x = AutoEncoder(HIDDEN, 3), sample().float()
    together = ends(shared, shared)
    apart = ends(AutoEncoder(HIDDEN, 3), AutoEncoder(HIDDEN, 3))
    ys = [receive(*send(x)) for send, receive in (together, apart)]
    assert torch.equal(*ys)
    for y in ys:
        y.square().sum().backward()
    assert torch.equal(shared.encoder.grad, apart[0].compressor.encoder.grad)
    assert torch.equal(shared.decoder.grad, apart[1].compressor.decoder.grad)
    assert apart[0].compressor.decoder.grad is None and apart[1].compressor.encoder.grad is None
