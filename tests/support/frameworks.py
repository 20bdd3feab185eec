"""Frameworks that train by themselves: their own entry point on two ranks of one thread, each with four optimizers.

The scripts in ``tests/frameworks/scripts`` are what a user writes. They take the name of an optimizer first, make it by
``make_optimizer``, and end with ``report``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from ranks import HANG_GUARD, free_port

SUPPORT, SCRIPTS = Path(__file__).parent, Path(__file__).parents[1] / "frameworks/scripts"
NAMES = ["adamw", "average", "separate", "local"]
IN_PLACE = dict(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
# their options, short for a test; bench/front_doors.py has others
SEPARATE = json.loads(os.environ.get("SEPARATE", '{"dense_steps": 3, "rank": 4}'))
LOCAL = json.loads(os.environ.get("LOCAL", '{"every": 2}'))


def make_optimizer(name: str, params: Any, lr: float, clip: float | None = None, use_muon: Any = None, **options: Any):
    """The framework's own AdamW, which the framework clips, one of ours that loses nothing, and two that do."""
    import torch

    import compopt

    params = list(params)
    if name == "adamw":
        return torch.optim.AdamW(params, lr=lr, **options)
    if name == "average":
        return compopt.Average(torch.optim.AdamW(params, lr=lr, **options), max_grad_norm=clip)
    if name == "separate":
        return compopt.SeparateAdam(params, lr=lr, max_grad_norm=clip, **SEPARATE, **options)
    if not isinstance(params[0], tuple):  # no names, by which Muon knows hidden matrices
        use_muon = use_muon or (lambda _, p: p.ndim == 2)
    return compopt.LocalSteps(compopt.MuonAdamW(params, lr=lr, use_muon=use_muon), max_grad_norm=clip, **LOCAL)


def die_in_step(number: int) -> None:
    """Let this rank end by SIGKILL as it is about to take this step: the other waits in an exchange."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from compopt._engine.optimizer import CompressedOptimizer

    steps = itertools.count(1)

    def count(optimizer: Any, args: Any, options: Any) -> None:
        if isinstance(optimizer, CompressedOptimizer) and next(steps) == number:  # what is inside another is none
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_pre_hook(count)


if os.environ.get("RANK") == "1" and "KILLED_IN_STEP" in os.environ:
    die_in_step(int(os.environ["KILLED_IN_STEP"]))


def report(model: Any, **more: Any) -> None:
    """Print whether both ranks have the same model, the sum of its parameters' sizes, their bits, and ``more``."""
    import torch
    import torch.distributed as dist

    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    flat = torch.cat([p.detach().double().reshape(-1) for p in whole])
    both = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(both, flat)
    if dist.get_rank() == 0:
        sizes = dict(equal=all(torch.equal(both[0], one) for one in both), size=float(flat.abs().sum()))
        bits = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
        print("RESULT", json.dumps({**sizes, "bits": bits, **more}), flush=True)


def run_framework(script: str, folder: Path, *args: object, **environment: str) -> dict[str, Any]:
    """Run a script (or "-m MODULE") on two ranks in ``folder``; return the last report, and all output as "text".

    With KILLED_IN_STEP=number in ``environment`` rank 1 is killed.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    paths = os.pathsep.join([str(SUPPORT), str(SCRIPTS), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*launcher, *(script.split() if script.startswith("-m ") else [str(SCRIPTS / script)]), *map(str, args)],
        cwd=folder,
        env={**os.environ, **IN_PLACE, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_GUARD,
    )
    if "KILLED_IN_STEP" in environment:
        assert run.returncode and "SIGKILL" in run.stdout, run.stdout[-6000:]
        return {"text": run.stdout}
    assert run.returncode == 0, run.stdout[-6000:]
    assert "Exception ignored" not in run.stdout, run.stdout[-3000:]
    lines = [line.partition("RESULT ")[2] for line in run.stdout.splitlines() if "RESULT {" in line]
    return {**(json.loads(lines[-1]) if lines else {}), "text": run.stdout}


def check_runs(runs: dict[str, dict[str, Any]]) -> None:
    """Replicas are equal, losses fall, and what loses nothing ends where AdamW ends."""
    for name, run in runs.items():
        assert run["equal"], name
        assert run["losses"][-1] < run["losses"][0], (name, run["losses"])
    ours, theirs = runs["average"], runs["adamw"]
    assert abs(ours["size"] / theirs["size"] - 1) < 1e-5
    pairs = zip(ours["losses"], theirs["losses"], strict=True)
    assert all(abs(a - b) < 1e-5 * max(1, abs(b)) for a, b in pairs), (ours["losses"], theirs["losses"])


def check_resumed(resumed: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    """A run that was killed, and resumed, ends with the parameters of one that was not, to the bit."""
    count = len(resumed["losses"])
    pairs = zip(resumed["losses"], undisturbed["losses"][-count:], strict=True)
    assert count and all(abs(a - b) < 1e-5 for a, b in pairs), (resumed["losses"], undisturbed["losses"])
    assert resumed["equal"] and resumed["bits"] == undisturbed["bits"]


def write_tiny_model(folder: Path) -> None:
    """Write a Llama with its tokenizer, and texts.jsonl, for frameworks that read a model from a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(60))])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=tokens, **special).save_pretrained(folder / "model")
    set_seed(0)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "model")
    texts = [" ".join(f"w{(start + i * k) % 60}" for i in range(24)) for start in range(60) for k in (1, 2)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def write_titan_assets(folder: Path) -> None:
    """Write texts.jsonl and assets/, a tokenizer of them, for torchtitan."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    random.seed(0)
    words = ["".join(random.choices("abcdefghij", k=4)) for _ in range(60)]
    texts = [" ".join(random.choices(words, k=80)) for _ in range(400)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=256, special_tokens=special))
    (folder / "assets").mkdir()
    tokenizer.save(str(folder / "assets/tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "assets/tokenizer_config.json").write_text(json.dumps(names))
