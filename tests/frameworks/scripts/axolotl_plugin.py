"""A plug-in as a user of axolotl writes it, which its configuration names under `plugins:`."""

import os

import torch
from axolotl.integrations.base import BasePlugin
from frameworks import make_optimizer, report

from compopt.integrations.hf import CompoptCallback


class Plugin(BasePlugin):
    def load_datasets(self, cfg, preprocess=False):
        cfg.device_map = None  # axolotl would place the models of two processes on GPUs

    def post_trainer_create(self, cfg, trainer):
        trainer.args.__dict__["_setup_devices"] = torch.device("cpu")  # not cpu:0, which torch.load does not know
        name = os.environ["OPTIMIZER"]
        if name != "adamw":
            named = trainer.model.named_parameters()
            trainer.optimizer = make_optimizer(name, named, lr=cfg.learning_rate, weight_decay=0.0)
            trainer.add_callback(CompoptCallback())
        train = trainer.train

        def train_and_report(*args, **options):
            found = train(*args, **options)
            history = [entry for entry in trainer.state.log_history if "loss" in entry]
            losses, norms = ([float(entry[key]) for entry in history] for key in ("loss", "grad_norm"))
            report(trainer.model, losses=losses, norms=norms)
            return found

        trainer.train = train_and_report
