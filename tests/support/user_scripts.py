"""Scripts written for AdamW and DistributedDataParallel, in the shapes users have them, and their line that changes."""

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

RADIUS = "density=0.1, interval=15, dense_steps=8"
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
