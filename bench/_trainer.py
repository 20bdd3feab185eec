"""Hugging Face's Trainer on a GPT-2 of 10 M parameters, with the optimizer that OPTIMIZER names; for front_doors.py."""

import os
import tempfile

import torch
from frameworks import make_optimizer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from compopt.integrations.hf import CompoptCallback


class Repeats(torch.utils.data.Dataset):
    """Every second token is the one before it."""

    def __init__(self) -> None:
        self.rows = torch.randint(256, (4096, 32)).repeat_interleave(2, 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


torch.manual_seed(0)
name = os.environ["OPTIMIZER"]
special = dict(bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=320, n_layer=8, n_head=5, **special))
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    max_steps=1000,
    per_device_train_batch_size=2,
    save_strategy="no",
    report_to=[],
    ddp_find_unused_parameters=False,
    average_tokens_across_devices=False,
)
optimizer = make_optimizer(name, model.named_parameters(), 3e-4)
callbacks = [CompoptCallback()] if name != "adamw" else []
Trainer(model, args, train_dataset=Repeats(), optimizers=(optimizer, None), callbacks=callbacks).train()
