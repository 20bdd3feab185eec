"""A small GPT-2 from its configuration, on local text, with Hugging Face's Trainer. Nothing is downloaded.

torchrun --nproc-per-node 2 --standalone examples/hf_trainer.py --out runs/hf
torchrun --nproc-per-node 2 --standalone examples/hf_trainer.py --out runs/hf --resume      # from the last checkpoint
"""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import corpus
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import compopt
from compopt.integrations.hf import CompoptCallback


class Pieces(torch.utils.data.Dataset):
    """Text, as bytes, cut into sequences."""

    def __init__(self, text: torch.Tensor, context: int):
        self.rows = text[: len(text) // context * context].view(-1, context)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i].long(), "labels": self.rows[i].long()}


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", default="runs/hf", help="folder for checkpoints and logs")
    cli.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    cli.add_argument("--data", help="a file to train on (default: the Python standard library's source)")
    for name, default in dict(steps=300, layers=4, width=128, heads=4, context=64, batch=8).items():
        cli.add_argument("--" + name, type=int, default=default)
    options = cli.parse_args()

    args = TrainingArguments(
        output_dir=options.out, max_steps=options.steps, per_device_train_batch_size=options.batch,
        learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=20, max_grad_norm=1.0, logging_steps=20,
        save_steps=max(1, options.steps // 3), eval_strategy="steps", eval_steps=max(1, options.steps // 3),
        report_to=[], seed=0, use_cpu=not torch.cuda.is_available(),  # without it, CPU processes would train apart
    )  # fmt: skip
    text, held_out = corpus.load(options.data)
    torch.manual_seed(args.seed)
    config = GPT2Config(
        vocab_size=256, n_positions=options.context, n_embd=options.width, n_layer=options.layers, n_head=options.heads,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=Pieces(text, options.context),
        eval_dataset=Pieces(held_out[: 64 * options.context], options.context),
        # The lines that differ. The Trainer makes the optimizer from its parameter groups; lr is the schedule's peak.
        optimizer_cls_and_kwargs=(
            compopt.RadiusAdamW,
            dict(lr=args.learning_rate, density=0.1, interval=50, dense_steps=options.steps // 7),
        ),
        callbacks=[CompoptCallback()],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"validation loss {metrics['eval_loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
