"""transformers' Trainer: `train_trainer.py OPTIMIZER [CHECKPOINT]`."""

import sys

import torch
from frameworks import make_optimizer, report
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from compopt.integrations.hf import CompoptCallback

name, *checkpoint = sys.argv[1:]
set_seed(0)
sizes = dict(n_layer=2, n_head=2, n_embd=64, vocab_size=64, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
rows = [(torch.arange(16) * step + start) % 61 for start in range(61) for step in (1, 2)]
args = TrainingArguments(
    output_dir=f"out_{name}",
    use_cpu=True,
    max_steps=8,
    logging_steps=1,
    save_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_grad_norm=0.5,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    report_to=[],
    ddp_find_unused_parameters=False,
    average_tokens_across_devices=False,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    eval_dataset=[{"input_ids": row, "labels": row} for row in rows[:16]],
    optimizers=(make_optimizer(name, model.named_parameters(), lr=3e-3), None),
    callbacks=[CompoptCallback()] if name != "adamw" else [],
)
trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
report(model, losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
