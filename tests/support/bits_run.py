"""The cases of check_same_bits.py, run on one tree: a line of JSON a case, with a digest of all there was, a step.

python bits_run.py PART/PARTS PATTERN        # beside links to the tree's packages and tests
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bits_cases import Case, chosen
from torch import Tensor, nn

# Digests


class Digests:
    """The traces of a run: a digest a step of every kind of thing."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, str]] = {}

    def note(self, what: str, step: int, values: list[Any]) -> None:
        code = hashlib.sha1()
        for value in values:
            update(code, value)
        self.of.setdefault(what, {})[step] = code.hexdigest()

    def say(self, what: str, step: int, values: list[Any]) -> None:
        """A value a rank as it is: short, and of use to whoever reads the report."""
        alike = all(value == values[0] for value in values)
        self.of.setdefault(what, {})[step] = repr(values[0] if alike else values)


def update(code: Any, value: Any) -> None:
    """Take a tensor's bits, or the text of anything else."""
    if not isinstance(value, Tensor):
        code.update(repr(value).encode())
        return
    flat = value.detach().contiguous().reshape(-1)
    code.update(f"{value.dtype}{tuple(value.shape)}".encode())
    code.update(flat.view(torch.uint8).numpy())


# One case, on the tree whose compopt and sim are imported


class Run:
    """Simulated ranks that train on noise; tensors without a gradient, an inf, a checkpoint."""

    def __init__(self, case: Case):
        self.case, self.found = case, Digests()
        names = [list(shapes) for shapes in case.groups]
        self.names = [name for group in names for name in group]
        self.begin(case.ranks, start(case))

    def begin(self, ranks: int, values: list[Tensor]) -> None:
        from sim import World

        self.world = World(ranks)
        self.world.record = True
        self.params = [self.own(values) for _ in range(ranks)]
        pairs = zip(self.params, self.world.comms, strict=True)
        self.optimizers = [make(self.case, self.grouped(own), comm) for own, comm in pairs]
        for optimizer in self.optimizers:
            optimizer.simulate = True  # one rank compresses too, as it did in commits that do not know the word

    def own(self, values: list[Tensor]) -> list[nn.Parameter]:
        named = zip(self.names, values, strict=True)
        return [nn.Parameter(turned(name, value.clone())) for name, value in named]

    def grouped(self, params: list[nn.Parameter]) -> list[dict[str, Any]]:
        named = iter(zip(self.names, params, strict=True))
        groups = [[next(named) for _ in shapes] for shapes in self.case.groups]
        first, *rest = groups
        compress = {"compress": True, "compopt_compress": True}  # in a group of an optimizer of its own, and of a base
        return [{"params": first}, *({"params": own, **compress} for own in rest)]

    def all(self) -> dict[str, dict[int, str]]:
        """Train to the end; the digests."""
        case = self.case
        for t in range(case.steps):
            if t == case.steps // 2:
                self.go_on_from_a_checkpoint(t)
            self.set_options(t)
            self.backward(t)
            self.world.step(self.optimizers)
            self.look(t)
        self.look_at_state(case.steps - 1)
        return self.found.of

    def set_options(self, t: int) -> None:
        """Learning rates fall, and near the end the dense start is taken up again."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (1 - t / (2 * self.case.steps))
                if t == self.case.steps * 4 // 5 and "dense_steps" in group:
                    group["dense_steps"] = group["step"] + 2

    def backward(self, t: int) -> None:
        case, ranks = self.case, self.world.size
        for rank, own in enumerate(self.params):
            for n, (p, name) in enumerate(zip(own, self.names, strict=True)):
                g = gradient(name, tuple(p.shape), n, rank, t).to(p.dtype, copy=True)
                g = turned(name, g) if t % 2 else g
                if t == case.steps * 3 // 8 and rank == ranks - 1 and n == 1:
                    g.view(-1)[-1] = float("inf")
                p.grad = None if absent(n, rank, ranks, t) else g
        if case.overlaps:
            self.start_in_backward()
        if t == case.steps * 2 // 3:
            # stale: what has been sent early goes out again, and nothing is sent early from then on
            for p in self.params[-1]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    def start_in_backward(self) -> None:
        """Call what the integrations call when gradients are ready."""
        for own, optimizer in zip(self.params, self.optimizers, strict=True):
            optimizer.gradients_ready(reversed(own))
            optimizer.backward_done()

    def look(self, t: int) -> None:
        stats = [optimizer.stats for optimizer in self.optimizers]
        self.found.note("parameters", t, [p for own in self.params for p in own])
        self.found.note("messages", t, [tensor for _, sent in self.world.log for tensor in sent])
        self.world.log.clear()
        sent = [(s.bytes_sent, s.bytes_dense, s.parameter_bytes) for s in stats]
        done = [(s.applied_steps, s.phase, s.skipped, s.early_buckets, s.resent) for s in stats]
        self.found.say("bytes", t, sent)
        self.found.say("phase", t, done)
        self.found.say("norm", t, [s.grad_norm for s in stats])
        if self.case.looks:
            self.look_at_state(t)

    def look_at_state(self, t: int) -> None:
        """Everything in the state dicts of all ranks, a digest a name."""
        entries: dict[str, list[Any]] = {}
        for optimizer in self.optimizers:
            for name, value in entries_of(optimizer.state_dict()):
                entries.setdefault(name, []).append(value)
        for name, values in entries.items():
            self.found.note(name, t, values)

    def go_on_from_a_checkpoint(self, t: int) -> None:
        own = self.case.own_checkpoints
        if not own:
            self.world.consolidate(self.optimizers)
        self.look_at_state(t)
        saved = [through_a_file(optimizer.state_dict()) for optimizer in self.optimizers]
        self.begin(self.case.ranks_after, [p.detach() for p in self.params[0]])
        for rank, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(saved[rank if own else 0])


def start(case: Case) -> list[Tensor]:
    """Return the parameters with which all ranks begin."""
    shapes = [shape for group in case.groups for shape in group.values()]
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=draw).to(case.dtype) for shape in shapes]


def make(case: Case, groups: list[dict[str, Any]], comm: object) -> torch.optim.Optimizer:
    import compopt

    form, options = case.form, dict(case.form.options, process_group=comm)
    if case.payload is not None:
        options["payload_dtype"] = case.payload
    if case.clips:
        options["max_grad_norm"] = 6.0
    if case.maximizes:
        options["maximize"] = True
    if not form.base:
        return getattr(compopt, form.cls)(groups, lr=1e-2, **options)
    of_base = {"SGD": dict(momentum=0.9), "AdamS": dict(betas=(0.9, 0.95), weight_decay=0.1)}.get(form.base, {})
    module = compopt if hasattr(compopt, form.base) else torch.optim
    base = getattr(module, form.base)(groups, lr=1e-2, **of_base)
    return getattr(compopt, form.cls)(base, **options)


@functools.lru_cache(maxsize=4096)
def gradient(name: str, shape: tuple[int, ...], n: int, rank: int, t: int) -> Tensor:
    """Noise that ranks have partly in common; of a norm around 1 a tensor, every sixth step of 8."""
    common = torch.Generator().manual_seed(100 * t + n)
    own = torch.Generator().manual_seed(1_000_000 * (rank + 1) + 100 * t + n)
    x = torch.randn(shape, generator=common) + 0.5 * torch.randn(shape, generator=own)
    scale = 2.0 ** (n % 3 - 1) * (8 if t % 6 == 4 else 1)
    return x.mul_(scale / x.numel() ** 0.5)


def turned(name: str, value: Tensor) -> Tensor:
    """The same numbers; those of some tensors lie column by column."""
    return value.t().contiguous().t() if name.startswith("turned") else value


def absent(n: int, rank: int, ranks: int, t: int) -> bool:
    """The third tensor on one rank at times, the fourth on all; the last never in the beginning."""
    on_one = n == 2 and t % 7 == 3 and rank == t % ranks
    on_all = n == 3 and t % 9 == 5
    late = n == 5 and t < 8 and rank == 0
    return on_one or on_all or late


def entries_of(saved: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for number in sorted(saved["state"]):
        for name, value in sorted(saved["state"][number].items()):
            if name == "outer":
                yield from ((f"{prefix}outer {path}", leaf) for path, leaf in leaves(value))
            elif name != "base":
                yield prefix + name, value
    for group in saved.get("param_groups", []):
        message = [group.get(name) for name in ("step", "lr", "residuals", "class", "format")]
        yield prefix + "groups", message
    if "base" in saved:
        entries = {number: entry.get("base", {}) for number, entry in saved["state"].items()}
        of_base = {number: entry for number, entry in entries.items() if float(entry.pop("begun", 0))}
        yield from entries_of({**saved["base"], "state": {**of_base, **saved["base"]["state"]}}, "base's ")


def leaves(entry: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in sorted(entry.items()):
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name} ")
        else:
            yield prefix + name, value


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(case: Case) -> dict[str, dict[int, str]]:
    """The digests of a case, on the tree whose compopt and sim are found."""
    torch.manual_seed(0)
    with mock.patch.dict(os.environ, COMPOPT_BACKEND=case.backend):
        return Run(case).all()


def why_not(backend: str) -> str:
    """Why the backend cannot run here; nothing where it can."""
    import compopt

    with mock.patch.dict(os.environ, COMPOPT_BACKEND=backend):
        try:
            compopt.AdamS([nn.Parameter(torch.zeros(1))])
        except RuntimeError as error:
            return str(error)
    return ""


def work(pattern: str, part: int, parts: int) -> None:
    """A process on one tree: a line of JSON a case."""
    here = Path(__file__).parent  # beside it are links to one tree's packages and tests
    sys.path[:0] = [str(here), str(here / "tests"), str(here / "tests/support")]
    sys.meta_path.insert(0, PathFinder)  # before that of an editable installation
    for module in map(importlib.import_module, ("compopt", "sim")):
        assert Path(module.__file__).is_relative_to(here), f"{module.__file__} is not in {here}"
    torch.set_num_threads(1)
    reasons: dict[str, str] = {}
    for case in chosen(pattern)[part::parts]:
        if case.backend not in reasons:
            reasons[case.backend] = why_not(case.backend)
        line: dict[str, Any] = {"name": case.name}
        began = time.process_time()
        if reasons[case.backend]:
            line["absent"] = reasons[case.backend]
        else:
            line |= run_or_say_why(case)
        line["seconds"] = time.process_time() - began
        print(json.dumps(line), flush=True)


def run_or_say_why(case: Case) -> dict[str, Any]:
    try:
        return {"found": run(case)}
    except Exception:
        return {"raised": traceback.format_exc()}


if __name__ == "__main__":
    share, pattern = sys.argv[1:]
    work(pattern, *map(int, share.split("/")))
