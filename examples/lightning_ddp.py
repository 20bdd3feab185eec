"""Lightning: configure_optimizers returns a compopt optimizer; the ddp strategy and the Trainer stay as they are.

torchrun --nproc-per-node 2 --standalone examples/lightning_ddp.py
"""

import argparse
import os

import corpus
import torch
from lightning.pytorch import LightningModule, Trainer
from train_gpt import GPT

import compopt


class Text(torch.utils.data.IterableDataset):
    """Endless random pieces of text, others on each rank."""

    def __init__(self, text: torch.Tensor, batch: int, context: int):
        self.text, self.batch, self.context = text, batch, context

    def __iter__(self):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return corpus.batches(self.text, self.batch, self.context, seed=rank)


class Model(LightningModule):
    def __init__(self, steps: int):
        super().__init__()
        self.steps, self.gpt = steps, GPT(layers=2, width=128, heads=4, context=64)

    def training_step(self, batch, index):
        loss = self.gpt(*batch)
        stats = self.optimizers().optimizer.stats
        megabytes = {"sent_MB": stats.bytes_sent / 1e6, "dense_MB": stats.bytes_dense / 1e6}
        self.log_dict({"loss": loss, **megabytes}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        # The line that differs. Lightning's gradient_clip_val would clip each rank's gradient: clip here instead.
        return compopt.RadiusAdamW(
            self.parameters(), lr=2e-3, density=0.1, interval=50, dense_steps=self.steps // 7, max_grad_norm=1.0
        )


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--steps", type=int, default=300)
    cli.add_argument("--data", help="a file to train on (default: the Python standard library's source)")
    args = cli.parse_args()
    text, _ = corpus.load(args.data)
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(Text(text, batch=8, context=64), batch_size=None)
    local, world = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))  # torchrun's
    trainer = Trainer(
        strategy="ddp", devices=local, num_nodes=world // local, max_steps=args.steps, logger=False,
        accelerator="auto" if torch.cuda.is_available() else "cpu", enable_checkpointing=False, log_every_n_steps=20,
    )  # fmt: skip
    model = Model(args.steps)
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()}, flush=True)


if __name__ == "__main__":
    main()
