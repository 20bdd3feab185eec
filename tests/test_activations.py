"""Compressors of activations: gradients, sizes, and the real thing on two gloo ranks (tensor, then pipeline)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from compopt.activations import (
    ALONE,
    AutoEncoder,
    CompressedRowwiseParallel,
    Compressor,
    Identity,
    MeshRanks,
    PowerSGD,
    Quantize,
    RandomK,
    ReceiveCompressed,
    SendCompressed,
    TopK,
)

HIDDEN, SHAPE = 8, (3, 5, 8)
COMPRESSORS = {
    "Identity": Identity,
    "AutoEncoder": lambda: AutoEncoder(HIDDEN, 3),
    "TopK": lambda: TopK(0.25),
    "RandomK": lambda: RandomK(0.25),
    "PowerSGD": lambda: PowerSGD(2, HIDDEN),
    "Quantize2": lambda: Quantize(2),
    "Quantize4": lambda: Quantize(4),
    "Quantize8": lambda: Quantize(8),
    "QuantizeStochastic": lambda: Quantize(4, stochastic=True),
}


def make(name: str) -> Compressor:
    torch.manual_seed(3)
    return COMPRESSORS[name]().double()


def sample(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# One process


@pytest.mark.parametrize("name", ["Identity", "AutoEncoder", "TopK", "RandomK"])
def test_gradient_is_the_exact_vector_jacobian_product(name):
    start = make(name)
    weights = [p.detach().clone().requires_grad_() for p in start.parameters()]

    def through(x, *weights):
        compressor = copy.deepcopy(start)  # a fresh copy draws the same positions
        names = [n for n, _ in compressor.named_parameters()]
        return torch.func.functional_call(compressor, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(through, (sample().requires_grad_(), *weights))


def test_powersgd_gradient_is_that_of_the_projection_it_applied():
    compressor, x = make("PowerSGD"), sample().requires_grad_()
    _, basis = copy.deepcopy(compressor).compress(x.detach())
    assert torch.autograd.gradcheck(lambda x: (basis @ (basis.t() @ x.reshape(-1, HIDDEN))).view(SHAPE), (x,))
    upstream = sample(1)
    compressor(x).backward(upstream)
    expected = (basis @ (basis.t() @ upstream.reshape(-1, HIDDEN))).view(SHAPE)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("name", [n for n in COMPRESSORS if n.startswith("Quantize")])
def test_quantized_gradient_is_straight_through(name):
    x, upstream = sample().requires_grad_(), sample(1)
    make(name)(x).backward(upstream)
    assert torch.equal(x.grad, upstream)


@pytest.mark.parametrize("name", ["Quantize2", "Quantize4", "Quantize8"])
def test_quantized_boundary_carries_a_quantized_gradient(name):
    x, upstream, codec = sample().requires_grad_(), sample(1), make(name)
    values, side = codec.compress(x)
    codec.decompress(values, side, SHAPE).backward(upstream)
    assert torch.equal(x.grad, codec(upstream))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 7, 64])
def test_quantization_is_within_half_a_step(bits, dtype, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    step = x.abs().max() / (2 ** (bits - 1) - 1)
    slack = 1 + 64 * torch.finfo(dtype).eps
    assert (Quantize(bits)(x) - x).abs().max() <= step / 2 * slack + step * 2 ** (bits - 1) * torch.finfo(dtype).eps
    assert torch.equal(Quantize(bits)(torch.zeros(n, dtype=dtype)), torch.zeros(n, dtype=dtype))


def test_stochastic_rounding_is_unbiased():
    x = torch.full((20000,), 0.3).index_fill(0, torch.tensor([0]), 1.0)
    torch.manual_seed(0)
    assert Quantize(2, stochastic=True)(x)[1:].mean().item() == pytest.approx(0.3, abs=0.02)
    assert Quantize(2)(x)[1:].abs().max() == 0  # what rounding to the nearest makes of it


def test_a_quantized_infinity_does_not_look_like_a_number():
    x = torch.ones(4).index_fill(0, torch.tensor([2]), math.inf)
    assert not Quantize(8)(x).isfinite().all()


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_is_what_is_sent(name, dtype):
    compressor = make(name).to(dtype)
    values, side = compressor.compress(sample().to(dtype))
    sent = sum(t.numel() * t.element_size() for t in (values, side) if t is not None)
    assert compressor.bytes(SHAPE, dtype) == sent
    assert compressor.decompress(values, side, SHAPE).dtype == dtype


def test_top_k_keeps_the_largest_and_random_k_every_element_equally_often():
    x = sample()
    kept = make("TopK")(x)
    assert (kept != 0).sum() == 30 and kept[kept != 0].abs().min() >= x[kept == 0].abs().max()
    codec, hits = RandomK(0.25), torch.zeros(SHAPE)
    for _ in range(2000):
        hits += codec(torch.ones(SHAPE))
    assert hits.sum() == 2000 * 30 and hits.min() > 400 and hits.max() < 600


def test_powersgd_finds_a_low_rank_activation_and_survives_a_bad_batch():
    codec = PowerSGD(2, HIDDEN)
    x = torch.randn(15, 2) @ torch.randn(2, HIDDEN)
    torch.testing.assert_close(codec(x), x, rtol=1e-4, atol=1e-4)
    codec(torch.full((15, HIDDEN), math.nan))
    torch.testing.assert_close(codec(x), x, rtol=1e-4, atol=1e-4)


def test_an_auto_encoder_as_wide_as_the_activation_loses_nothing():
    x = sample().float()
    torch.testing.assert_close(AutoEncoder(HIDDEN, HIDDEN)(x), x)


class Halves(Compressor):  # the example of the package's documentation
    summable = True

    def compress(self, x, ranks=ALONE):
        return x.unflatten(-1, (-1, 2)).mean(-1), None

    def decompress(self, values, side, shape):
        return values.repeat_interleave(2, dim=-1).view(shape)

    def bytes(self, shape, dtype=torch.float32):
        return math.prod(shape) // 2 * dtype.itemsize


def test_a_compressor_of_ones_own_needs_three_methods():
    assert Halves()(sample()).shape == SHAPE
    assert torch.autograd.gradcheck(Halves(), (sample().requires_grad_(),))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: AutoEncoder(8, 9), "code must be"),
        (lambda: TopK(0.0), "density"),
        (lambda: RandomK(1.5), "density"),
        (lambda: PowerSGD(0, 8), "rank"),
        (lambda: Quantize(3), "bits"),
        (lambda: ReceiveCompressed(nn.ReLU(), Identity(), ()), "micro-batch"),
    ],
)
def test_errors_name_the_argument(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# Two ranks


class MLP(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16, bias=bias), nn.Linear(16, HIDDEN, bias=bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def run_mlp(mesh, style, bias):
    torch.manual_seed(0)
    mlp = parallelize_module(MLP(bias), mesh, {"up": ColwiseParallel(), "down": style})
    x = sample().float().requires_grad_()
    y = mlp(x)
    y.square().sum().backward()
    grads = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in mlp.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def run_exchange(name, mesh, rank):
    """One compressed all-reduce of each rank's own activation, twice so that state carries over."""
    codec, x = make(name), sample(rank).requires_grad_()
    codec(sample(10 + rank), MeshRanks(mesh))
    codec.zero_grad()
    y = codec(x, MeshRanks(mesh))
    y.backward(sample(7))
    return {"y": y.detach(), "x": x.grad, "encoder": getattr(getattr(codec, "encoder", None), "grad", None)}


def stages(name):
    torch.manual_seed(1)
    body, head = nn.Linear(4, HIDDEN), nn.Linear(HIDDEN, 4)
    return (
        SendCompressed(body, COMPRESSORS[name]()),
        ReceiveCompressed(head, COMPRESSORS[name](), (2, 5, HIDDEN)),
    )


def run_pipeline(name, rank):
    """GPipe over two micro-batches; records the boundary's activation, payload and gradient of the last one."""
    stage, seen = stages(name)[rank], {}

    def record(module, args, output):
        seen["activation"] = output if rank == 0 else args[0]
        seen["activation"].register_hook(lambda g: seen.__setitem__("grad", g.clone()))

    stage.stage.register_forward_hook(record)
    stage.register_forward_hook(lambda m, args, output: seen.__setitem__("payload", output if rank == 0 else args))
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, 2, torch.device("cpu")), 2, loss_fn=lambda y, target: (y - target).square().sum(),
        scale_grads=False,
    )  # fmt: skip
    x, target, losses = torch.randn(4, 5, 4), torch.randn(4, 5, 4), []
    for _ in range(2):
        schedule.step(x) if rank == 0 else schedule.step(target=target, losses=losses)
    parameters = {n: p.grad for n, p in stage.named_parameters()}
    payload = seen["payload"] if isinstance(seen["payload"], tuple) else (seen["payload"],)
    return {"activation": seen["activation"].detach(), "payload": [t.detach() for t in payload], "grad": seen["grad"],
            "parameters": parameters, "x": x, "target": target, "losses": [v.item() for v in losses]}  # fmt: skip


def worker(rank, folder):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    found = {"mlp": {}, "exchange": {}, "pipeline": {}}
    for bias in (True, False):
        found["mlp"]["torch", bias] = run_mlp(mesh, RowwiseParallel(), bias)
        found["mlp"]["Identity", bias] = run_mlp(mesh, CompressedRowwiseParallel(Identity), bias)

    def auto_encoder():
        torch.manual_seed(100 + rank)  # ranks that disagree on the seed must still start from one auto-encoder
        return AutoEncoder(HIDDEN, 3)

    found["auto-encoder"] = run_mlp(mesh, CompressedRowwiseParallel(auto_encoder), True)
    for name in COMPRESSORS:
        found["exchange"][name] = run_exchange(name, mesh, rank)
    for name in COMPRESSORS:
        torch.manual_seed(5)
        found["pipeline"][name] = run_pipeline(name, rank)
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(worker, 2, str(folder))
    return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("bias", [True, False])
def test_tensor_parallel_without_compression_is_bit_equal_to_torch(two_ranks, bias):
    for found in two_ranks:
        ours, theirs = found["mlp"]["Identity", bias], found["mlp"]["torch", bias]
        assert ours.keys() == theirs.keys() and len(ours) >= 4
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name", [n for n in COMPRESSORS if n != "QuantizeStochastic"])  # that one draws anew
def test_compressed_all_reduce_is_the_sum_and_its_gradient_exact(two_ranks, name):
    """Against the same formula in one process: decompress(sum of values), or the sum of the decompressed."""
    found = [rank["exchange"][name] for rank in two_ranks]
    assert torch.equal(found[0]["y"], found[1]["y"])
    parts = [sample(rank).requires_grad_() for rank in range(2)]
    codec = make(name)
    if codec.summable:
        codec(sample(10) + sample(11))  # linear: what two ranks do together, one does with the sum
        codec.zero_grad()
        y = codec(parts[0] + parts[1])
    else:
        y = codec(parts[0]) + codec(parts[1])
    y.backward(sample(7))
    for rank in range(2):
        torch.testing.assert_close(found[rank]["y"], y.detach())
        torch.testing.assert_close(found[rank]["x"], parts[rank].grad)
        if name == "AutoEncoder":  # the encoder sees half of the sum on each rank; its gradient must be the whole
            torch.testing.assert_close(found[rank]["encoder"], codec.encoder.grad)


def test_auto_encoder_is_and_stays_one_over_the_ranks(two_ranks):
    first, second = (found["auto-encoder"] for found in two_ranks)
    assert {"down.compressor.encoder", "down.compressor.decoder"} <= first.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_stage_boundary_sends_the_payload_only(two_ranks, name):
    sender, receiver = (found["pipeline"][name] for found in two_ranks)
    for sent, received in zip(sender["payload"], receiver["payload"], strict=True):
        assert torch.equal(sent.view(torch.uint8), received.view(torch.uint8))
    sent = sum(t.numel() * t.element_size() for t in sender["payload"])
    assert sent == COMPRESSORS[name]().bytes((2, 5, HIDDEN))


@pytest.mark.parametrize("name", ["Identity", "AutoEncoder", "TopK"])
def test_pipeline_trains_as_one_process_with_the_compressor_in_the_middle(two_ranks, name):
    sender, receiver = (found["pipeline"][name] for found in two_ranks)
    first, second = stages(name)
    for _ in range(2):
        for x, target in zip(receiver["x"].chunk(2), receiver["target"].chunk(2), strict=True):
            payload = first(x)
            y = second(*payload) if isinstance(payload, tuple) else second(payload)
            (y - target).square().sum().backward()
    for stage, found in ((first, sender), (second, receiver)):
        for key, parameter in stage.named_parameters():
            if parameter.grad is None:
                assert found["parameters"][key] is None
            else:
                torch.testing.assert_close(found["parameters"][key], parameter.grad)


def test_random_k_and_powersgd_boundaries_apply_one_projection_both_ways(two_ranks):
    for name in ("RandomK", "PowerSGD"):
        sender, receiver = (found["pipeline"][name] for found in two_ranks)
        x, arrived = sender["activation"], receiver["activation"]
        torch.testing.assert_close((arrived * (x - arrived)).sum(), torch.tensor(0.0), atol=1e-4, rtol=0)
        if name == "RandomK":
            projected = receiver["grad"] * (arrived != 0)
        else:
            basis = sender["payload"][1]
            projected = (basis @ (basis.t() @ receiver["grad"].reshape(-1, HIDDEN))).view(x.shape)
        assert 0 < arrived.abs().sum() < x.abs().sum()
        torch.testing.assert_close(sender["grad"], projected)


@pytest.mark.parametrize("name", ["Quantize4", "Quantize8"])
def test_quantized_boundary_quantizes_the_gradient_that_returns(two_ranks, name):
    sender, receiver = (found["pipeline"][name] for found in two_ranks)
    torch.testing.assert_close(sender["grad"], COMPRESSORS[name]()(receiver["grad"]))
