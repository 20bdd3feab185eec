"""Train a small GPT on source code, on one process or many, with gradients averaged by DDP or by the optimizer.

python examples/train_gpt.py
torchrun --nproc-per-node 2 --standalone examples/train_gpt.py --optimizer radius --out radius.json
"""

import argparse
import json
import math
import os
import time
from collections import Counter
from statistics import mean, median

import baselines
import corpus
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context, vocabulary=256):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False); self.head.weight = self.bytes.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:  # every block adds to x twice: scaled so that x does not grow with the depth
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if "out." in name or "down." in name else 1))

    def forward(self, x, y):
        h = self.bytes(x) + self.positions.weight[: x.shape[1]]
        return F.cross_entropy(self.head(self.norm(self.blocks(h))).flatten(0, 1), y.flatten())


def parse():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--optimizer", default="adamw", choices=["adamw", "radius", "powersgd", "topk"])
    cli.add_argument("--lr", type=float, default=2e-3)
    cli.add_argument("--weight-decay", type=float, default=1e-2)
    cli.add_argument("--steps", type=int, default=1500)
    cli.add_argument("--batch", type=int, default=8, help="sequences a step, on each rank")
    cli.add_argument("--context", type=int, default=128, help="bytes in a sequence")
    cli.add_argument("--layers", type=int, default=4)
    cli.add_argument("--heads", type=int, default=4)
    cli.add_argument("--width", type=int, default=128)
    cli.add_argument("--density", type=float, default=0.4, help="share of the gradient that is sent (radius, topk)")
    cli.add_argument("--interval", type=int, default=100, help="steps between two selections (radius)")
    cli.add_argument("--warmup-share", type=float, default=0.15, help="share of the steps sent dense at the start")
    cli.add_argument("--lr-warmup", type=int, default=40, help="steps over which the learning rate rises")
    cli.add_argument("--eval-every", type=int, default=100)
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--data", help="a file to train on (default: the Python standard library's source)")
    cli.add_argument("--out", help="a JSON file for the results")
    return cli.parse_args()


def make_optimizer(args, model):
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    scales = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, fused=True)


def main():
    args = parse()
    # One process or many, CPU or GPU: torchrun sets the variables; without it this is a group of one.
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rendezvous = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **rendezvous)

    train, val = corpus.load(args.data)
    data = corpus.batches(train, args.batch, args.context, args.seed + 1 + rank)  # every rank reads other places
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.heads, args.context).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    ddp = DistributedDataParallel(model)
    warmup = round(args.warmup_share * args.steps)  # steps of dense exchange before compression begins
    optimizer = make_optimizer(args, model)
    exchange = baselines.attach(args.optimizer, ddp, warmup, args.density)

    def rate(step):  # linear rise, then a cosine down to a tenth
        done = (step - args.lr_warmup) / max(1, args.steps - args.lr_warmup)
        return min(1.0, (step + 1) / (args.lr_warmup + 1)) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, max(0.0, done))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    @torch.no_grad()
    def averages(losses):  # training loss since the last call, and validation loss: the same 40 batches every time
        fixed = zip(range(40), corpus.batches(val, args.batch, args.context, seed=0))
        mine = [model(x.to(device), y.to(device)).item() for i, (x, y) in fixed if i % world == rank]
        total = torch.tensor([sum(losses), len(losses), sum(mine), len(mine)], dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return (total[0] / total[1]).item(), (total[2] / total[3]).item()

    evals, losses, seconds, sent = [], [], [], []
    bar = tqdm(range(1, args.steps + 1), desc=args.optimizer, disable=None if rank == 0 else True)
    for step in bar:
        begin = time.perf_counter()
        x, y = next(data)
        loss = ddp(x.to(device), y.to(device))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # on a GPU this waits for the step, so that it is timed
        seconds.append(time.perf_counter() - begin)
        sent.append((exchange.phase, exchange.bytes_sent))
        if step % args.eval_every == 0 or step == args.steps:
            train_loss, val_loss = averages(losses)
            losses.clear()
            evals.append({"step": step, "seconds": sum(seconds), "train_loss": train_loss, "val_loss": val_loss})
            evals[-1]["bytes"] = sum(size for _, size in sent)
            bar.set_postfix(train=f"{train_loss:.3f}", val=f"{val_loss:.3f}")
            if bar.disable and rank == 0:
                print(f"{args.optimizer}: step {step}, training loss {train_loss:.3f}, validation loss {val_loss:.3f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
