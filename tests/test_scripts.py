"""Scripts written for AdamW and DistributedDataParallel, in the shapes users have them, with one line changed.

Each runs as it stands, on two gloo processes, once with each line; what the processes' TCP sockets carried is compared.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import runpy
import socket
import struct
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

TUTORIAL = """
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
import compopt
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)


class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.net1 = nn.Linear(100, 400)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(400, 50)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank, world_size):
    setup(rank, world_size)
    model = ToyModel()
    ddp_model = DDP(model)

    loss_fn = nn.MSELoss()
    optimizer = optim.AdamW(ddp_model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)

    for step in range(60):
        optimizer.zero_grad()
        inputs = torch.randn(20, 100, generator=generator)
        loss = loss_fn(ddp_model(inputs), inputs[:, :50])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dist.destroy_process_group()
    return model, optimizer


model, optimizer = demo_basic(RANK, 2)
"""

NANOGPT = """
import math
import os
from contextlib import nullcontext
import torch
import torch.nn as nn
import compopt
from torch.distributed import init_process_group, destroy_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size, block_size, gradient_accumulation_steps = 8, 16, 4
learning_rate, min_lr, weight_decay, beta1, beta2, grad_clip = 3e-3, 3e-4, 1e-1, 0.9, 0.95, 1.0
max_iters, warmup_iters, dtype = 40, 5, 'bfloat16'


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(64, 64), nn.Embedding(block_size, 64)
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(64), nn.Linear(64, 64, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        for block in self.h:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        param_dict = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]
        nodecay_params = [p for n, p in param_dict.items() if p.dim() < 2]
        optim_groups = [
            {'params': decay_params, 'weight_decay': weight_decay},
            {'params': nodecay_params, 'weight_decay': 0.0},
        ]
        optimizer = torch.optim.AdamW(optim_groups, lr=learning_rate, betas=betas)
        return optimizer


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
    return min_lr + coeff * (learning_rate - min_lr)


ddp = int(os.environ.get('RANK', -1)) != -1
init_process_group(backend='gloo')
ddp_rank, ddp_world_size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
assert gradient_accumulation_steps % ddp_world_size == 0
gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337)
ctx = torch.amp.autocast(device_type='cpu', dtype=torch.bfloat16)
data = torch.Generator().manual_seed(ddp_rank)


def get_batch(split):
    start = torch.randint(64, (batch_size, 1), generator=data)
    x = (start + torch.arange(block_size + 1) * 3) % 64
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


model = GPT()
scaler = torch.amp.GradScaler('cpu', enabled=(dtype == 'float16'))
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2))
model = DDP(model)
X, Y = get_batch('train')
iter_num = 0
raw_model = model.module
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group['lr'] = lr
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = (micro_step == gradient_accumulation_steps - 1)
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch('train')
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item() * gradient_accumulation_steps)
    iter_num += 1
    if iter_num > max_iters:
        break
checkpoint = {'model': raw_model.state_dict(), 'optimizer': optimizer.state_dict(), 'iter_num': iter_num}
torch.save(checkpoint, os.path.join(FOLDER, f'ckpt{ddp_rank}.pt'))
destroy_process_group()
model = raw_model
"""

RUN_CLM = """
import torch
import compopt
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments, default_data_collator, set_seed

training_args = TrainingArguments(
    output_dir=FOLDER, max_steps=80, per_device_train_batch_size=8, learning_rate=3e-3, warmup_steps=4,
    save_strategy="no", logging_steps=1, seed=0, report_to=[], disable_tqdm=True, use_cpu=True,
    ddp_find_unused_parameters=False,
)
set_seed(training_args.seed)
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = AutoModelForCausalLM.from_config(config)
examples = (torch.arange(32) * 3 + torch.arange(256).unsqueeze(1)) % 64
train_dataset = [{"input_ids": ids, "labels": ids.clone()} for ids in examples]

trainer = Trainer(
    model=model,
    args=training_args,
    optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": training_args.learning_rate}),
    train_dataset=train_dataset,
    data_collator=default_data_collator,
)
train_result = trainer.train()
losses += [log["loss"] for log in trainer.state.log_history if "loss" in log]
model, optimizer = trainer.model, trainer.optimizer.optimizer
del trainer
"""

RADIUS = "density=0.1, interval=15, warmup_steps=8"
CHANGED = {  # the script, its line, and what the user writes in its place
    "DDP tutorial": (
        TUTORIAL,
        "optim.AdamW(ddp_model.parameters(), lr=1e-3)",
        f"compopt.RadiusAdamW(ddp_model.parameters(), lr=1e-3, {RADIUS})",
    ),
    "nanoGPT": (
        NANOGPT,
        "torch.optim.AdamW(optim_groups, lr=learning_rate, betas=betas)",
        f"compopt.RadiusAdamW(optim_groups, lr=learning_rate, betas=betas, {RADIUS})",
    ),
    "run_clm": (
        RUN_CLM,
        '(torch.optim.AdamW, {"lr": training_args.learning_rate})',
        f"(compopt.RadiusAdamW, dict(lr=training_args.learning_rate, {RADIUS}))",
    ),
}


EXAMPLES = Path(__file__).parent.parent / "examples"


def as_torchrun_would(rank: int, size: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "MASTER_PORT": "29500"}


@contextlib.contextmanager
def in_place():
    """The process group exists already, and stays; what is printed is collected."""
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield printed


def sent_through_sockets() -> int:
    """Bytes that this process's TCP connections have sent: tcpi_bytes_sent of each (linux/tcp.h)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as s:
                    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, 200)[0] if len(info) >= 208 else 0
    return total


def run(source: str, rank: int, folder: str) -> dict:
    """The script, in this process, whose process group exists already."""
    names = {"RANK": rank, "FOLDER": folder, "losses": [], "__name__": "__main__"}
    before = sent_through_sockets()
    with in_place():
        exec(compile(source, "train.py", "exec"), names)
    sent = sent_through_sockets() - before
    mine = torch.nn.utils.parameters_to_vector(names["model"].parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, 0)
    optimizer = names["optimizer"]
    comm = getattr(optimizer, "comm", None)
    found = {
        "sent": sent,
        "losses": names["losses"],
        "equal": torch.equal(mine, first),
        "dense": 4 * mine.numel() * len(names["losses"]),
        "counted": comm.bytes_sent if comm else None,
        "class": type(optimizer).__name__,
    }
    names.clear()
    del optimizer, comm
    gc.collect()
    dist.barrier()
    return found


def both(rank: int, folder: str) -> dict[str, list[dict]]:
    as_torchrun_would(rank, 2)
    found = {}
    for name, (source, old, new) in CHANGED.items():
        if name == "run_clm":
            pytest.importorskip("transformers")
            pytest.importorskip("accelerate")
        found[name] = [run(source, rank, folder), run(source.replace(old, new), rank, folder)]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_ranks(both, 2, str(tmp_path_factory.mktemp("scripts")))


@pytest.mark.parametrize("name", CHANGED)
def test_one_line_changes(name):
    source, old, new = CHANGED[name]
    lines = zip(source.splitlines(), source.replace(old, new).splitlines(), strict=True)
    assert sum(a != b for a, b in lines) == 1


@pytest.mark.parametrize("name", CHANGED)
def test_it_trains_and_replicas_are_equal(runs, name):
    for rank in runs:
        adamw, ours = rank[name]
        assert ours["class"] == "RadiusAdamW" and ours["equal"]
        start, end, adamw_end = ours["losses"][0], sum(ours["losses"][-5:]) / 5, sum(adamw["losses"][-5:]) / 5
        assert end < start - 0.6 * (start - adamw_end)


@pytest.mark.parametrize("name", CHANGED)
def test_bytes_on_the_sockets_fall_as_promised(runs, name):
    """On two ranks a ring all-reduce sends each byte once, so sockets carry what the optimizer counts."""
    for rank in runs:
        adamw, ours = rank[name]
        beside = adamw["sent"] - adamw["dense"]  # DDP's broadcast of the parameters, framing
        assert 0 < beside < 0.1 * adamw["dense"]
        assert abs(ours["sent"] - beside - ours["counted"]) < 0.06 * ours["counted"]
        assert ours["sent"] < 0.4 * adamw["sent"]


def example(name: str, text: str, *options: str) -> str:
    """What examples/NAME.py prints with these options."""
    sys.path.insert(0, str(EXAMPLES))
    with in_place() as printed, mock.patch.object(sys, "argv", [name, "--data", text, *options]):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def on_two_ranks(rank: int, folder: str) -> dict[str, str]:
    as_torchrun_would(rank, 2)
    text, out = f"{folder}/text", f"{folder}/hf"
    small = ["--steps", "9", "--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--out", out]
    found = {}
    with contextlib.suppress(ModuleNotFoundError):
        found["hf_trainer"] = example("hf_trainer", text, *small)
        found["hf_trainer, resumed"] = example("hf_trainer", text, *small, "--steps", "12", "--resume")
    with contextlib.suppress(ModuleNotFoundError):
        found["lightning_ddp"] = example("lightning_ddp", text, "--steps", "9")
    return found


def on_four_ranks(rank: int, folder: str) -> list[str]:
    as_torchrun_would(rank, 4)
    small = ["--steps", "20", "--layers", "1", "--width", "32", "--heads", "2", "--context", "16"]
    return [example("hsdp", f"{folder}/text", *small, "--checkpoint", f"{folder}/hsdp") for _ in range(2)]


def test_examples_in_the_users_stack_run(tmp_path):
    (tmp_path / "text").write_bytes(b"to be, or not to be, that is the question: " * 1000)
    printed, _ = run_ranks(on_two_ranks, 2, str(tmp_path))
    for name in ("hf_trainer", "hf_trainer, resumed"):
        assert "validation loss" in printed.get(name, "validation loss"), name
    assert "sent_MB" in printed.get("lightning_ddp", "sent_MB")
    assert (tmp_path / "hf" / "checkpoint-12").is_dir() or "hf_trainer" not in printed

    (first, second), *_ = run_ranks(on_four_ranks, 4, str(tmp_path))
    assert first.startswith("step 20 loss") and "sparse" in first
    assert second.startswith("step 40 loss"), "not continued from its checkpoint"
