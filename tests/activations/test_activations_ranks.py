"""Compressors of activations on two gloo ranks under tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from codecs_table import COMPRESSORS, HIDDEN, make, sample
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from compopt.activations import (
    AutoEncoder,
    CompressedRowwiseParallel,
    Identity,
    MeshRanks,
    SendCompressed,
)

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
