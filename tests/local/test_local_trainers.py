"""LocalSteps as users drive it, on two ranks: Trainer, Lightning, Fabric, Accelerate, and a loop in nanoGPT's shape.

Within a round ranks hold different models. Whoever evaluates, saves or ends has the round ended first.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hf_models import gpt2, trainer
from in_place import as_torchrun_would, in_place
from ranks import HANG_GUARD, preload, run_ranks
from slow_rows import slow_but
from test_saving_places import blocks, loss, net, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector
from user_scripts import CHANGED

import compopt

preload("lightning.pytorch", "lightning.fabric")
EVERY, STEPS, SAVED = 4, 10, 5  # the last step and the saved one are within a round


def make(params, inner=torch.optim.AdamW, **options) -> compopt.LocalSteps:
    return compopt.LocalSteps(inner(params, lr=1e-2), every=EVERY, growth_steps=0, **options)


def flat(model: nn.Module) -> torch.Tensor:
    return parameters_to_vector(model.parameters()).detach().clone()


def is_replicated(model: nn.Module) -> bool:
    """True if all ranks hold the same parameters."""
    mine = flat(model)
    first = mine.clone()
    dist.broadcast(first, 0)
    same = torch.tensor([float(torch.equal(mine, first))])
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def test_within_a_round_models_differ():
    """Else nothing is tested here."""
    assert run_ranks(differ, 2) == [[True, False, False, False, True], [True, False, False, False, True]]


def differ(rank: int) -> list[bool]:
    model = DDP(net())
    optimizer, found = make(model.parameters()), [is_replicated(model)]
    for step in range(EVERY):
        train(rank, model, optimizer, [step])
        found.append(is_replicated(model))
        assert optimizer.round_is_open is not found[-1]
    return found


def train(rank: int, model, optimizer, steps, backward=lambda value: value.backward()) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(loss(model, rank, step))
        optimizer.step()


# Hugging Face's Trainer


def watcher(found: dict):
    """A callback that looks whether models are equal where they have to be."""
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):
        def on_evaluate(self, args, state, control, model=None, **kwargs):
            found.setdefault("evaluated", []).append((state.global_step, is_replicated(model)))

        def on_save(self, args, state, control, model=None, **kwargs):
            found.setdefault("saved", []).append((state.global_step, is_replicated(model)))

    return Watcher()


def hf_run(folder: str, inner, checkpoint: str | None = None, extra=(), **changed) -> tuple[dict, torch.Tensor]:
    from compopt.integrations.hf import CompoptCallback

    found, model = {}, gpt2()
    callbacks = [CompoptCallback(), watcher(found), *extra]
    one = trainer(Path(folder), model, callbacks, STEPS, optimizers=(make(model.parameters(), inner), None))
    one.eval_dataset = one.train_dataset
    for name, value in {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 32, **changed}.items():
        setattr(one.args, name, value)
    one.train(resume_from_checkpoint=checkpoint)
    return found | {"ended": is_replicated(model), "open": one.optimizer.optimizer.round_is_open}, flat(model)


def in_hf_trainer(rank: int, folder: str) -> dict:
    from transformers import TrainerCallback

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 7

    found = {}
    for inner in (torch.optim.AdamW, torch.optim.SGD):
        place = f"{folder}/{inner.__name__}"
        found[inner.__name__], whole = hf_run(place, inner)
    found["resumed"], resumed = hf_run(place, torch.optim.SGD, f"{place}/checkpoint-{SAVED}")
    found["to the bit"] = torch.equal(whole, resumed)
    found["stopped"], _ = hf_run(f"{folder}/stopped", torch.optim.AdamW, extra=[Stops()])
    best = dict(load_best_model_at_end=True, save_strategy="best", metric_for_best_model="loss")
    found["best"], _ = hf_run(f"{folder}/best", torch.optim.AdamW, **best, greater_is_better=False)
    found["epochs"], _ = hf_run(f"{folder}/epochs", torch.optim.AdamW, eval_strategy="epoch", save_strategy="epoch")
    return found


def loaded_between(rank: int) -> list[bool]:
    """Another training begins with weights that are not those which the first one ended with."""
    from compopt.integrations.hf import CompoptCallback

    models = [net(), net()]
    optimizer = make(models[0].parameters(), torch.optim.SGD)
    train(rank, models[0], optimizer, range(SAVED))
    optimizer.end_round()
    models[0].load_state_dict(models[1].state_dict())  # as load_best_model_at_end
    CompoptCallback().on_train_begin(SimpleNamespace(max_grad_norm=None), None, None, optimizer=optimizer)
    new = make(models[1].parameters(), torch.optim.SGD)
    for model, stepped in zip(models, (optimizer, new), strict=True):
        train(rank, model, stepped, range(2 * EVERY))
    return [torch.equal(flat(models[0]), flat(models[1])), is_replicated(models[0])]


def test_a_second_training_begins_with_the_weights_that_were_loaded():
    assert run_ranks(loaded_between, 2) == [[True, True], [True, True]]


# Lightning


def lightning_model(rank: int, found: dict, inner):
    from lightning.pytorch import LightningModule

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            return loss(self.net, rank, self.global_step)

        def validation_step(self, batch, index):
            if not self.trainer.sanity_checking:
                found.setdefault("evaluated", []).append((self.global_step, is_replicated(self.net)))

        def on_save_checkpoint(self, checkpoint):
            saved = torch.cat([value.view(-1) for value in checkpoint["state_dict"].values()])
            same = torch.equal(saved, flat(self.net))
            found.setdefault("saved", []).append((self.global_step, same and is_replicated(self.net)))

        def configure_optimizers(self):
            return make(self.parameters(), inner)

    return Model()


def lightning_run(
    rank: int, folder: str, inner, checkpoint: str | None = None, steps: int = STEPS
) -> tuple[dict, torch.Tensor]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from compopt.integrations.lightning import CompoptCallback

    found: dict = {}
    model = lightning_model(rank, found, inner)
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    light = ModelCheckpoint(f"{folder}/light", filename="{step}", every_n_train_steps=7, save_weights_only=True)
    one = Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_steps=steps, callbacks=[saves, light, CompoptCallback()],
        val_check_interval=3, limit_val_batches=1, enable_progress_bar=False, enable_model_summary=False, logger=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.zeros(100, 1), batch_size=1)
    one.fit(model, loader, loader, ckpt_path=checkpoint)
    found |= {"ended": is_replicated(model), "open": one.optimizers[0].round_is_open}
    one.save_checkpoint(f"{folder}/end.ckpt")
    return found, flat(model)


def in_lightning(rank: int, folder: str) -> dict:
    found = {}
    for inner in (torch.optim.AdamW, torch.optim.SGD):
        place = f"{folder}/{inner.__name__}"
        found[inner.__name__], whole = lightning_run(rank, place, inner)
    found["resumed"], resumed = lightning_run(rank, place, torch.optim.SGD, f"{place}/step={SAVED}.ckpt")
    found["not saved"], _ = lightning_run(rank, f"{folder}/more", torch.optim.SGD, steps=STEPS + 1)
    found["to the bit"] = torch.equal(whole, resumed)
    return found


# Loops of one's own, by the lines of docs/checkpoints.md


def by_hand(rank: int, folder: str, heading: str, made, block: int = 0) -> dict:
    """Save within a round by the page's lines, resume by them, and end."""
    end = blocks("LocalSteps: end the round first")[block]
    save, load = blocks(heading)
    found = {}
    for inner in (torch.optim.AdamW, torch.optim.SGD):
        place, flats = f"{folder}/{inner.__name__}", []
        os.makedirs(place, exist_ok=True)
        for resumes in (False, True):
            names = {
                "rank": rank,
                "torch": torch,
                "os": os,
                "folder": place,
                "path": f"{place}/top.pt",
                "out_dir": place,
            }
            here = names | made(inner)
            some = here["model"], here["optimizer"]
            if resumes:
                run(load, here)
            else:
                train(rank, *some, range(SAVED), here["backward"])
                run(end, here)
                found.setdefault("saved", []).append((SAVED, is_replicated(here["model"])))
                run(save, here)
                dist.barrier()
            train(rank, *some, range(SAVED, STEPS), here["backward"])
            run(end, here)
            found.setdefault("ended", []).append(is_replicated(here["model"]))
            flats.append(flat(here["model"]))
    found["to the bit"] = torch.equal(*flats)  # of SGD, the last
    return found


def in_nanogpt(rank: int, folder: str) -> dict:
    def made(inner) -> dict:
        model = DDP(net())
        often = {"iter_num": SAVED, "eval_interval": SAVED, "master_process": rank == 0}
        ours = {"model": model, "raw_model": model.module, "optimizer": make(model.parameters(), inner)}
        return often | ours | {"backward": lambda value: value.backward()}

    return by_hand(rank, folder, "nanoGPT: if master_process", made)


def in_accelerate(rank: int, folder: str) -> dict:
    from accelerate import Accelerator

    def made(inner) -> dict:
        one, model = Accelerator(cpu=True), net()
        model, optimizer = one.prepare(model, make(model.parameters(), inner))
        return {"accelerator": one, "model": model, "optimizer": optimizer, "backward": one.backward}

    return by_hand(rank, folder, "Accelerate", made, block=1)


def in_fabric(rank: int, folder: str) -> dict:
    from lightning.fabric import Fabric

    def made(inner) -> dict:
        one, model = Fabric(accelerator="cpu", devices=2, strategy="ddp"), net()
        one.launch()
        model, optimizer = one.setup(model, make(model.parameters(), inner))
        return {"fabric": one, "model": model, "optimizer": optimizer, "backward": one.backward}

    return by_hand(rank, folder, "Fabric", made, block=1)


def nanogpt_script(rank: int, folder: str) -> dict:
    """The whole script, in which two lines change."""
    end = blocks("LocalSteps: end the round first")[0] + blocks("nanoGPT: if master_process")[0].splitlines()[1].strip()
    source, old, _ = CHANGED["nanoGPT"]
    save = "checkpoint = {'model'"
    assert old in source and save in source
    source = source.replace(old, f"compopt.LocalSteps({old}, {EVERY}, growth_steps=0, outer_lr=1, outer_momentum=0)")
    names = {"RANK": rank, "FOLDER": folder, "losses": [], "__name__": "__main__"}
    with in_place():
        exec(compile(source.replace(save, f"{end}\n{save}"), "train.py", "exec"), names)
    losses = names["losses"]
    return {"ended": is_replicated(names["model"]), "learns": sum(losses[-5:]) / 5 < losses[0] - 0.1}


WAYS = {
    "Trainer": in_hf_trainer,
    "Lightning": in_lightning,
    "Accelerate": in_accelerate,
    "Fabric": in_fabric,
    "nanoGPT": in_nanogpt,
    "the script in nanoGPT's shape": nanogpt_script,
}
SLOW = ["Accelerate", "Fabric", "the script in nanoGPT's shape"]


def driven(rank: int, way: str, folder: str) -> dict:
    as_torchrun_would(rank, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = WAYS[way](rank, folder)
        except ModuleNotFoundError as missing:
            return {"missing": str(missing)}
        gc.collect()
    words = [str(w.message) for w in caught]
    return found | {"warned": [one for one in words if "LocalSteps" in one or "CompoptCallback" in one]}


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory) -> list[dict]:
    """The results of both ranks, on one of the ways."""
    found = run_ranks(driven, 2, request.param, str(tmp_path_factory.mktemp("driven")))
    if "missing" in found[0]:
        pytest.skip(found[0]["missing"])
    return found


def on(*ways: str):
    return pytest.mark.parametrize("ranks", slow_but(lambda way: way not in SLOW, ways), indirect=True)


@on("Trainer", "Lightning")
def test_a_trainer_evaluates_saves_and_ends_with_one_model(ranks):
    in_trainer = "stopped" in ranks[0]
    for found in ranks:
        for inner in ("AdamW", "SGD"):
            events = found[inner]
            assert events["evaluated"] == [(step, True) for step in ((3, 6, 9, 10) if in_trainer else (3, 6, 9))]
            assert events["saved"] == [(step, True) for step in ((5, 10) if in_trainer else (5, 7, 10, 10))]
            assert events["ended"] and not events["open"]
        assert found["resumed"]["ended"]


@on("Accelerate", "Fabric", "nanoGPT")
def test_the_pages_line_saves_and_ends_with_one_model(ranks):
    for found in ranks:
        assert found["saved"] == [(SAVED, True)] * 2 and found["ended"] == [True] * 4


@on("Trainer", "Lightning", "Accelerate", "Fabric", "nanoGPT")
def test_a_run_resumed_from_the_end_of_a_round_is_the_uninterrupted_one(ranks):
    """To the bit, where the inner optimizer has no moments of each rank's own."""
    for found in ranks:
        assert found["to the bit"]


@on("Trainer")
@pytest.mark.parametrize("how", ["stopped", "best", "epochs"])
def test_other_ends_of_a_trainer(ranks, how):
    for found in ranks:
        events = found[how]
        assert events["ended"] and not events["open"]
        assert all(same for _, same in [*events.get("evaluated", []), *events["saved"]])


@on("Lightning")
def test_lightning_ends_a_round_though_it_saves_nothing_at_the_end(ranks):
    for found in ranks:
        events = found["not saved"]
        assert events["ended"] and not events["open"]


@on("the script in nanoGPT's shape")
def test_a_script_in_nanogpts_shape_ends_with_one_model(ranks):
    for found in ranks:
        assert found["ended"] and found["learns"]


@on(*WAYS)
def test_nobody_is_warned(ranks):
    assert [found["warned"] for found in ranks] == [[], []]


# Rounds that nobody ends


def left_open(rank: int, when: str) -> list[str]:
    model = net()
    optimizer = make(model.parameters(), fragments=2 if when == "after a round, of fragments" else 1)
    steps = {"within a round": 5, "before a step": 0}.get(when, 2 * EVERY)
    train(rank, model, optimizer, range(steps))
    if when == "ended":
        train(rank, model, optimizer, range(2))
        optimizer.end_round()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del optimizer
        gc.collect()
    return [f"{Path(w.filename).name}: {w.message}" for w in caught]


def all_left_open(rank: int) -> dict[str, list[str]]:
    cases = ("within a round", "before a step", "after a round", "after a round, of fragments", "ended")
    return {when: left_open(rank, when) for when in cases}


def test_an_optimizer_that_goes_within_a_round_says_so_on_rank_0():
    first, second = run_ranks(all_left_open, 2)
    assert not any(second.values())
    (said,) = first.pop("within a round")
    assert said == (
        "test_local_trainers.py: LocalSteps ended within a round: ranks took 1 step since parameters were last equal, "
        "and each holds a model of its own. Call end_round() on all ranks after the last step."
    )
    (said,) = first.pop("after a round, of fragments")
    assert "8 steps" in said
    assert not any(first.values())


SCRIPT = """
import sys, torch, compopt
rank, file, fails = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "fails"
torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = compopt.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), every=4, growth_steps=0)
for step in range(6):
    model(torch.ones(2, 64) * (1 + rank)).square().mean().backward()
    optimizer.step()  # the line
    optimizer.zero_grad()
if fails:
    raise SystemError("of the script")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["ends", "fails"])
def test_a_process_that_ends_within_a_round_says_so_once(tmp_path, end):
    """The run ends as it should; else there is another message to read."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [[sys.executable, str(script), str(rank), str(tmp_path / "store"), end] for rank in range(2)]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in words]
    said = "".join(rank.communicate(timeout=HANG_GUARD)[1] for rank in ranks)
    assert said.count("LocalSteps ended within a round") == (end == "ends"), said
    assert ("train.py:10: UserWarning" in said) == (end == "ends"), said
