"""Shard inside a node, compress between nodes: FSDP2 and compopt on a 2 x 2 mesh of processes.

torchrun --nproc-per-node 4 --standalone examples/hsdp.py
torchrun --nproc-per-node 4 --standalone examples/hsdp.py --ddp --optimizer separate   # DDP inside a node: make sites
torchrun --nproc-per-node 8 --nnodes 4 ... examples/hsdp.py --nodes 4       # on GPUs: a node each
"""

import argparse
import os

import corpus
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT

import compopt


def parse():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--nodes", type=int, default=2, help="replicas; the gradients between them are compressed")
    cli.add_argument("--batch", type=int, default=8, help="sequences a step, on each rank")
    cli.add_argument("--every", type=int, help="local steps between syncs (default: none, every step averages)")
    cli.add_argument("--ddp", action="store_true", help="every rank of a node holds the whole model, as under DDP")
    cli.add_argument("--optimizer", choices=["radius", "separate"], default="radius", help="without --every")
    cli.add_argument("--density", type=float, default=0.1, help="share of the gradient sent between nodes")
    cli.add_argument("--data", help="a file to train on (default: the Python standard library's source)")
    cli.add_argument("--checkpoint", help="a folder: continued from if it is there, written at the end")
    for name, default in dict(steps=200, layers=4, heads=4, width=128, context=64, lr=2e-3).items():
        cli.add_argument("--" + name, type=type(default), default=default)
    return cli.parse_args()


def main():
    args = parse()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = "cuda" if cuda else "cpu"

    # Ranks that share a node differ in the last dimension: fully_shard averages over these, densely.
    mesh = init_device_mesh(device, (args.nodes, world // args.nodes), mesh_dim_names=("replicate", "shard"))
    model = GPT(args.layers, args.width, args.heads, args.context).to(device)
    if args.ddp:
        model = DistributedDataParallel(model, process_group=mesh.get_group("shard"))
    else:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    # The optimizer averages each rank's shards, or its whole gradient, over the other dimension, where it makes
    # parameters equal first.
    between = dict(max_grad_norm=1.0, process_group=mesh.get_group("replicate"))
    if args.every:
        adamw = torch.optim.AdamW(model.parameters(), lr=args.lr)
        optimizer = compopt.LocalSteps(adamw, args.every, growth_steps=args.steps // 3, **between)
    elif args.optimizer == "separate":
        optimizer = compopt.SeparateAdam(model.parameters(), lr=args.lr, **between)
    else:
        radius = dict(density=args.density, interval=50, dense_steps=args.steps // 7)
        optimizer = compopt.RadiusAdamW(model.parameters(), lr=args.lr, **radius, **between)
    begin = 0
    if args.checkpoint and os.path.isdir(args.checkpoint):
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "step": 0}
        dcp.load(saved, checkpoint_id=args.checkpoint)
        begin = saved["step"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    text, _ = corpus.load(args.data)
    data = corpus.batches(text, args.batch, args.context, seed=1000 * begin + rank)  # its own on each rank
    for step in range(begin + 1, begin + args.steps + 1):
        x, y = next(data)
        loss = model(x.to(device), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            stats = optimizer.stats
            if rank == 0:
                share = stats.bytes_sent / stats.bytes_dense
                print(f"step {step} loss {mean.item() / world:.3f} {stats.phase}, {share:.3f} of the bytes", flush=True)

    if args.every:
        optimizer.end_round()  # on all ranks: all nodes have the same model then
    if args.checkpoint:
        optimizer.consolidate_state()  # on all ranks: the checkpoint then loads on any mesh
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state, "step": begin + args.steps}, checkpoint_id=args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
