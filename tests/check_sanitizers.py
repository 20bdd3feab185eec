"""The C passes under AddressSanitizer and UndefinedBehaviorSanitizer, with random shapes and options: make sanitize.

Each instruction set that this machine has gets 20 seconds, in a process of its own into which the sanitizer is loaded
first. What it finds it prints, and the command fails.

    python tests/check_sanitizers.py [seconds]
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path += [os.path.join(os.path.dirname(__file__), folder) for folder in ("support", "../kernels/native")]
from build_passes import compile_passes, find_compiler
from sim import Ranks
from torch import nn

import compopt
from compopt._backends.native import library

SANITIZERS = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SIZES = [0, 1, 7, 8, 15, 16, 17, 31, 511, 512, 513, 1023, 4095, 4096, 4097, 16383, 16385]
DENSITIES = [0.001, 0.01, 0.1, 0.4, 0.9, 1.0]


def length(draw: random.Random) -> int:
    return draw.choice(SIZES) if draw.random() < 0.6 else draw.randrange(6000)


def optimizer_of(draw: random.Random):
    """A class and its options."""
    common = {
        "payload_dtype": draw.choice([None, torch.bfloat16, torch.int8, "int4"]),
        "dense_steps": draw.randrange(3),
    }
    common["max_grad_norm"] = draw.choice([None, 0.5])
    density = draw.choice(DENSITIES)
    kind = draw.choice(["RadiusAdamW", "ScapeAdamS", "TagcAdamW", "AdamS", "SeparateAdam"])
    if kind == "RadiusAdamW":
        return kind, {**common, "density": density, "interval": draw.randint(1, 4)}
    if kind == "ScapeAdamS":
        local = {"clip": draw.choice(["consistent", "scape"])}
        return kind, {**common, **local, "density": density, "density_steps": draw.randrange(3)}
    if kind == "TagcAdamW":
        common["payload_dtype"] = draw.choice([None, torch.bfloat16])
        return kind, {**common, "density": density}
    if kind == "AdamS":
        return kind, {}
    if draw.random() < 0.2:
        return kind, {**common, "projection": "gaussian", "ratio": 8}
    return kind, {
        **common,
        "rank": draw.choice([1, 2, 3, 4, 15, 16, 17, 33, 64, 65, 130]),
        "ef_beta": draw.choice(["auto", 0.5, 1.0]),
    }


def matrix(draw: random.Random) -> tuple[int, int]:
    """Its sides; its r is the rank, or the smaller side."""
    sides = [draw.choice([2, 3, 15, 16, 17, 64, 66, 255, 256, 257]) for _ in range(2)]
    return tuple(side if draw.random() < 0.6 else draw.randrange(1, 300) for side in sides)


class Net(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)


def example(seed: int) -> None:
    """A few steps of a random model on one to three ranks; gradients with ties, zeros, absent ones."""
    draw = random.Random(seed)
    name, options = optimizer_of(draw)
    shapes = [(length(draw),) for _ in range(draw.randint(1, 5))] + [(40,)]
    if name == "SeparateAdam":
        shapes += [shape for shape in (matrix(draw) for _ in range(3)) for _ in range(draw.randint(1, 3))]
    compress = draw.random() < 0.8

    def make(params, **more):
        groups = [{"params": list(params), "compress": True}] if compress else params
        return getattr(compopt, name)(groups, maximize=seed % 2 == 1, **options, **more)

    torch.set_num_threads(draw.choice([1, 1, 3]))
    ranks = Ranks(draw.randint(1, 3), lambda: Net(shapes), make, seed=seed)
    for step in range(5):
        for rank, model, _ in ranks:
            generator = torch.Generator().manual_seed(seed * 100 + step * 10 + rank)
            for p in model.parameters():
                g = torch.randn(p.shape, generator=generator)
                how = draw.randrange(8)
                p.grad = None if how == 0 else g.round() if how == 1 else torch.zeros_like(g) if how == 2 else g
                if how == 3 and g.numel() and step == 3:
                    g.view(-1)[0] = float("nan")
        ranks.world.step(ranks.optimizers)


def inside(seconds: float) -> None:
    """In a process with the sanitizer."""
    folder = Path(os.environ["COMPOPT_SANITIZED_PASSES"])
    library.find_objects = lambda: {path.stem: path for path in folder.glob("*.so")}
    example(0)  # imports what is slow to import
    start, seed = time.monotonic(), 1
    while time.monotonic() - start < seconds:
        try:
            example(seed)
        except Exception:
            print(f"example {seed} of {os.environ['COMPOPT_NATIVE_ISA']} raised", file=sys.stderr)
            raise
        seed += 1
    print(f"{os.environ['COMPOPT_NATIVE_ISA']}: {seed} examples, nothing found")


def runtime_of(compiler: list[str]) -> str:
    """The sanitizer's library, which has to be loaded before everything else."""
    message = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(message):
        raise SystemExit(f"{compiler[0]} has no libasan.so: use gcc (CC=gcc), and install its sanitizers.")
    return os.path.realpath(message)


def main() -> None:
    if os.environ.get("COMPOPT_SANITIZED"):
        return inside(float(os.environ["COMPOPT_SANITIZED"]))
    seconds = sys.argv[1] if len(sys.argv) > 1 else "20"
    with tempfile.TemporaryDirectory() as folder:
        for isa in (isas := library.list_isas()):
            compile_passes(isa, Path(folder) / f"{isa}.so", SANITIZERS)
        for isa in isas:
            environment = {
                **os.environ, "COMPOPT_SANITIZED": seconds, "COMPOPT_NATIVE_ISA": isa, "COMPOPT_BACKEND": "native",
                "LD_PRELOAD": runtime_of(find_compiler()), "COMPOPT_SANITIZED_PASSES": folder,
                "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1",
            }  # fmt: skip
            done = subprocess.run([sys.executable, __file__], env=environment, timeout=float(seconds) + 300)
            if done.returncode:
                raise SystemExit(f"{isa}: see above")


if __name__ == "__main__":
    main()
