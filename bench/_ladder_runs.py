"""Runs of the ladder: trained with a checkpoint, kept a line each, claimed by one process at a time.

And the search for learning rates and outer settings, which goes on until no neighbour of the best is untried.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from _ladder_model import SIZES, StackedGPT, Text, validate
from _ladder_rows import MOMENTA, OUTER_LRS, ROWS, Run

HERE = Path(__file__).parent
OTHER = os.environ.get("COMPOPT_LADDER")  # a folder for runs that are not to be kept with the others
KEPT = Path(OTHER or HERE / "results") / "ladder.jsonl"
UNFINISHED = Path(OTHER or HERE.parent / "runs") / "ladder"
WARMUP, EVALS, SAVE_EVERY = 40, 10, 120  # steps in which the rate rises; of a run; seconds between checkpoints


def count_steps(run: Run, parameters: int) -> int:
    size = SIZES[run.size]
    return round(run.tokens * parameters / (run.ranks * size.batch * size.context))


def scheduled(lr: float, step: int, steps: int) -> float:
    """A rise over 40 steps, and a cosine down to a tenth."""
    return lr * min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


class Training:
    """A run under way; ``save`` and ``load`` continue it to the bit."""

    def __init__(self, run: Run, device: str = "cpu", data: str | None = None, dtype: torch.dtype = torch.float32):
        self.run, self.device, row = run, torch.device(device), ROWS[run.row]
        model = SIZES[run.size].make(run.seed).to(self.device, dtype)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.steps = count_steps(run, self.parameters)
        self.text, self.source = Text(SIZES[run.size], run.ranks, run.seed, data), data or "standard library"
        products = None if run.products == str(dtype).removeprefix("torch.") else getattr(torch, run.products)
        self.replicas = row.replicas(run.ranks)
        self.model = StackedGPT(model, self.replicas, products)
        self.ranks = row.build(run, self.steps, self.model)
        self.step, self.seconds, self.losses, self.evals = 0, 0.0, [], []

    def advance(self) -> None:
        """Take a step, and an evaluation where one is due."""
        begin = time.perf_counter()
        x, y = (part.to(self.device) for part in self.text.next())
        shape = (self.replicas, -1, x.shape[-1])
        losses = self.model.backward(x.reshape(shape), y.reshape(shape))
        self.ranks.step(scheduled(self.run.lr, self.step, self.steps))
        self.step += 1
        if self.step == self.steps:
            self.ranks.finish()
        self.losses.append(math.fsum(losses) / len(losses))
        self.seconds += time.perf_counter() - begin
        if self.step * EVALS // self.steps > (self.step - 1) * EVALS // self.steps:
            mean, self.losses = math.fsum(self.losses) / len(self.losses), []
            loss = validate(self.model, self.text, self.device)
            self.evals.append({"step": self.step, "train_loss": round(mean, 5), "val_loss": round(loss, 5)})

    @property
    def is_over(self) -> bool:
        """At its end, or diverged."""
        return self.step == self.steps or (self.losses[-1:] != [] and not math.isfinite(self.losses[-1]))

    def save(self, path: Path) -> None:
        names = ("step", "seconds", "losses", "evals")
        saved = {name: getattr(self, name) for name in names} | {"ranks": self.ranks.state_dict()}
        torch.save(saved, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=False, map_location=self.device)
        self.ranks.load_state_dict(saved.pop("ranks"))
        self.__dict__ |= saved
        for _ in range(self.step):
            self.text.next()

    def line(self) -> dict[str, Any]:
        """Return what is kept of the run."""
        dense = 4 * self.parameters * max(1, self.step)
        finished = self.step == self.steps and math.isfinite(self.evals[-1]["val_loss"])
        return self.run._asdict() | {
            "parameters": self.parameters,
            "steps": self.steps,
            "val_loss": self.evals[-1]["val_loss"] if finished else None,
            "bytes": self.ranks.bytes_sent,
            "share": round(self.ranks.bytes_sent / dense, 6),
            "seconds": round(self.seconds, 1),
            "device": self.device.type,
            "text": Path(self.source).name,
            "evals": self.evals,
        }


def slug(run: Run) -> str:
    return re.sub(r"[^\w.]+", "-", "_".join(map(str, run)))


@contextlib.contextmanager
def claimed(run: Run) -> Iterator[bool]:
    """True if the run is this process's while the context lasts: a lock that ends with the process."""
    UNFINISHED.mkdir(parents=True, exist_ok=True)
    with (UNFINISHED / f"{slug(run)}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield run not in kept()


def kept() -> dict[Run, dict[str, Any]]:
    """All runs there are; of two of the same name, the later."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    runs = [json.loads(line) for line in lines]
    return {Run(*(line[name] for name in Run._fields)): line for line in runs}


def keep(line: dict[str, Any]) -> None:
    with KEPT.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")


def train(run: Run, device: str, data: str | None, until: float = math.inf) -> bool:
    """Train a run, or go on with it, and keep its line. False if the time ``until`` which to train was over before."""
    warnings.simplefilter("ignore")
    training, path = Training(run, device, data), UNFINISHED / f"{slug(run)}.pt"
    if path.exists():
        training.load(path)
    print(f"{time.strftime('%H:%M:%S')} {describe(run)}, {training.steps} steps", flush=True)
    saved_at = time.time()
    while not training.is_over:
        training.advance()
        is_over_time = time.time() > until
        if is_over_time or time.time() - saved_at > SAVE_EVERY:
            training.save(path)
            saved_at = time.time()
        if is_over_time and not training.is_over:
            return False
    line = training.line()
    keep(line)
    path.unlink(missing_ok=True)
    print(f"    {line['val_loss']}, {line['share']:.2%} of the bytes, {line['seconds']:.0f} s", flush=True)
    return True


def describe(run: Run) -> str:
    outer = "" if run.momentum is None else f", outer lr {run.outer_lr:g}, momentum {run.momentum:g}"
    return f"{run.size}: {run.row}, lr {run.lr:g}{outer}, seed {run.seed}, {run.ranks} ranks, {run.products}"


# The search

Lines = Mapping[Run, dict[str, Any]]  # finished runs, and the line that is kept of each


def loss_of(line: dict[str, Any]) -> float:
    """Infinite where the run has diverged."""
    return math.inf if line["val_loss"] is None else line["val_loss"]


def best_of(runs: Lines, like: Run) -> Run | None:
    """The best run of the row, among those that differ from ``like`` in what is tuned."""
    tuned = {"lr": like.lr, "outer_lr": like.outer_lr, "momentum": like.momentum}
    alike = [run for run in runs if run._replace(**tuned) == like]
    return min(alike, key=lambda run: loss_of(runs[run]), default=None)


def neighbours(run: Run, outer: bool) -> Iterator[Run]:
    """Twice and half its rate; with ``outer`` the momenta beside its own, and the other outer rates."""
    yield run._replace(lr=run.lr * 2)
    yield run._replace(lr=run.lr / 2)
    if outer and run.momentum is not None:
        at = MOMENTA.index(run.momentum)
        yield from (run._replace(momentum=momentum) for momentum in MOMENTA[max(0, at - 1) : at + 2])
        yield from (run._replace(outer_lr=rate) for rate in OUTER_LRS)


def list_missing(runs: Lines, start: Run, outer: bool) -> list[Run]:
    """The runs to do next: the start, then what is missing around the best. Empty: the best is at no edge."""
    best = best_of(runs, start)
    if best is None:
        return [start]
    return [run for run in neighbours(best, outer) if run not in runs]


def start_of(row: str, size: str, runs: Lines, **others: Any) -> Run:
    """The best of the next smaller size that has runs of the row, else the row's own start."""
    start = ROWS[row].start(size, **others)
    names = list(SIZES)
    for smaller in reversed(names[: names.index(size)]):
        if best := best_of(runs, start._replace(size=smaller)):
            return best._replace(size=size)
    return start
