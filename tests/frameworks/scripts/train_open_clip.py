"""open_clip with an optimizer of timm's registry: `train_open_clip.py OPTIMIZER [arguments of its own]`."""

import json
import sys
from pathlib import Path

import open_clip
import open_clip_train.main
import torch
from frameworks import make_optimizer, report
from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry
from torch.nn.parallel import DistributedDataParallel

name, *more = sys.argv[1:]


def make(params, lr, weight_decay=0.0, **_):
    return make_optimizer(name, params, lr)


def get_pair(self, i):
    """An image of one of 16 colours, and its name."""
    colour = (i % 16) / 16
    image = torch.full((3, 32, 32), colour) + 0.1 * torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(i))
    return image, self.preprocess_txt(f"number {i % 16}")


class OnCPU(DistributedDataParallel):
    def __init__(self, model, device_ids=None, **options):
        super().__init__(model, **options)


torch.nn.parallel.DistributedDataParallel = OnCPU
open_clip_train.main.get_data.__globals__["SyntheticDataset"].__getitem__ = get_pair
default_registry.register(OptimInfo(name="ours", opt_class=make, has_betas=True))
tower = dict(width=64, layers=2)
text = dict(**tower, context_length=77, vocab_size=49408, heads=2)
config = dict(embed_dim=32, vision_cfg=dict(**tower, image_size=32, patch_size=16, head_width=32), text_cfg=text)
Path("tiny.json").write_text(json.dumps(config))
open_clip.add_model_config("tiny.json")
train_one_epoch = open_clip_train.main.train_one_epoch
losses: list[float] = []


def train_and_report(model, data, loss, *rest, **options):
    class Loss(torch.nn.Module):
        def forward(self, *args, **kwargs):
            found = loss(*args, **kwargs)
            losses.append(float(found["contrastive_loss"] if isinstance(found, dict) else found))
            return found

    train_one_epoch(model, data, Loss(), *rest, **options)
    report(model, losses=losses)


open_clip_train.main.train_one_epoch = train_and_report
own = "--dataset-type synthetic --train-num-samples 64 --batch-size 8 --workers 0 --epochs 2 --lr 1e-3 --warmup 2"
own += " --model tiny --opt timm/ours --device cpu --dist-backend gloo --gather-with-grad --local-loss --accum-freq 2"
open_clip_train.main.main([*own.split(), "--logs", "logs", "--name", name, *more])
