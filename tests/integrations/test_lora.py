"""docs/lora.md: what a step of adapters sends, and on two ranks its lines for PEFT, Trainer and AdaLoRA."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from in_place import as_torchrun_would
from ranks import preload, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt

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
