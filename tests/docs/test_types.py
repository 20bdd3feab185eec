"""A type checker accepts a user's right script, and names the line where a word is wrong."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import HANG_GUARD

import compopt

ROOT = Path(compopt.__file__).parents[1]

RIGHT = """
from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR

import compopt
from compopt.activations import (
    ALONE,
    AutoEncoder,
    CompressedRowwiseParallel,
    Compressor,
    Identity,
    PowerSGD,
    Quantize,
    RandomK,
    ReceiveCompressed,
    SendCompressed,
    TensorParallelRanks,
    TopK,
    drop_compressors,
    set_compression,
)
from compopt.costmodel import Workload, advise
from compopt.planning.hardware import Machine
from compopt.planning.measurement import fit
from compopt.planning.methods import METHODS
from compopt.planning.prediction import Situation, predict_rows
from compopt.integrations.hf import CompoptCallback


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    group: dist.ProcessGroup = dist.new_group([0, 1])
    params = model.parameters()
    named = list(model.named_parameters())
    groups = [{"params": list(params), "compress": False, "lr": 1e-3}]
    return [
        compopt.RadiusAdamW(params, lr=3e-4, density=0.4, interval=200, dense_steps=1000),
        compopt.AdamS(params, process_group=compopt.Ranks(group, rank=0, size=2, generation=1)),
        compopt.RadiusAdamW(groups, payload_dtype=torch.int8, offload="residual", when="auto"),
        compopt.ScapeAdamS(params, density=0.05, clip="consistent"),
        compopt.SeparateAdam(named, projection="tracked", rank=16, process_group=group),
        compopt.Separate(torch.optim.SGD(params, lr=0.1), projection="gaussian", ratio=16),
        compopt.TagcAdamW(named, density=0.01, codec="sketch", max_grad_norm=1.0),
        compopt.AdamS(params, betas=(0.9, 0.95)),
        compopt.Average(torch.optim.AdamW(named), payload_dtype="int4", max_grad_norm=1.0, process_group=group),
        compopt.LocalSteps(torch.optim.AdamW(params), every=30, fragments=2, delay=3, payload_dtype=torch.int8),
        compopt.LocalSteps([torch.optim.Muon(params), torch.optim.AdamW(params)], every=30),
        compopt.Separate(compopt.MuonAdamW(model.named_parameters(), lr=1e-3, use_muon=lambda name, p: p.ndim == 2)),
    ]


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = DDP(model)
        self.optimizer = compopt.RadiusAdamW(self.model.parameters(), lr=torch.tensor(1e-3))
        self.schedule = LambdaLR(self.optimizer, lambda step: min(1.0, step / 100))
        compopt.attach(self.model, self.optimizer)
        with compopt.diagnose(self.model, self.optimizer, steps=40, start=5) as seen:
            pass
        words: list[str] = [f"{row.method} {row.kept:.2f} {row.line}" for row in seen.rows]
        print(seen, seen.order, words, seen.findings["seconds", "step"])
        needed: int = compopt.memory(self.optimizer).peak
        print(needed, compopt.memory(torch.optim.SGD(self.model.parameters())).state["momentum_buffer"])

    def train(self, x: Tensor, y: Tensor) -> float:
        loss: Tensor = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        try:
            self.optimizer.step()
        except compopt.CommunicationError:
            self.optimizer.rebind(dist.new_group([0]))
        self.optimizer.zero_grad()
        self.schedule.step()
        stats: compopt.Stats = self.optimizer.stats
        return stats.bytes_sent / stats.bytes_dense + stats.residual_norm()

    def save(self, path: str) -> None:
        self.optimizer.consolidate_state()
        torch.save({"optimizer": self.optimizer.state_dict()}, path)
        self.optimizer.load_state_dict(torch.load(path)["optimizer"])


class Halves(Compressor):
    summable = True

    def compress(self, x: Tensor, ranks: TensorParallelRanks = ALONE) -> tuple[Tensor, None]:
        return x.unflatten(-1, (-1, 2)).mean(-1), None

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return values.repeat_interleave(2, dim=-1).view(shape)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return math.prod(shape) // 2 * dtype.itemsize


def activations(mlp: nn.Module, blocks: list[nn.Module], mesh: dist.device_mesh.DeviceMesh) -> None:
    row = CompressedRowwiseParallel(lambda: AutoEncoder(hidden=1024, code=100))
    parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": row})
    codecs: list[Compressor] = [Identity(), RandomK(0.1), PowerSGD(4, hidden=64), Halves()]
    codecs.append(Quantize(4, scale="tensor", gradient_bits=4))
    pair = dist.new_group([0, 1])
    first = SendCompressed(nn.Sequential(*blocks[:6]), Quantize(2), pair=pair)
    second = ReceiveCompressed(nn.Sequential(*blocks[6:]), TopK(0.1), shape=(8, 128, 1024))
    set_compression(first, False)
    print(drop_compressors(second), sum(codec.bytes((8, 64)) for codec in codecs))


def costs(model: nn.Module) -> str:
    advice = advise(model, ranks=8, link_bits_per_s=1e9, step_s=0.4, device="h100")
    machine = Machine(ranks=8, link_bytes_per_s=1e9)
    situation = Situation(Workload.of_size(10**9), machine, 0.4, 0.1, 1, None, 0.02)
    found = fit([{"bytes": 1e6}, {"bytes": 2e6}], [0.1, 0.2], weights="absolute")
    print([row.run for row in predict_rows(situation)], list(METHODS), found.coefficients["bytes"])
    return f"{advice} {advice.method}: {advice.recommendation}"


callbacks = [CompoptCallback()]
"""

WRONG = """
import torch

import compopt
from compopt.activations import Quantize

params = torch.nn.Linear(2, 2).parameters()
compopt.RadiusAdamW(params, payload_dtype="flt32")
compopt.RadiusAdamW(params, density="high")
compopt.ScapeAdamS(params, when="sometimes")
compopt.TagcAdamW(params, codec="zip")
compopt.AdamS(params, process_group=3)
compopt.Separate(params)
Quantize(4, scale="row")
compopt.RadiusAdamW(params).stats.bytes
"""


@pytest.fixture(scope="module")
def errors_of_mypy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the errors of mypy --strict in both scripts. Its cache is that of ``make types``, else it reads torch."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("needs mypy")
    folder = tmp_path_factory.mktemp("project")
    scripts = [folder / "right.py", folder / "wrong.py"]
    for script, text in zip(scripts, (RIGHT, WRONG), strict=True):
        script.write_text(text)
    words = [sys.executable, "-m", "mypy", "--show-absolute-path", *map(str, scripts)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=HANG_GUARD)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    # by name: of a text that it knows mypy repeats the path of the first time
    return {script.name: [line for line in errors if f"/{script.name}:" in line] for script in scripts}


@pytest.mark.slow
@pytest.mark.long
def test_a_right_script_passes_strict_checking(errors_of_mypy):
    assert errors_of_mypy["right.py"] == []


@pytest.mark.slow
@pytest.mark.long
def test_wrong_words_are_found_on_their_lines(errors_of_mypy):
    lines = [int(re.search(r"wrong\.py:(\d+)", line)[1]) for line in errors_of_mypy["wrong.py"]]
    calls = [number for number, line in enumerate(WRONG.splitlines(), 1) if line.startswith(("compopt.", "Quantize("))]
    assert sorted(set(lines)) == calls, errors_of_mypy["wrong.py"]


def test_a_checker_may_read_the_package():
    assert (ROOT / "compopt" / "py.typed").is_file()


def test_every_public_name_is_in_the_script():
    assert [name for name in compopt.__all__ if f"compopt.{name}" not in RIGHT] == []
