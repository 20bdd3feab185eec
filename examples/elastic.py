"""Local steps on nodes that come and go: a run that survives lost workers and nodes, and takes in new ones.

On every node, HOST being one of them that stays:

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # torch 2.13's shared store does not survive new nodes
torchrun --nnodes 1:4 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/elastic.py

Whenever the nodes change, torchrun starts all workers again, and they go on from the newest snapshot.
"""

import argparse
import json
import os
import sys
import time
from datetime import timedelta

import corpus
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT

import compopt
from compopt.integrations.snapshots import Snapshots


def parse():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--snapshots", default="snapshots", help="a folder of this node, or one that all nodes see")
    cli.add_argument("--data", help="a file to train on (default: the Python standard library's source)")
    cli.add_argument("--losses", help="a file to which rank 0 adds a line of JSON for each step")
    cli.add_argument("--timeout", type=int, default=300, help="seconds after which a silent rank counts as lost")
    cli.add_argument("--growth", type=int, default=200, help="steps in which rounds grow to their length")
    for name, default in dict(steps=1000, every=30, batch=8, layers=4, heads=4, width=128, context=64, lr=2e-3).items():
        cli.add_argument("--" + name, type=type(default), default=default)
    return cli.parse_args()


class Batches:
    """Batches at random places, which depend on how many batches all ranks have taken: its position goes on."""

    def __init__(self, text, batch, context):
        self.text, self.batch, self.context, self.taken = text, batch, context, 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]

    def next(self, rank, ranks):
        """This rank's batch of the next ``ranks`` batches."""
        batches = corpus.batches(self.text, self.batch, self.context, seed=self.taken + rank)
        self.taken += ranks
        return next(batches)


def main():
    args = parse()
    torch.set_num_threads(1)
    agent = os.getppid()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=args.timeout))
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    model = GPT(args.layers, args.width, args.heads, args.context).to(device)
    ddp = DistributedDataParallel(model)
    adamw = torch.optim.AdamW(ddp.parameters(), lr=args.lr)
    optimizer = compopt.LocalSteps(adamw, every=args.every, growth_steps=args.growth)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps, eta_min=args.lr / 10)
    data = Batches(corpus.load(args.data)[0], args.batch, args.context)
    snapshots = Snapshots(args.snapshots, ddp, optimizer, decay=decay, data=data)
    begin = snapshots.resume()
    count = f"{ranks} rank{'' if ranks == 1 else 's'}"
    if rank == 0:
        print(f"{count} go{'es' if ranks == 1 else ''} on after step {begin}", flush=True)
    for step in range(begin + 1, args.steps + 1):
        if os.getppid() != agent:  # this node's torchrun is gone, and would not notice that others restart
            sys.exit("the agent of this worker is gone")
        x, y = data.next(rank, ranks)
        loss = ddp(x.to(device), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        if rank == 0 and args.losses:
            with open(args.losses, "a") as log:
                line = {"step": step, "loss": loss.item(), "ranks": ranks, "time": time.time()}
                log.write(json.dumps(line) + "\n")
        if optimizer.stats.steps_into_round == 0:  # the same step on all ranks, whose models are equal now
            snapshots.save()
    optimizer.end_round()
    snapshots.save()
    snapshots.close()
    if rank == 0:
        loss = f", loss {loss.item():.3f}" if begin < args.steps else ""  # the last snapshot may be of the last step
        print(f"finished {args.steps} steps on {count}{loss}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
