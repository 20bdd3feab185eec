"""Hugging Face's Trainer and Accelerate, two gloo processes, a GPT-2 from its configuration; LoRA."""

from __future__ import annotations

import dataclasses
import gc
import re
import warnings
import weakref
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hf_models import AT, STEPS, dataset, gpt2, trainer
from in_place import as_torchrun_would
from ranks import preload, run_ranks
from slow_rows import selected, slow_but
from table import CASES, Case, by_name
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector

import compopt

if not all(map(find_spec, ("transformers", "accelerate"))):  # to import them takes seconds, of each worker
    pytest.skip("needs transformers and accelerate", allow_module_level=True)
preload("transformers.trainer", "accelerate")
SAMPLED = dataclasses.replace(by_name["ScapeAdamS"], compressed=dict(density=0.1, density_steps=0))
CASE = {case.name: case for case in CASES} | {"ScapeAdamS, sampled": SAMPLED}  # that one on tensors worth a sample
MAIN = ["SeparateAdam", "AdamS", "LocalSteps"]  # the others with `make slow`
every_name = pytest.mark.parametrize("name", slow_but(lambda name: name in MAIN, CASE))
EVENTS = "should_evaluate", "should_save", "should_training_stop"


def given(case: Case, model) -> dict:
    """Return what the Trainer is given: a class and its options, or where that is not all, the optimizer."""
    if case.build:
        return {"optimizers": (case.make(model.parameters()), None)}
    return {"optimizer_cls_and_kwargs": (case.cls, {"lr": case.lr, **case.compressed})}


def trained(rank: int, folder: str, names: list[str]) -> dict[str, dict]:
    from compopt.integrations.hf import CompoptCallback

    results = {}
    for name, case in ((name, CASE[name]) for name in names):
        width = 128 if case is SAMPLED else 64
        place, model = Path(folder) / name, gpt2(width)
        whole = trainer(place, model, [CompoptCallback()], **given(case, model))
        whole.train()
        first = parameters_to_vector(model.parameters()).detach()

        model = gpt2(width)
        again = trainer(place, model, [CompoptCallback()], **given(case, model))
        again.train(resume_from_checkpoint=str(place / f"checkpoint-{AT}"))
        second = parameters_to_vector(model.parameters()).detach()
        theirs = second.clone()
        dist.broadcast(theirs, 0)
        optimizer = again.optimizer.optimizer
        results[name] = {
            "resumed": torch.equal(first, second),
            "replicas": torch.equal(second, theirs),
            "early": [optimizer.stats.buckets, optimizer.stats.early_buckets],
            "steps": optimizer.stats.applied_steps,
            "clip": [again.args.max_grad_norm, *(g.get("max_grad_norm") for g in optimizer.option_groups)],
            "residuals": torch.load(place / f"checkpoint-{AT}" / "optimizer.pt")["param_groups"][0]["residuals"],
            "logs": [log for log in whole.state.log_history if "loss" in log],
        }  # fmt: skip
    return results


def other_ways(rank: int, folder: str) -> dict:
    import accelerate
    import transformers

    import compopt
    from compopt.integrations.hf import CompoptCallback

    results, radius = {}, {"lr": 1e-2, "density": 0.1, "interval": 3, "dense_steps": 1}

    model = gpt2()  # made outside, and no callback: the Trainer clips the local gradient, which was sent already
    biases = [p for p in model.parameters() if p.dim() < 2]
    optimizer = compopt.RadiusAdamW([{"params": [p for p in model.parameters() if p.dim() > 1]}], **radius)
    optimizer.add_param_group({"params": biases})  # two buckets, so that one is sent in backward
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    plain = trainer(Path(folder) / "plain", model, steps=3, optimizers=(optimizer, schedule))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain.train()
    stats, warned = optimizer.stats, sum("changed between" in str(w.message) for w in caught)
    results["plain"] = stats.phase, stats.resent, warned

    class Asks(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 2

    for order, late in {"before": False, "after": True}.items():
        model = gpt2()
        optimizer = compopt.RadiusAdamW(model.parameters(), **radius)
        callbacks = [CompoptCallback(), Asks()] if late else [Asks(), CompoptCallback()]
        asked = trainer(Path(folder) / order, model, callbacks, steps=3, optimizers=(optimizer, None))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            asked.train()
        results[order] = sum("put CompoptCallback last" in str(w.message) for w in caught)

    model = gpt2()
    adamw = torch.optim.AdamW(model.parameters())
    try:
        trainer(Path(folder) / "adamw", model, [CompoptCallback()], steps=1, optimizers=(adamw, None)).train()
    except ValueError as error:
        results["not ours"] = str(error)

    accelerator = accelerate.Accelerator(cpu=True)
    model, data = gpt2(), torch.utils.data.DataLoader(dataset(), batch_size=4)
    optimizer = compopt.RadiusAdamW(model.parameters(), **radius)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    for batch in data:
        optimizer.zero_grad()
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        schedule.step()
    stats = optimizer.optimizer.stats
    mine = parameters_to_vector(model.parameters()).detach()
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    results["accelerate"] = stats.phase, stats.bytes_sent / stats.bytes_dense, torch.equal(mine, theirs)
    return results


def everything(rank: int, folder: str, names: list[str]) -> tuple[dict, dict]:
    as_torchrun_would(rank, 2)
    return trained(rank, folder, names), other_ways(rank, folder)


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    return run_ranks(everything, 2, str(tmp_path_factory.mktemp("trainer")), selected(request, "name"))


@pytest.fixture(scope="module")
def runs(ranks):
    return [results for results, _ in ranks]


@every_name
def test_interrupted_and_resumed_is_the_uninterrupted_run_to_the_bit(runs, name):
    assert all(rank[name]["resumed"] and rank[name]["replicas"] and rank[name]["steps"] == STEPS for rank in runs)


@every_name
def test_the_callback_moves_the_clip_so_that_backward_may_send(runs, name):
    for rank in runs:
        in_args, *in_groups = rank[name]["clip"]
        clips_itself = any(norm is not None for norm in in_groups)
        # while it trains the argument is 0, else gradients would change after they were sent
        assert (in_args, set(in_groups)) == (0.5, {0.5} if clips_itself else {None})
        buckets, overlapped = rank[name]["early"]  # although the Trainer multiplies gradients by 1 to learn their norm
        if clips_itself:
            assert overlapped == buckets - 1


@every_name
def test_the_checkpoint_holds_what_all_ranks_owe(runs, name):
    assert all(rank[name]["residuals"] == "mean" for rank in runs)


@every_name
def test_the_trainers_logs_tell_what_crossed_the_network(runs, name):
    logs = runs[0][name]["logs"]
    assert len(logs) >= 4
    assert all(log["bytes_sent"] > 0 and log["bytes_dense"] > 0 and log["grad_norm"] > 0 for log in logs)
    assert all(log["skipped_steps"] == 0 and isinstance(log["phase"], str) for log in logs)
    if name == "SeparateAdam":  # it saves after step 5: none of that is in the mean of steps 5 and 6
        assert len({log["bytes_sent"] for log in logs[2:4]}) == 1, logs
    keeps = bool(CASE[name].cls.rank_local_state)
    assert (logs[-1]["residual_norm"] > 0) == keeps


def test_other_ways_to_train(ranks):
    for rank, (_, results) in enumerate(ranks):
        assert results["plain"] == ("resample", True, int(rank == 0))  # rank 0 warns for all
        assert results["before"] == 0 and results["after"] == int(rank == 0)
        assert "needs an optimizer of compopt" in results["not ours"] and "AdamW" in results["not ours"]
        phase, share, equal = results["accelerate"]
        assert phase == "sparse" and share < 0.2 and equal


def test_arguments_keep_their_clip_when_training_raises():
    """Then there is no on_train_end. Another Trainer with the same arguments clips as they say."""
    from compopt.integrations.hf import CompoptCallback

    def begin(cls) -> float | None:
        optimizer = cls([torch.nn.Parameter(torch.zeros(3))])
        CompoptCallback().on_train_begin(args, None, None, optimizer=optimizer)
        return optimizer.param_groups[0].get("max_grad_norm")

    args = SimpleNamespace(max_grad_norm=0.5)
    for _ in range(2):
        assert begin(compopt.RadiusAdamW) == 0.5 and args.max_grad_norm == 0
    args.max_grad_norm = 0.0  # the user's
    assert begin(compopt.RadiusAdamW) is None
    args.max_grad_norm = 0.5
    assert begin(compopt.RadiusAdamW) == 0.5
    CompoptCallback().on_train_end(args, None, None)
    assert args.max_grad_norm == 0.5


def test_a_trainer_that_never_logs_keeps_no_stats_of_earlier_steps():
    from compopt.integrations.hf import CompoptCallback, LogStats

    optimizer = compopt.RadiusAdamW([p := torch.nn.Parameter(torch.zeros(3))])
    callback, control = CompoptCallback(), SimpleNamespace(**dict.fromkeys(EVENTS, False))
    first = None
    for _ in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
        callback.on_step_end(None, None, control, optimizer=optimizer)
        first = first or weakref.ref(optimizer.stats)
    gc.collect()
    assert first() is None
    ended = dataclasses.replace(optimizer.stats, bytes_sent=600)  # as where a round ends with the epoch
    callback._prepare_events = lambda ours, control: setattr(ours._engine, "stats", ended)
    callback.on_epoch_end(None, None, control, optimizer=optimizer)
    logs, state = {"loss": 1.0}, SimpleNamespace(log_history=[{}])
    LogStats(callback).on_log(None, state, control, logs)
    assert logs["bytes_sent"] == 200 and state.log_history[-1]["phase"] == optimizer.stats.phase
    again = {"loss": 1.0}
    LogStats(callback).on_log(None, state, control, again)
    assert again == {"loss": 1.0}  # no step since


def average(params) -> compopt.Average:
    return compopt.Average(torch.optim.AdamW(params))


@pytest.mark.parametrize("make", [compopt.RadiusAdamW, average])
def test_a_resumed_run_clips_as_its_own_arguments_say(make):
    """Not as those of the run that saved: its clip is in the checkpoint's groups."""
    from compopt.integrations.hf import CompoptCallback

    def begin(optimizer, clip: float) -> SimpleNamespace:
        CompoptCallback().on_train_begin(args := SimpleNamespace(max_grad_norm=clip), None, None, optimizer=optimizer)
        return args

    def clip_of(optimizer) -> float | None:
        return optimizer.option_groups[0]["max_grad_norm"]

    first = make([torch.nn.Parameter(torch.zeros(3))])
    saved_args, saved = begin(first, 0.5), first.state_dict()
    for clip in (0.25, 0.0, 1.0):
        begin(first, clip)  # another Trainer with the same optimizer
        assert clip_of(first) == (clip or None)
        resumed = make([torch.nn.Parameter(torch.zeros(3))])
        resumed.load_state_dict(saved)
        begin(resumed, clip)
        assert clip_of(resumed) == (clip or None)
        resumed.option_groups[0]["max_grad_norm"] = 0.7  # the user's
        begin(resumed, clip)
        assert clip_of(resumed) == 0.7
    resumed.load_state_dict(saved)
    saved_args.max_grad_norm = 0.0  # as in training_args.bin of the checkpoint
    CompoptCallback().on_train_begin(saved_args, None, None, optimizer=resumed)
    assert clip_of(resumed) == 0.5


PAGE = (Path(__file__).parents[2] / "docs" / "lora.md").read_text()
WITH_TRAINER, ADALORA = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
HAS_PEFT = all(map(find_spec, ("peft", "transformers", "accelerate")))
OPTIONS = ({}, {"payload_dtype": "int4"}, {"rank": 4})  # the columns of the page's table
if HAS_PEFT:
    preload("transformers.trainer", "accelerate", "peft")


def share(lora_rank: int, **options) -> float:
    """Percent of DDP's bytes that a step of one adapter pair sends."""
    pair = [nn.Parameter(torch.zeros(size)) for size in ((lora_rank, 768), (768, lora_rank))]
    optimizer = compopt.SeparateAdam(pair, simulate=True, dense_steps=1, **options)
    for _ in range(3):
        for p in pair:
            p.grad = torch.randn(p.shape)
        optimizer.step()
    return 100 * optimizer.stats.bytes_sent / optimizer.stats.bytes_dense


def test_the_page_counts_bytes_as_a_step_does():
    rows = re.findall(r"^\| (\d+)[^|]* \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \|$", PAGE, re.MULTILINE)
    assert len(rows) == 5
    for lora_rank, *cells in rows:
        counted = [share(int(lora_rank), **options) for options in OPTIONS]
        assert [float(f"{value:.2g}") for value in counted] == [float(cell) for cell in cells], lora_rank


def differs(model: nn.Module) -> float:
    """The largest difference of a parameter from rank 0's."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, 0)
    return float((mine - first).abs().max())


def fine_tune(rank: int, folder: str) -> dict:
    as_torchrun_would(rank, 2)
    import transformers
    from hf_models import dataset, gpt2
    from peft import AdaLoraConfig, get_peft_model

    transformers.logging.set_verbosity_error()
    base = gpt2(256)
    frozen = [p.detach().clone() for p in base.parameters()]
    args = transformers.TrainingArguments(
        output_dir=f"{folder}/lora", max_steps=6, per_device_train_batch_size=4, save_steps=3, use_cpu=True,
        report_to=[], disable_tqdm=True, seed=0, learning_rate=1e-2, logging_steps=1,
    )  # fmt: skip
    names = {"model": base, "args": args, "data": dataset(), "compopt": compopt, "Trainer": transformers.Trainer}
    exec(compile(WITH_TRAINER, "docs/lora.md", "exec"), names)
    stats, state = names["optimizer"].stats, names["optimizer"].state
    trained = [p for p in names["model"].parameters() if p.requires_grad]
    results = {
        "differs": differs(names["model"]),
        "frozen": all(map(torch.equal, frozen, [p for p in names["model"].parameters() if not p.requires_grad])),
        "state": len(trained) == sum(len(state[p]) > 0 for p in state),
        "share": stats.bytes_sent / stats.bytes_dense,
        "trained": all(p.any() for p in trained),  # lora_B begins at zero
    }

    config = AdaLoraConfig(init_r=6, target_r=2, tinit=1, tfinal=2, deltaT=1, total_step=8, target_modules="all-linear")
    torch.manual_seed(0)
    model = get_peft_model(gpt2(), config)
    ddp = DDP(model, find_unused_parameters=True)
    optimizer = compopt.SeparateAdam(ddp.parameters(), lr=1e-2, dense_steps=1)
    optimizer.check_replicas_every = 1
    for step in range(1, 7):
        optimizer.zero_grad()
        tokens = torch.stack([dataset()[8 * step + 4 * rank + i]["input_ids"] for i in range(4)])
        ddp(input_ids=tokens, labels=tokens).loss.backward()
        exec(
            compile(ADALORA, "docs/lora.md", "exec"),
            {"torch": torch, "optimizer": optimizer, "model": model, "step": step},
        )
    pruned = [name for name, p in model.named_parameters() if "lora_E" in name and not p.all()]
    return results | {"AdaLoRA": differs(model), "pruned": pruned}


@pytest.mark.skipif(not HAS_PEFT, reason="needs peft, transformers and accelerate")
def test_the_pages_lines_train_adapters(tmp_path):
    for results in run_ranks(fine_tune, 2, str(tmp_path)):
        assert results["differs"] == 0 and results["frozen"] and results["state"]
        assert 0.2 < results["share"] < 0.27  # rounded to int8
        assert results["trained"]
        assert results["AdaLoRA"] == 0 and results["pruned"]
