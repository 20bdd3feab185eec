"""Train a small GPT on source code, its gradients averaged by DDP or, compressed, by the optimizer.

python examples/train_gpt.py                                              # one process
torchrun --nproc-per-node 2 --standalone examples/train_gpt.py --optimizer radius --out radius.json
"""

import argparse
import json
import math
import os
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import median

import baselines
import corpus
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from compopt import AdamS, LocalSteps, MuonAdamW, RadiusAdamW, ScapeAdamS, SeparateAdam, TagcAdamW

BASE = dict(betas=(0.9, 0.95), weight_decay=0.1)  # of AdamS, in its paper
# The line that differs: DDP averages the gradients for adamw and muon, the others average them themselves, compressed.
OPTIMIZERS = {
    "adamw": lambda p, a: torch.optim.AdamW(p, a.lr, fused=True),
    "radius": lambda p, a: RadiusAdamW(p, a.lr, density=a.density, interval=a.interval, dense_steps=a.dense_steps),
    "adams": lambda p, a: AdamS(p, a.lr, **BASE),
    "scape": lambda p, a: ScapeAdamS(p, a.lr, **BASE, density=a.density, dense_steps=a.dense_steps, density_steps=0),
    "separate": lambda p, a: SeparateAdam(p, a.lr, projection="gaussian", ratio=a.ratio, dense_steps=a.dense_steps),
    "tracked": lambda p, a: SeparateAdam(p, a.lr, dense_steps=a.dense_steps),
    "local": lambda p, a: LocalSteps(torch.optim.AdamW(p, a.lr), a.every, dense_steps=a.dense_steps, growth_steps=0),
    "muon": lambda p, a: MuonAdamW(p, a.lr),
    "local-muon": lambda p, a: LocalSteps(MuonAdamW(p, a.lr), a.every, dense_steps=a.dense_steps, growth_steps=0),
    "tagc": lambda p, a: TagcAdamW(p, a.lr, density=a.density, dense_steps=a.dense_steps),
}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context, vocabulary=256):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # each block adds to x twice: smaller there, so that x does not grow with the depth
                nn.init.normal_(p, std=0.08 / (math.sqrt(2 * layers) if "out." in name or "down." in name else 1))

    def forward(self, x, y):
        x = self.bytes(x) + self.positions.weight[: x.shape[1]]
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), y.flatten())


def parse():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--optimizer", default="adamw", choices=[*OPTIMIZERS, *baselines.HOOKS])
    cli.add_argument("--density", type=float, default=0.4, help="share of the gradient that is sent")
    cli.add_argument("--dense-share", type=float, default=0.15, help="share of the steps sent dense at the start")
    cli.add_argument("--data", help="a file to train on (default: the Python standard library's source)")
    cli.add_argument("--out", help="a JSON file for the results")
    cli.add_argument("--checkpoint", help="a file: continued from if it is there, written at every evaluation")
    sizes = dict(batch=8, context=64, steps=1500, layers=4, heads=4, width=128, bf16=0, seed=0, eval_every=100)
    for name, default in dict(lr=2e-3, interval=100, every=10, ratio=16.0, **sizes).items():
        cli.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    args = cli.parse_args()
    if min(args.steps, args.eval_every, args.batch, args.context, args.layers, args.heads, args.width) < 1:
        cli.error("steps, eval-every, batch, context, layers, heads and width must be at least 1")
    return argparse.Namespace(dense_steps=round(args.dense_share * args.steps), **vars(args))


def main():
    args = parse()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # of torchrun, else one process
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if (cuda := torch.cuda.is_available()) else "cpu")
    torch.cuda.set_device(device) if cuda else None
    single = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if cuda else "gloo", **single)
    train, val = corpus.load(args.data)
    data = corpus.batches(train, args.batch, args.context, seed=1000 * args.seed + 1 + rank)  # its own on each rank
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.heads, args.context).to(device)
    model.forward = torch.autocast(device.type, torch.bfloat16, enabled=bool(args.bf16))(model.forward)
    ddp = DistributedDataParallel(model)
    matrices, scales = ([(n, p) for n, p in model.named_parameters() if (p.dim() >= 2) == m] for m in (True, False))
    groups = [{"params": matrices}, {"params": scales, "weight_decay": 0.0}]
    optimizer = OPTIMIZERS.get(args.optimizer, OPTIMIZERS["adamw"])(groups, args)
    baseline = baselines.attach(args.optimizer, ddp, args)
    schedule = torch.optim.lr_scheduler.LambdaLR(  # a rise over 40 steps, and a cosine down to a tenth
        optimizer, lambda step: min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))
    )

    @torch.no_grad()
    def averages(losses):  # over all ranks: these training losses, and those on the same 40 validation batches
        mine = islice(corpus.batches(val, args.batch, args.context, seed=0), rank, 40, world)
        results = [model(x.to(device), y.to(device)).item() for x, y in mine]
        total = torch.tensor([sum(losses), len(losses), sum(results), len(results)], device=device)
        dist.all_reduce(total)
        return {"train_loss": (total[0] / total[1]).item(), "val_loss": (total[2] / total[3]).item()}

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first, evals, losses, seconds, sent, phases = 1, [], [], [], {"dense": [], "compressed": []}, Counter()
    if args.checkpoint and os.path.exists(args.checkpoint):  # on all ranks, whose number may have changed
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        evals, losses, seconds, sent, phases = saved["run"]
        first, data = len(losses) + 1, islice(data, len(losses), None)  # after what these steps have read
    bar = tqdm(range(first, args.steps + 1), desc=args.optimizer, disable=None if rank == 0 else True)
    for step in bar:
        begin = time.perf_counter()
        loss = ddp(*(part.to(device) for part in next(data)))
        loss.backward()
        optimizer.step()
        if step == args.steps and hasattr(optimizer, "end_round"):  # ranks have stepped on their own
            optimizer.end_round()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # on a GPU this waits for the step, so that the clock sees all of it
        seconds.append(time.perf_counter() - begin)
        stats = getattr(optimizer, "stats", baseline)
        sent["dense" if stats.phase in ("dense", "rounded") else "compressed"].append(stats.bytes_sent)
        phases[stats.phase] += 1
        if step % args.eval_every == 0 or step == args.steps:
            now = {"step": step, "seconds": sum(seconds), "bytes": sum(map(sum, sent.values()))}
            evals.append(now | averages(losses[-args.eval_every :]))
            bar.set_postfix(evals[-1])
            if bar.disable and rank == 0:  # no terminal, so no bar: a line instead
                print(args.optimizer, *(f"{name} {value:.4g}" for name, value in evals[-1].items()), flush=True)
            if args.checkpoint:
                for prepare in ("end_round", "consolidate_state"):  # on all ranks: the checkpoint is one for all
                    getattr(optimizer, prepare, lambda: None)()
                if rank == 0:
                    saved = {name: part.state_dict() for name, part in parts.items()}
                    torch.save(saved | {"run": (evals, losses, seconds, sent, phases)}, f"{args.checkpoint}.new")
                    os.replace(f"{args.checkpoint}.new", args.checkpoint)  # a kill while it saves leaves the one before
    if rank == 0 and args.out:
        result = {"config": vars(args) | {"ranks": world, "device": device.type}, "evals": evals, "phases": phases}
        result["bytes_per_step"] = {kind: median(sizes) if sizes else None for kind, sizes in sent.items()}
        result |= {"step_ms": 1000 * median(seconds), "parameters": sum(p.numel() for p in model.parameters())}
        Path(args.out).write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
