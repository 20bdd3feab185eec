"""Compressors of activations: gradients, sizes, what they keep; on two gloo ranks under tensor parallelism."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from codecs_table import COMPRESSORS, HIDDEN, SHAPE, make, sample
from pairs import pairs
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize(("bits", "gradient_bits"), [(2, 2), (4, 4), (8, 8), (8, 4), (4, 2)])
def test_quantized_boundary_carries_a_quantized_gradient(bits, gradient_bits):
    x, upstream, codec = sample().requires_grad_(), sample(1), Quantize(bits, gradient_bits=gradient_bits)
    values, side = codec.compress(x)
    codec.decompress(values, side, SHAPE).backward(upstream)
    assert torch.equal(x.grad, Quantize(gradient_bits)(upstream))


def test_a_gradient_too_large_for_the_payload_says_so():
    for codec in (Quantize(2), Quantize(2, gradient_bits=8)):
        x = sample().requires_grad_()
        with pytest.raises(RuntimeError, match="does not fit into a payload of 2"):
            codec.decompress(*codec.compress(x), SHAPE).sum().backward()


@pytest.mark.parametrize(
    ("shape", "dtype", "bits", "scale"),
    pairs(
        [(1,), (7,), (3, 1), (5, 3, 8), (2, 64)],
        [torch.float32, torch.float64, torch.bfloat16],
        [2, 4, 8],
        ["channel", "tensor"],
    ),
)
def test_quantization_rounds_to_the_nearest_of_its_levels(bits, dtype, shape, scale):
    """Against all 2^bits levels written down, -s to s(1 - 1/half), for the bfloat16 scale s of every channel."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(bits)).to(dtype)
    half = 2 ** (bits - 1)
    s = x.abs().reshape(-1, shape[-1]).amax(0) if scale == "channel" else x.abs().max()
    s = s.bfloat16().double()
    levels = torch.arange(-half, half) / half
    distance = (x.double()[..., None] - levels * s[..., None]).abs()
    got = Quantize(bits, scale=scale)(x)
    assert got.dtype == dtype
    error = (got.double() - x.double()).abs()
    assert (error <= distance.amin(-1) + 2 * torch.finfo(dtype).eps * s).all()
    assert torch.equal(Quantize(bits)(torch.zeros(shape, dtype=dtype)), torch.zeros(shape, dtype=dtype))


def test_one_large_channel_spoils_a_common_scale_and_no_scale_a_channel():
    x = sample().float() * torch.tensor([1000.0] + [1.0] * 7)
    small = x[..., 1:]
    assert (Quantize(4)(x)[..., 1:] - small).norm() < 0.2 * small.norm()
    assert (Quantize(4, scale="tensor")(x)[..., 1:] == 0).all()


def test_stochastic_rounding_is_unbiased():
    x = torch.full((20000, 1), 0.3)
    x[0] = 1.0
    torch.manual_seed(0)
    assert Quantize(2, stochastic=True)(x)[1:].mean().item() == pytest.approx(0.3, abs=0.01)
    assert (Quantize(2)(x)[1:] == 0.5).all()  # what rounding to the nearest makes of it


def test_a_quantized_infinity_does_not_look_like_a_number():
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(5, 4)
        x[2, 1] = bad
        got = Quantize(8)(x)
        assert not got[:, 1].isfinite().any() and got[:, [0, 2, 3]].isfinite().all()


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


def test_powersgd_survives_a_batch_whose_products_overflow():
    """The basis of such a batch is finite, and every later product with it is not."""
    codec, x = PowerSGD(2, HIDDEN), 1e3 * sample().float()
    codec(1e33 * x)
    assert codec(x).isfinite().all()


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
        (lambda: Quantize(2, gradient_bits=16), "gradient_bits"),
        (lambda: Quantize(2, scale="row"), "scale"),
        (lambda: SendCompressed(nn.ReLU(), Quantize(2)), r"pair=torch.distributed.new_group"),
        (lambda: SendCompressed(nn.ReLU(), Quantize(2, gradient_bits=4)), "pair"),
        (lambda: ReceiveCompressed(nn.ReLU(), Identity(), ()), "micro-batch"),
    ],
)
def test_errors_name_the_argument(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_compressor_in_place_of_a_function_that_makes_one_is_refused_where_it_is_passed():
    for wrong in (TopK(0.1), None, 3):
        with pytest.raises(TypeError, match="make must be a function"):
            CompressedRowwiseParallel(wrong)
    with pytest.raises(TypeError, match="must be a Compressor"):
        SendCompressed(nn.ReLU(), nn.ReLU())


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("shape", [(0, 5, HIDDEN), (3, 0, HIDDEN)])
def test_no_tokens_are_compressed_to_nothing(name, shape):
    codec, x = make(name), torch.empty(shape, dtype=torch.float64, requires_grad=True)
    y = codec(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    values, side = make(name).compress(x.detach())
    sent = sum(t.numel() * t.element_size() for t in (values, side) if t is not None)
    assert sent == codec.bytes(shape, torch.float64) and sent <= 16


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_follows_may_change_the_output_in_place(name):
    results = []
    for inplace in (False, True):
        x = sample().requires_grad_()
        y = nn.ReLU(inplace=inplace)(make(name)(x * 1))
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["AutoEncoder", "PowerSGD"])
def test_made_on_the_meta_device_a_compressor_is_what_it_would_have_been(name):
    with torch.device("meta"):
        late = nn.Sequential(COMPRESSORS[name]())
    assert all(t.is_meta for t in late.state_dict().values())
    late.to_empty(device="cpu")
    for module in late.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    at_once = nn.Sequential(COMPRESSORS[name]())
    assert late.state_dict().keys() == at_once.state_dict().keys()
    for key, value in at_once.state_dict().items():
        assert torch.equal(late.state_dict()[key], value)


def test_auto_encoders_start_alike_wherever_they_are_made_and_otherwise_by_another_seed():
    first, second, other = AutoEncoder(8, 3), AutoEncoder(8, 3), AutoEncoder(8, 3, seed=1)
    assert torch.equal(first.encoder, second.encoder) and not torch.equal(first.encoder, other.encoder)
    torch.testing.assert_close(first.encoder.t() @ first.encoder, torch.eye(3))
    assert torch.equal(first.encoder.t(), first.decoder)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_a_bfloat16_activation_passes_an_auto_encoder_of_either_precision(default):
    torch.set_default_dtype(default)
    try:
        codec = AutoEncoder(HIDDEN, HIDDEN)
    finally:
        torch.set_default_dtype(torch.float32)
    assert codec.encoder.dtype == default
    x = sample().bfloat16().requires_grad_()
    y = codec(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16 and codec.encoder.grad.dtype == default
    assert (y - x).norm() < 0.02 * x.norm()


PLAIN = ["Identity", "AutoEncoder", "TopK", "RandomK", "PowerSGD", "Quantize4", "QuantizeStochastic"]


class MLP(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16, bias=bias), nn.Linear(16, HIDDEN, bias=bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def run_mlp(mesh, style, bias, dtype=torch.float32, checkpointed=False):
    torch.manual_seed(0)
    mlp = parallelize_module(MLP(bias).to(dtype), mesh, {"up": ColwiseParallel(), "down": style})
    x = sample().to(dtype).requires_grad_()
    for _ in range(2 if checkpointed is not False else 1):
        mlp.zero_grad()
        x.grad = None
        torch.manual_seed(mesh.get_local_rank())  # dropout's, where a model has it, differs between ranks
        y = checkpoint(mlp, x, use_reentrant=checkpointed == "reentrant") if checkpointed else mlp(x)
        y.to_local().square().sum().backward() if isinstance(y, DTensor) else y.square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(mlp.parameters(), 1e9)
    grads = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in mlp.named_parameters()}
    tokens = torch.tensor(y.to_local().shape[1] if isinstance(y, DTensor) else y.shape[1])
    y = y.full_tensor() if isinstance(y, DTensor) else y
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return {"y": y.detach(), "x": x.grad, "norm": norm, "tokens": tokens, **grads}


def run_exchange(name, mesh, rank):
    """One compressed all-reduce of each rank's own activation, twice so that state carries over."""
    codec, x = make(name), sample(rank).requires_grad_()
    codec(sample(10 + rank), MeshRanks(mesh))
    codec.zero_grad()
    y = codec(x, MeshRanks(mesh))
    y.backward(sample(7))
    return {"y": y.detach(), "x": x.grad, "encoder": getattr(getattr(codec, "encoder", None), "grad", None)}


def made_on_meta(mesh):
    """The compressors' weights of a model parallelized before it had any memory."""
    with torch.device("meta"):
        mlp = MLP()
    style = CompressedRowwiseParallel(lambda: AutoEncoder(HIDDEN, 3))
    parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": style})
    mlp.to_empty(device="cpu")
    mlp.down.compressor.reset_parameters()
    return {key: value.full_tensor() for key, value in mlp.down.compressor.state_dict().items()}


def worker(rank, folder):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    results = {"mlp": {}, "exchange": {}, "sequence": {}, "checkpointed": {}}
    for bias in (True, False):
        results["mlp"]["torch", bias] = run_mlp(mesh, RowwiseParallel(), bias)
        results["mlp"]["Identity", bias] = run_mlp(mesh, CompressedRowwiseParallel(Identity), bias)

    def auto_encoder():  # ranks that disagree on the seed must still start from one auto-encoder
        return AutoEncoder(HIDDEN, 3, seed=rank)

    results["auto-encoder"] = run_mlp(mesh, CompressedRowwiseParallel(auto_encoder), True)
    for name in COMPRESSORS:
        results["exchange"][name] = run_exchange(name, mesh, rank)
    for name in PLAIN:
        style = CompressedRowwiseParallel(COMPRESSORS[name])
        again = CompressedRowwiseParallel(COMPRESSORS[name], output_layouts=Shard(1), use_local_output=False)
        results["sequence"][name] = run_mlp(mesh, style, True), run_mlp(mesh, again, True)
        for how in ("", "reentrant", "not reentrant"):
            style = CompressedRowwiseParallel(COMPRESSORS[name])
            results["checkpointed"][name, how] = run_mlp(mesh, style, True, torch.float64, how)
    results["bfloat16"] = run_mlp(mesh, CompressedRowwiseParallel(auto_encoder), True, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        results["autocast"] = [
            run_mlp(mesh, style, True) for style in (RowwiseParallel(), CompressedRowwiseParallel(Identity))
        ]
    results["meta"] = made_on_meta(mesh)
    with pytest.raises(TypeError, match="no DTensor; Identity returned DTensor"):
        SendCompressed(nn.Identity(), Identity())(DTensor.from_local(sample(), mesh, [Shard(1)]))
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(worker, 2, str(folder))
    return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("bias", [True, False])
def test_tensor_parallel_without_compression_is_torchs(two_ranks, bias):
    for results in two_ranks:
        ours, theirs = results["mlp"]["Identity", bias], results["mlp"]["torch", bias]
        assert ours.keys() == theirs.keys() and len(ours) >= 4
        if bias:  # added after the exchange, by torch before it
            for key in ours:
                torch.testing.assert_close(ours[key], theirs[key])
        else:
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_under_autocast_the_output_has_its_precision(two_ranks):
    for results in two_ranks:
        theirs, ours = results["autocast"]
        assert ours["y"].dtype == theirs["y"].dtype == torch.bfloat16
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=0.05, atol=0.05)


def test_a_bias_is_not_compressed(two_ranks):
    """Its gradient is that of an addition, and the output differs from what the codec lets through by it."""
    for results in two_ranks:
        run = results["sequence"]["RandomK"][0]
        torch.manual_seed(0)
        bias = MLP().down.bias.detach()
        untouched = torch.isclose(run["y"], bias.expand_as(run["y"]))
        assert untouched.sum() >= 90  # all but a quarter of 120
        torch.testing.assert_close(run["down.bias"], 2 * run["y"].sum((0, 1)))


@pytest.mark.parametrize("name", PLAIN)
def test_sequence_parallel_output_is_the_replicated_one_cut(two_ranks, name):
    for results, tokens in zip(two_ranks, (3, 2), strict=True):
        whole, cut = results["sequence"][name]
        assert whole.pop("tokens") == 5 and cut.pop("tokens") == tokens
        assert whole.keys() == cut.keys()
        for key in whole:
            torch.testing.assert_close(cut[key], whole[key])


@pytest.mark.parametrize("name", PLAIN)
def test_checkpointing_changes_nothing_under_tensor_parallelism(two_ranks, name):
    for results in two_ranks:
        plain = results["checkpointed"][name, ""]
        for how in ("reentrant", "not reentrant"):
            for key, value in results["checkpointed"][name, how].items():
                torch.testing.assert_close(value, plain[key], rtol=1e-6, atol=1e-9)


def test_clipping_takes_the_auto_encoder_in_and_in_bfloat16_too(two_ranks):
    assert two_ranks[0]["bfloat16"]["down.compressor.encoder"].dtype == torch.bfloat16
    for dtype in ("auto-encoder", "bfloat16"):
        for results in two_ranks:
            grads = [value for key, value in results[dtype].items() if key not in ("x", "y", "norm", "tokens")]
            assert len(grads) == 6
            expected = torch.stack([grad.float().norm() for grad in grads]).norm()
            torch.testing.assert_close(results[dtype]["norm"].float(), expected, rtol=2e-2, atol=0)


def test_made_on_meta_the_auto_encoder_is_one_over_the_ranks(two_ranks):
    expected = AutoEncoder(HIDDEN, 3).state_dict()
    for results in two_ranks:
        assert all(torch.equal(results["meta"][key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    "name", [n for n in COMPRESSORS if n != "QuantizeStochastic"]
)  # the first draws anew, the others have met one activation already
def test_compressed_all_reduce_is_the_sum_and_its_gradient_exact(two_ranks, name):
    """Against the same formula in one process: decompress(sum of values), or the sum of the decompressed."""
    results = [rank["exchange"][name] for rank in two_ranks]
    assert torch.equal(results[0]["y"], results[1]["y"])
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
        torch.testing.assert_close(results[rank]["y"], y.detach())
        torch.testing.assert_close(results[rank]["x"], parts[rank].grad)
        if name == "AutoEncoder":  # the encoder sees half of the sum on each rank; its gradient must be the whole
            torch.testing.assert_close(results[rank]["encoder"], codec.encoder.grad)


def test_auto_encoder_is_and_stays_one_over_the_ranks(two_ranks):
    first, second = (results["auto-encoder"] for results in two_ranks)
    assert {"down.compressor.encoder", "down.compressor.decoder"} <= first.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
