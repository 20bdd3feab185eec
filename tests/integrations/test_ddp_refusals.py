"""Under DistributedDataParallel: what cannot work is refused, and the words say what is wrong."""

from __future__ import annotations

import torch
import torch._dynamo
from ddp_models import Net, batch, radius
from ranks import catch_message, run_ranks
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt


def refusals(rank: int) -> dict[str, str]:
    results = {}
    torch.manual_seed(0)

    def forward_backward(model):
        model(batch(0)).square().mean().backward()

    selected = DDP(Net())
    selected.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook)
    optimizer = radius(selected.parameters())
    results["hook taken"] = catch_message(RuntimeError, lambda: forward_backward(selected))

    model = DDP(Net())
    optimizer = radius(list(model.parameters())[:-2])
    results["parameters of nobody"] = catch_message(RuntimeError, lambda: forward_backward(model))

    optimizer = radius(Net().parameters())
    results["no DDP"] = catch_message(ValueError, lambda: compopt.attach(Net(), optimizer))
    del optimizer

    nested = DDP(DDP(Net()))
    optimizer = radius(nested.parameters())
    results["DDP within a DDP"] = catch_message(RuntimeError, lambda: forward_backward(nested))

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DDP(Net())
    optimizer = radius(model.parameters())
    results["reducer in Python"] = catch_message(RuntimeError, lambda: forward_backward(model))

    net = Net()
    optimizer = radius(net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    results["averaged before"] = catch_message(RuntimeError, optimizer.step)

    params = list(Net().parameters())[:3]
    optimizer = radius(params if rank == 0 else params[::-1])
    results["other order"] = catch_message(ValueError, optimizer.step)
    results["other shapes"] = catch_message(ValueError, radius(params[:2] if rank == 0 else params[1::-1]).step)
    torch.manual_seed(rank)
    results["other weights"] = catch_message(ValueError, radius(Net().named_parameters()).step)
    optimizer = radius(params, density=0.5 if rank == 0 else 0.25)
    results["other density"] = catch_message(ValueError, optimizer.step)
    return results


def test_refusals_say_what_is_wrong():
    for results in run_ranks(refusals, 2):
        assert "comm hook already" in results["hook taken"]
        assert "belong to no compopt optimizer (branch.weight, branch.bias" in results["parameters of nobody"]
        assert "no DistributedDataParallel" in results["no DDP"]
        assert "set optimize_ddp = 'ddp_optimizer'" in results["reducer in Python"]
        assert (
            "wraps another one" in results["DDP within a DDP"] and "wrap the model once" in results["DDP within a DDP"]
        )
        assert "compopt.attach" in results["averaged before"]
        assert "parameter 0 of group 0, checksum of its values: rank 0 has" in results["other order"]
        assert "shape: rank 0 has (96, 96), rank 1 has (96,). Build the same model" in results["other shapes"]
        assert "layers.0.weight, checksum of its values" in results["other weights"]
        assert "group 0, density: rank 0 has 0.5, rank 1 has 0.25. Make them equal." in results["other density"]
