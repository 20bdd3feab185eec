"""Lightning: `train_lightning.py OPTIMIZER [CHECKPOINT]`."""

import sys

import torch
from frameworks import make_optimizer, report
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from compopt.integrations.lightning import CompoptCallback

name, *checkpoint = sys.argv[1:]
torch.manual_seed(0)
vectors = torch.randn(128, 40)
words = (vectors @ torch.randn(40, 8)).argmax(1)
losses: list[float] = []


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)

    def on_validation_epoch_end(self):
        losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self):
        optimizer = make_optimizer(name, self.named_parameters(), lr=3e-3, clip=1.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


data = torch.utils.data.TensorDataset(vectors, words)
trainer = Trainer(
    strategy="ddp",
    accelerator="cpu",
    devices=2,
    max_epochs=4,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0 if name == "adamw" else None,
    num_sanity_val_steps=0,
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(f"out_{name}", save_last=True), *([CompoptCallback()] if name != "adamw" else [])],
)
model = Model()
train, held_out = (torch.utils.data.DataLoader(data, batch_size=8, shuffle=shuffle) for shuffle in (True, False))
trainer.fit(model, train, held_out, ckpt_path=checkpoint[0] if checkpoint else None)
report(model, losses=losses)
