"""Writes checkpoints.pt.gz: what a version saves, and where its next steps lead.

``of_0_1_0.pt.gz`` was written so by version 0.1.0, with its own tests/sim.py, and is not to be written again;
``of_0_1_0_payloads.pt.gz``, of ``PAYLOADS``, by its last commit before payload dtypes were kept by name.
"""

from __future__ import annotations

import copy
import gzip
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from problems import gradients, replicas, step, weights

import compopt

SHAPES = [(6, 8), (5,), (4, 2, 6)]
BEFORE, AFTER = 6, 2  # steps until it is saved, and from then on
ADAM = dict(lr=1e-2, weight_decay=0.1)


def around_adamw(params, process_group, **options):
    return compopt.Separate(torch.optim.AdamW(params, **ADAM), process_group=process_group, **options)


FORMS = {
    "RadiusAdamW": (compopt.RadiusAdamW, dict(**ADAM, density=0.4, interval=5, warmup_steps=2), torch.float32),
    "RadiusAdamW, bfloat16": (
        compopt.RadiusAdamW,
        dict(**ADAM, density=0.4, interval=5, warmup_steps=2),
        torch.bfloat16,
    ),
    "AdamS": (compopt.AdamS, dict(**ADAM), torch.float32),
    "ScapeAdamS": (compopt.ScapeAdamS, dict(**ADAM, density=0.3, density_warmup_steps=2), torch.float32),
    "ScapeAdamS, sharded": (
        compopt.ScapeAdamS,
        dict(**ADAM, density=0.3, density_warmup_steps=2, sharded=True),
        torch.float32,
    ),
    "SeparateAdam": (compopt.SeparateAdam, dict(**ADAM, projection="gaussian", ratio=4), torch.float32),
    "SeparateAdam, tracked": (compopt.SeparateAdam, dict(**ADAM, projection="tracked", rank=2), torch.float32),
    "Separate": (around_adamw, dict(projection="gaussian", ratio=4), torch.float32),
    "TagcAdamW": (compopt.TagcAdamW, dict(**ADAM, sparsity=0.8), torch.float32),
}
WHOLE = ("ScapeAdamS, sharded", "TagcAdamW")  # which take no int8
PAYLOADS = {
    f"{form}, {str(dtype).removeprefix('torch.')} payload": (cls, {**options, "payload_dtype": dtype}, of)
    for form, (cls, options, of) in FORMS.items()
    for dtype in (torch.int8, torch.bfloat16)
    if form not in ("AdamS", "RadiusAdamW, bfloat16") and not (form in WHOLE and dtype == torch.int8)
}


def made_of(form: str):
    return (FORMS | PAYLOADS)[form]


def make(form: str, start: list[torch.Tensor]):
    cls, options, _ = made_of(form)

    def one(params, process_group):
        named = [(f"layer{n}.weight", p) for n, p in enumerate(params)]
        groups = [{"params": named, "compress": True}]
        return cls(groups, process_group=process_group, **options)

    return replicas(2, start, one)


def written(form: str) -> dict:
    """A consolidated state dict, the parameters it belongs to, and those of ``AFTER`` steps more."""
    dtype = made_of(form)[2]
    world, params, optimizers = make(form, weights(SHAPES, dtype))
    for t in range(BEFORE):
        step(world, params, optimizers, gradients(2, t, SHAPES, dtype))
    world.consolidate(optimizers)
    saved, then = optimizers[0].state_dict(), [p.detach().clone() for p in params[0]]
    saved = copy.deepcopy(saved)
    for t in range(BEFORE, BEFORE + AFTER):
        step(world, params, optimizers, gradients(2, t, SHAPES, dtype))
    return {"optimizer": saved, "params": then, "after": [p.detach().clone() for p in params[0]]}


if __name__ == "__main__":
    with gzip.open(Path(__file__).with_name("checkpoints.pt.gz"), "wb") as file:
        torch.save({form: written(form) for form in FORMS}, file)
