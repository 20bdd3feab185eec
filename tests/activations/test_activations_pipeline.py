"""Compressors of activations at the boundary of two pipeline stages, on two gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from codecs_table import COMPRESSORS, HIDDEN
from ranks import run_ranks
from slow_rows import selected, slow_but
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from compopt.activations import Quantize, ReceiveCompressed, SendCompressed


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
