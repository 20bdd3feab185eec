"""Compressors at stage boundaries: both ends in one process, two gloo ranks, recomputation, torch.compile."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from codecs_table import COMPRESSORS, HIDDEN, SHAPE, make, sample
from ranks import run_ranks
from slow_rows import selected, slow_but
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

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
from compopt.activations.recompute import MAX_FORWARDS

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


def stages(name, pair=None):
    torch.manual_seed(1)
    body, head = nn.Linear(4, HIDDEN), nn.Linear(HIDDEN, 4)
    return (
        SendCompressed(body, COMPRESSORS[name](), pair=pair),
        ReceiveCompressed(head, COMPRESSORS[name](), (2, 5, HIDDEN), pair=pair),
    )


def run_pipeline(name, rank, pair):
    """GPipe over two micro-batches; records the boundary's activation, payload and gradient of the last one."""
    stage, records = stages(name, pair)[rank], {}

    def record(module, args, output):
        records["activation"] = output if rank == 0 else args[0]
        records["activation"].register_hook(lambda g: records.__setitem__("grad", g.clone()))

    stage.stage.register_forward_hook(record)
    stage.register_forward_hook(lambda m, args, output: records.__setitem__("payload", output if rank == 0 else args))
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, 2, torch.device("cpu")), 2, loss_fn=lambda y, target: (y - target).square().sum(),
        scale_grads=False,
    )  # fmt: skip
    x, target, losses = torch.randn(4, 5, 4), torch.randn(4, 5, 4), []
    for _ in range(2):
        schedule.step(x) if rank == 0 else schedule.step(target=target, losses=losses)
    parameters = {n: p.grad for n, p in stage.named_parameters()}
    payload = records["payload"] if isinstance(records["payload"], tuple) else (records["payload"],)
    activation, grad = records["activation"].detach(), records["grad"]
    return {"activation": activation, "payload": [t.detach() for t in payload], "grad": grad,
            "parameters": parameters, "x": x, "target": target, "losses": [v.item() for v in losses]}  # fmt: skip


def worker(rank, folder, names):
    pair, results = dist.new_group([0, 1]), {}
    for name in names:
        torch.manual_seed(5)
        results[name] = run_pipeline(name, rank, pair)
    torch.save(results, f"{folder}/{rank}.pt")


MAIN = ["Identity", "AutoEncoder", "TopK", "PowerSGD", "Quantize4"]  # the others with `make slow`


@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(worker, 2, str(folder), selected(request, "name"))
    return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", slow_but(lambda name: name in MAIN, COMPRESSORS))
def test_stage_boundary_sends_the_payload_only(two_ranks, name):
    sender, receiver = (results[name] for results in two_ranks)
    for sent, received in zip(sender["payload"], receiver["payload"], strict=True):
        assert torch.equal(sent.view(torch.uint8), received.view(torch.uint8))
    sent = sum(t.numel() * t.element_size() for t in sender["payload"])
    assert sent == COMPRESSORS[name]().bytes((2, 5, HIDDEN))


@pytest.mark.parametrize("name", ["Identity", "AutoEncoder", "TopK"])
def test_pipeline_trains_as_one_process_with_the_compressor_in_the_middle(two_ranks, name):
    sender, receiver = (results[name] for results in two_ranks)
    first, second = stages(name)
    for _ in range(2):
        for x, target in zip(receiver["x"].chunk(2), receiver["target"].chunk(2), strict=True):
            payload = first(x)
            y = second(*payload) if isinstance(payload, tuple) else second(payload)
            (y - target).square().sum().backward()
    for stage, results in ((first, sender), (second, receiver)):
        for key, parameter in stage.named_parameters():
            if parameter.grad is None:
                assert results["parameters"][key] is None
            else:
                torch.testing.assert_close(results["parameters"][key], parameter.grad)


@pytest.mark.parametrize("name", [pytest.param("RandomK", marks=pytest.mark.slow), "PowerSGD"])
def test_random_k_and_powersgd_boundaries_apply_one_projection_both_ways(two_ranks, name):
    sender, receiver = (results[name] for results in two_ranks)
    x, arrived = sender["activation"], receiver["activation"]
    torch.testing.assert_close((arrived * (x - arrived)).sum(), torch.tensor(0.0), atol=1e-4, rtol=0)
    if name == "RandomK":
        projected = receiver["grad"] * (arrived != 0)
    else:
        basis = sender["payload"][1]
        projected = (basis @ (basis.t() @ receiver["grad"].reshape(-1, HIDDEN))).view(x.shape)
    assert 0 < arrived.abs().sum() < x.abs().sum()
    torch.testing.assert_close(sender["grad"], projected)


@pytest.mark.parametrize(
    "name", slow_but("Quantize4".__eq__, ["Quantize2", "Quantize4", "Quantize8", "QuantizeTensor"])
)
def test_the_gradient_of_a_quantized_boundary_returns_in_full(two_ranks, name):
    sender, receiver = (results[name] for results in two_ranks)
    assert sender["grad"].abs().sum() > 0
    assert torch.equal(sender["grad"], receiver["grad"])


@pytest.mark.parametrize("name", ["QuantizeBack4", "QuantizeBeside4"])  # in the payload's place, or beside it
def test_with_gradient_bits_it_returns_quantized(two_ranks, name):
    sender, receiver = (results[name] for results in two_ranks)
    torch.testing.assert_close(sender["grad"], Quantize(4)(receiver["grad"]))


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


@pytest.mark.slow
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
