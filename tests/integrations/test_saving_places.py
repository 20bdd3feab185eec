"""docs/checkpoints.md: the lines for each place where people save, from the page, on two ranks that then go on."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from in_place import as_torchrun_would
from ranks import preload, run_ranks
from slow_rows import selected, slow_but
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector

import compopt

preload("transformers.trainer", "accelerate", "lightning.pytorch", "lightning.fabric")
PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
RADIUS = dict(lr=1e-2, density=0.3, interval=3, dense_steps=1)
BEFORE, AFTER = 5, 3


def blocks(heading: str) -> list[str]:
    """The Python of one section, as it stands there; of the top of the page by its title."""
    _, _, rest = PAGE.partition(f"# {heading}\n")
    return re.findall(r"```python\n(.*?)```", rest.partition("\n## ")[0], re.DOTALL)


def run(code: str, names: dict) -> dict:
    exec(compile(code, "docs/checkpoints.md", "exec"), names)
    return names


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) - x.flip(1)).square().mean()


def train(rank: int, model, optimizer, steps, backward=lambda value: value.backward()) -> torch.Tensor:
    for step in steps:
        optimizer.zero_grad()
        backward(loss(model, rank, step))
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach().clone()


def by_hand(rank: int, folder: str, heading: str, **names) -> bool:
    """Save after some steps, by the page's first block; resume by its second."""
    save, load = blocks(heading)
    names |= {"rank": rank, "torch": torch, "os": os, "dcp": dcp, "folder": folder, "path": f"{folder}/top.pt",
              "get_state_dict": get_state_dict, "set_state_dict": set_state_dict}  # fmt: skip

    def made() -> dict:
        model = DDP(net())
        return names | {"model": model, "raw_model": model.module,
                        "optimizer": compopt.RadiusAdamW(model.parameters(), **RADIUS)}  # fmt: skip

    here = made()
    train(rank, here["model"], here["optimizer"], range(BEFORE))
    run(save, here)
    torch.distributed.barrier()
    went_on = train(rank, here["model"], here["optimizer"], range(BEFORE, BEFORE + AFTER))
    again = run(load, made())
    return torch.equal(went_on, train(rank, again["model"], again["optimizer"], range(BEFORE, BEFORE + AFTER)))


def whole_tensor(p: torch.Tensor) -> torch.Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach()


def nanogpt(rank: int, folder: str) -> bool:
    often = {"iter_num": BEFORE, "eval_interval": BEFORE, "out_dir": folder, "master_process": rank == 0}
    return by_hand(rank, folder, "nanoGPT: if master_process", **often)


def hf_trainer(rank: int, folder: str) -> bool:
    from hf_models import gpt2, trainer

    (code,) = blocks("Hugging Face Trainer")
    results = []
    for checkpoint in (None, f"{folder}/hf/checkpoint-5"):
        model = gpt2()
        one = trainer(Path(folder) / "hf", model, optimizer_cls_and_kwargs=(compopt.RadiusAdamW, RADIUS))
        run(code, {"trainer": one, "checkpoint": checkpoint})
        results.append(parameters_to_vector(model.parameters()).detach().clone())
    return torch.equal(*results)


def accelerate(rank: int, folder: str) -> bool:
    from accelerate import Accelerator

    save, load = blocks("Accelerate")

    def made() -> dict:
        accelerator, model = Accelerator(cpu=True), net()
        model, optimizer = accelerator.prepare(model, compopt.RadiusAdamW(model.parameters(), **RADIUS))
        return {"accelerator": accelerator, "model": model, "optimizer": optimizer, "folder": f"{folder}/accelerate"}

    def steps(names: dict, which: range) -> torch.Tensor:
        return train(rank, names["model"], names["optimizer"], which, names["accelerator"].backward)

    here = made()
    steps(here, range(BEFORE))
    run(save, here)
    here["accelerator"].wait_for_everyone()
    went_on = steps(here, range(BEFORE, BEFORE + AFTER))
    return torch.equal(went_on, steps(run(load, made()), range(BEFORE, BEFORE + AFTER)))


def lightning(rank: int, folder: str, is_sharded: bool = False) -> bool:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from compopt.integrations.lightning import CompoptCallback

    save, load = blocks("Lightning")

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            return loss(self.net, rank, self.global_step)

        def configure_model(self):
            if is_sharded and not hasattr(self.net, "unshard"):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self):
            if is_sharded:
                return compopt.SeparateAdam(self.parameters(), lr=1e-2, rank=4, dense_steps=1, payload_dtype="float32")
            return compopt.RadiusAdamW(self.parameters(), **RADIUS)

        def on_save_checkpoint(self, checkpoint):  # as people did before, and harmless
            if not is_sharded:
                self.optimizers().optimizer.consolidate_state()

    def made(steps: int) -> dict:
        quiet = dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, logger=False)
        how = {"strategy": "ddp"}
        if is_sharded:
            # by default it shards over nodes only
            strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
            how = {"strategy": strategy, "callbacks": [CompoptCallback()]}
        trainer = Trainer(devices=2, accelerator="cpu", max_steps=steps, **how, **quiet)
        loader = torch.utils.data.DataLoader(torch.zeros(100, 1), batch_size=1)
        path = f"{folder}/lightning{is_sharded}.ckpt"
        return {"trainer": trainer, "model": Model(), "loader": loader, "path": path}

    first = made(BEFORE)
    first["trainer"].fit(first["model"], first["loader"])
    run(save, first)
    whole = made(BEFORE + AFTER)
    whole["trainer"].fit(whole["model"], whole["loader"])
    resumed = run(load, made(BEFORE + AFTER))
    flat = [parameters_to_vector([whole_tensor(p) for p in names["model"].parameters()]) for names in (whole, resumed)]
    # what goes on was not consolidated: the mean of what is owed is the same, its rounding is not
    return torch.allclose(*flat, rtol=1e-4, atol=1e-5) and resumed["trainer"].global_step == BEFORE + AFTER


def fabric(rank: int, folder: str) -> bool:
    from lightning.fabric import Fabric

    save, load = blocks("Fabric")

    def made() -> dict:
        one, model = Fabric(accelerator="cpu", devices=2, strategy="ddp"), net()
        one.launch()
        model, optimizer = one.setup(model, compopt.RadiusAdamW(model.parameters(), **RADIUS))
        return {"fabric": one, "model": model, "optimizer": optimizer, "path": f"{folder}/fabric.ckpt"}

    def steps(names: dict, which: range) -> torch.Tensor:
        return train(rank, names["model"], names["optimizer"], which, names["fabric"].backward)

    here = made()
    steps(here, range(BEFORE))
    run(save, here)
    went_on = steps(here, range(BEFORE, BEFORE + AFTER))
    return torch.equal(went_on, steps(run(load, made()), range(BEFORE, BEFORE + AFTER)))


PLACES = {
    "top": lambda rank, folder: by_hand(rank, folder, "Checkpoints"),
    "nanoGPT": nanogpt,
    "DCP": lambda rank, folder: by_hand(rank, f"{folder}/dcp", "Distributed checkpoints"),
    "Trainer": hf_trainer,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "Lightning, FSDP2": lambda rank, folder: lightning(rank, folder, is_sharded=True),
    "Fabric": fabric,
}
SLOW = ["Accelerate", "Lightning, FSDP2", "Fabric"]


def everywhere(rank: int, folder: str, names: list[str]) -> dict:
    as_torchrun_would(rank, 2)
    results = {}
    for name, place in ((name, PLACES[name]) for name in names):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                same = place(rank, folder)
            except ModuleNotFoundError as missing:
                same = f"{missing}"
        words = [str(w.message) for w in caught]
        results[name] = same, [one for one in words if "is incomplete" in one or "holds the residuals of" in one]
    return results


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    return run_ranks(everywhere, 2, str(tmp_path_factory.mktemp("places")), selected(request, "name"))


@pytest.mark.parametrize("name", slow_but(lambda name: name not in SLOW, PLACES))
def test_the_pages_lines_save_all_of_it(ranks, name):
    for results in ranks:
        same, words = results[name]
        if isinstance(same, str):
            pytest.skip(same)
        assert same and words == []


def test_the_page_opens_with_what_to_type():
    assert re.match(r"# Checkpoints\n\n```python\noptimizer.consolidate_state\(\)", PAGE)
