"""A training script in the shape of nanoGPT's train.py, with the lines that compopt changes.

torchrun --nproc-per-node 2 --standalone examples/nanogpt.py                              # a new run
torchrun --nproc-per-node 2 --standalone examples/nanogpt.py --init_from=resume           # go on from out_dir/ckpt.pt
torchrun --nproc-per-node 2 --standalone examples/nanogpt.py --optimizer=AdamW            # without compopt

Every setting below can be given as --name=value. Lines marked `compopt` are what differs from the script for AdamW.
"""

import ast
import math
import os
import sys
from contextlib import nullcontext

import corpus
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT

import compopt  # compopt 1 of 5

out_dir = "out"
init_from = "scratch"  # or "resume"
eval_interval, eval_iters, log_interval = 100, 10, 10
batch_size, block_size, gradient_accumulation_steps = 8, 64, 4  # micro-batches of all ranks together
n_layer, n_head, n_embd = 4, 4, 128
optimizer_class = "SeparateAdam"  # or "LocalSteps", "AdamW"
learning_rate, min_lr, weight_decay, beta1, beta2, grad_clip = 2e-3, 2e-4, 0.1, 0.9, 0.95, 1.0
max_iters, warmup_iters = 800, 40
dtype = "float32"  # or "bfloat16", "float16" (with a GradScaler)
data = ""  # a file to train on; the Python standard library's source where there is none

config = {name: value for name, value in globals().items() if isinstance(value, int | float | str) and name[0] != "_"}
if {"-h", "--help"} & set(sys.argv[1:]):
    print(__doc__, *(f"--{name}={value}" for name, value in config.items()), sep="\n")
    sys.exit()
for argument in sys.argv[1:]:
    name, _, text = argument.removeprefix("--").replace("optimizer=", "optimizer_class=", 1).partition("=")
    if name not in config:
        raise ValueError(f"{argument} names no setting: there are {', '.join(config)}.")
    config[name] = text if isinstance(config[name], str) else ast.literal_eval(text)
globals().update(config)

is_ddp = "RANK" in os.environ
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
device_type = device.partition(":")[0]
if device_type == "cuda":
    torch.cuda.set_device(device)
if is_ddp:
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
if gradient_accumulation_steps % world_size:
    raise ValueError(
        f"gradient_accumulation_steps={gradient_accumulation_steps} is not a multiple of {world_size} ranks."
    )
micro_steps = gradient_accumulation_steps // world_size
master_process = rank == 0
if master_process:
    os.makedirs(out_dir, exist_ok=True)
precision = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
context = nullcontext() if dtype == "float32" else torch.autocast(device_type, precision)

torch.manual_seed(1337)
model_args = dict(layers=n_layer, heads=n_head, width=n_embd, context=block_size)
checkpoint, iter_num, best_val_loss = None, 0, float("inf")
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device, weights_only=True)
    model_args = checkpoint["model_args"]
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
raw_model = GPT(**model_args).to(device)
if checkpoint:
    raw_model.load_state_dict(checkpoint["model"])

decay = [p for p in raw_model.parameters() if p.dim() >= 2]
no_decay = [p for p in raw_model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
options = dict(lr=learning_rate, betas=(beta1, beta2))
if optimizer_class == "SeparateAdam":
    optimizer = compopt.SeparateAdam(groups, **options, max_grad_norm=grad_clip or None)  # compopt 2 of 5
elif optimizer_class == "LocalSteps":
    inner = torch.optim.AdamW(groups, **options)
    optimizer = compopt.LocalSteps(inner, every=30, max_grad_norm=grad_clip or None)
elif optimizer_class == "AdamW":
    optimizer = torch.optim.AdamW(groups, **options)
else:
    raise ValueError(f"optimizer must be SeparateAdam, LocalSteps or AdamW; got {optimizer_class}.")
clips_itself = optimizer_class != "AdamW"
if checkpoint:
    optimizer.load_state_dict(checkpoint["optimizer"])
checkpoint = None
scaler = torch.amp.GradScaler(device_type, enabled=dtype == "float16")
model = DistributedDataParallel(raw_model) if is_ddp else raw_model

text = dict(zip(("train", "val"), corpus.load(data or None), strict=True))


def get_batch(split, seed):
    x, y = next(corpus.batches(text[split], batch_size, block_size, seed))
    return x.to(device), y.to(device)


@torch.no_grad()
def estimate_loss():
    losses = {}
    for split in text:
        with context:
            values = [raw_model(*get_batch(split, seed)).item() for seed in range(eval_iters)]
        losses[split] = sum(values) / len(values)
    return losses


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = min(1.0, (it - warmup_iters) / max(1, max_iters - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 or iter_num == max_iters:
        if optimizer_class == "LocalSteps":
            optimizer.end_round()  # compopt, local steps only: all ranks hold the same model from here
        if clips_itself:
            optimizer.consolidate_state()  # compopt 3 of 5: on all ranks, before `if master_process`
        if master_process:
            losses = estimate_loss()
            print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
            best_val_loss = min(best_val_loss, losses["val"])
            saved = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": model_args}
            saved |= {"iter_num": iter_num, "best_val_loss": best_val_loss, "config": config}
            torch.save(saved, os.path.join(out_dir, "ckpt.new"))  # and rename: a kill leaves the file before
            os.replace(os.path.join(out_dir, "ckpt.new"), os.path.join(out_dir, "ckpt.pt"))
    if iter_num == max_iters:
        break
    for micro_step in range(micro_steps):
        if is_ddp:
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        seed = (iter_num * gradient_accumulation_steps + micro_step * world_size + rank) + 1
        with context:
            loss = model(*get_batch("train", seed)) / micro_steps
        scaler.scale(loss).backward()
    if grad_clip and not clips_itself:  # compopt 4 of 5: max_grad_norm clips the averaged gradient
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0 and master_process:
        sent = f", {optimizer.stats.bytes_sent:,} bytes sent" if clips_itself else ""  # compopt 5 of 5
        print(f"iter {iter_num}: loss {loss.item() * micro_steps:.4f}{sent}", flush=True)
    iter_num += 1

if is_ddp:
    dist.destroy_process_group()
