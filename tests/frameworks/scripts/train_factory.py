"""LLaMA-Factory's `train`: `train_factory.py CONFIG`."""

import os

import torch
from frameworks import make_optimizer, report
from llamafactory.train.pt import trainer
from llamafactory.train.tuner import run_exp
from transformers import TrainerCallback

from compopt.integrations.hf import CompoptCallback

name = os.environ["OPTIMIZER"]


class Report(TrainerCallback):
    def on_init_end(self, args, state, control, **_):
        args.__dict__["_setup_devices"] = torch.device("cpu")  # not cpu:0, which torch.load does not know

    def on_train_end(self, args, state, control, model=None, **_):
        history = [entry for entry in state.log_history if "loss" in entry]
        losses, norms = ([float(entry[key]) for entry in history] for key in ("loss", "grad_norm"))
        report(model, losses=losses, norms=norms)


if name == "adamw":
    run_exp(callbacks=[Report()])
else:
    trainer.create_custom_optimizer = lambda model, args, _: make_optimizer(
        name, model.named_parameters(), lr=args.learning_rate, weight_decay=0.0
    )
    run_exp(callbacks=[CompoptCallback(), Report()])
