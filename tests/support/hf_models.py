"""A GPT-2 from its configuration, its data, and Hugging Face's Trainer around it."""

from __future__ import annotations

from pathlib import Path

import torch

STEPS, AT = 9, 5  # of a run, and the one that is saved


def gpt2(width: int = 64):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=width, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def dataset():
    tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(folder: Path, model, callbacks=(), steps: int = STEPS, report_to=(), **options):
    import transformers

    transformers.logging.set_verbosity_error()
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, save_steps=AT, logging_steps=2,
        use_cpu=True, report_to=list(report_to), disable_tqdm=True, seed=0, learning_rate=1e-2, max_grad_norm=0.5,
        lr_scheduler_type="linear",
    )  # fmt: skip
    return transformers.Trainer(model=model, args=args, train_dataset=dataset(), callbacks=list(callbacks), **options)
