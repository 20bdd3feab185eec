"""Under DistributedDataParallel: what cannot work is refused, and the words say what is wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import run_ranks
from test_ddp import Net, batch, radius
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt


def said(error: type[Exception], function) -> str:
    """What ``function`` raised; the ranks stay in step because all raise."""
    try:
        function()
    except error as caught:
        return str(caught)
    return f"no {error.__name__}"


def refusals(rank: int) -> dict[str, str]:
    found = {}
    torch.manual_seed(0)

    def forward_backward(model):
        model(batch(0)).square().mean().backward()

    taken = DDP(Net())
    taken.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook)
    optimizer = radius(taken.parameters())
    found["hook taken"] = said(RuntimeError, lambda: forward_backward(taken))

    model = DDP(Net())
    optimizer = radius(list(model.parameters())[:-2])
    found["parameters of nobody"] = said(RuntimeError, lambda: forward_backward(model))

    alone = dist.new_group([rank], use_local_synchronization=True)
    model = DDP(Net())
    optimizer = radius(model.parameters(), process_group=alone)
    found["other ranks"] = said(ValueError, lambda: compopt.attach(model, optimizer))
    found["no DDP"] = said(ValueError, lambda: compopt.attach(Net(), optimizer))
    del optimizer

    nested = DDP(DDP(Net()))
    optimizer = radius(nested.parameters())
    found["DDP within a DDP"] = said(RuntimeError, lambda: forward_backward(nested))

    net = Net()
    optimizer = radius(net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    found["averaged before"] = said(RuntimeError, optimizer.step)

    params = list(Net().parameters())[:3]
    optimizer = radius(params if rank == 0 else params[::-1])
    found["other order"] = said(ValueError, optimizer.step)
    found["other shapes"] = said(ValueError, radius(params[:2] if rank == 0 else params[1::-1]).step)
    torch.manual_seed(rank)
    found["other weights"] = said(ValueError, radius(Net().named_parameters()).step)
    optimizer = radius(params, density=0.5 if rank == 0 else 0.25)
    found["other density"] = said(ValueError, optimizer.step)
    return found


def test_refusals_say_what_is_wrong():
    for found in run_ranks(refusals, 2):
        assert "comm hook already" in found["hook taken"]
        assert "belong to no compopt optimizer (branch.weight, branch.bias" in found["parameters of nobody"]
        assert "process_group of the optimizer has ranks" in found["other ranks"]
        assert "no DistributedDataParallel" in found["no DDP"]
        assert "wraps another one" in found["DDP within a DDP"] and "wrap the model once" in found["DDP within a DDP"]
        assert "compopt.attach" in found["averaged before"]
        assert "parameter 0 of group 0, checksum of its values: rank 0 has" in found["other order"]
        assert "shape: rank 0 has (96, 96), rank 1 has (96,). Build the same model" in found["other shapes"]
        assert "layers.0.weight, checksum of its values" in found["other weights"]
        assert "group 0, density: rank 0 has 0.5, rank 1 has 0.25. Make them equal." in found["other density"]
