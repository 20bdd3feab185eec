"""One diagnosis: hooks on a training, what they show the meters, and how it is told in the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._engine.base import CompressedOptimizer
from .._state.tensors import local
from .._wire.comm import Comm, ProcessGroup
from ..costmodel import Workload
from . import meaning, telling
from .drawing import draw
from .findings import Findings
from .methods import JUDGED, Judged, is_adam, of_groups
from .sampling import Part, candidates, sample
from .telling import Row
from .watching import Watch


class Diagnosis:
    """What :func:`diagnose` sees; ``print`` shows it when its block has ended.

    ``rows``: the methods, in the order in which their losses are expected, each with ``method``,
    ``line`` (how it is made), ``kept``, ``residual`` and ``share`` (of the bytes). ``findings``:
    every number, by its names. ``steps`` were seen, ``skipped`` others left out, for a gradient or
    a weight was not finite; ``seconds`` is what it took of this process.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: int,
        start: int,
        elements: int,
        process_group: ProcessGroup | None = None,
        judged: Mapping[str, Judged] = JUDGED,
    ):
        self.optimizer, self.judged = _innermost(optimizer), judged
        self.limit, self.start = steps, start
        groups = self.optimizer.param_groups
        names = {id(p): name for name, p in model.named_parameters()}
        self.parts: list[Part] = sample(candidates(groups, names), elements)
        if not self.parts:
            raise ValueError(
                "compopt.diagnose has nothing to look at: no tensor of this optimizer requires a "
                "gradient and has 2 dimensions and 4096 elements, so none would be compressed."
            )
        self._work = Workload.of(
            (names.get(id(p), ""), local(p)) for group in groups for p in group["params"]
        )
        self._comm = Comm(process_group)
        self._ours = isinstance(self.optimizer, CompressedOptimizer)
        self._watch: Watch | None = None
        self._own: list[Tensor | None] = [None] * len(self.parts)
        self._hooks: list[Any] = []
        self.skipped, self.seconds = 0, 0.0
        self.rows: list[Row] = []
        self.findings: Findings = {}

    @property
    def steps(self) -> int:
        return self._watch.steps if self._watch else 0

    @property
    def order(self) -> list[str]:
        """The methods' names, the one with the least expected loss first."""
        return [row.method for row in self.rows]

    def __enter__(self) -> Diagnosis:
        if self._watch is not None:
            raise RuntimeError("this diagnosis was used before: call compopt.diagnose again.")
        groups = of_groups(self.optimizer.param_groups)
        self._watch = Watch(self.parts, groups, self.judged, self.start)
        self._hooks = [self.optimizer.register_step_post_hook(self._after_step)]
        if self._averaged:
            # what a rank's backward gives, before DistributedDataParallel averages it
            self._hooks += [
                part.param.register_hook(partial(self._after_backward, i))
                for i, part in enumerate(self.parts)
            ]
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.leave()
        if kind is None and not self.rows:
            self.finish()

    def leave(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def _averaged(self) -> bool:
        """Whether p.grad is the ranks' average already."""
        return self._comm.size > 1 and not self._ours

    @property
    def _compared(self) -> Comm:
        """The ranks whose gradients are compared: FSDP shows nobody a rank's own."""
        cut = any(part.param is not local(part.param) for part in self.parts)
        return Comm(alone=True) if cut and not self._ours else self._comm

    # While the user trains

    def _after_backward(self, i: int, grad: Tensor) -> None:
        if self._watch and grad.layout == torch.strided:
            cut = self._watch.spread.of(i, self.parts[i].of(grad))
            before = self._own[i]
            self._own[i] = cut if before is None else before + cut

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        watch, began = self._watch, time.perf_counter()
        if watch is None:
            return
        grads = [_dense_part(part) for part in self.parts]
        own, self._own = self._own, [None] * len(self.parts)
        if not self._averaged or self._compared is not self._comm:
            own = [None if g is None else watch.spread.of(i, g) for i, g in enumerate(grads)]
        weights = [part.of(part.param) for part in self.parts]
        if _skipped(optimizer, [*grads, *weights]):
            self.skipped += 1
        elif any(g is not None for g in grads):
            watch.see(weights, grads, own)
        if watch.steps == self.limit:
            self.leave()
        self.seconds += time.perf_counter() - began

    # When that has ended

    def finish(self) -> None:
        """Find what was seen; all ranks call it. Leaving the block does.

        Raises RuntimeError where too few steps were seen, or ranks have seen different ones.
        """
        if self._watch is None or self.steps < self.start + 2:
            raise RuntimeError(
                f"compopt.diagnose has seen {self.steps} steps of this optimizer "
                f"({self.skipped} more were skipped): it needs {self.start + 2} at least, and some "
                "dozens to tell anything. Step the optimizer inside its block, or lower start=."
            )
        began = time.perf_counter()
        self.findings = self._watch.found(self._comm, self._compared)
        ranks = max(2, self._comm.size)
        self.rows = telling.rows_of(self.findings, self.judged, self._work, ranks, self.parts)
        self.seconds += time.perf_counter() - began

    def __str__(self) -> str:
        if not self.rows:
            return f"compopt.diagnose: {self.steps} steps seen; it tells when its block has ended."
        found, parts, width = self.findings, self.parts, telling.width_of(self.parts)
        said = meaning.sentences(found, self.rows, width, self._compared.size)
        blocks = [
            self._head(),
            telling.of_methods(self.rows),
            telling.of_stability(found),
            telling.of_shares(found, width),
            telling.of_layers(found, parts),
            ["What it means", *(f"- {sentence}" for sentence in said)],
        ]
        return "\n\n".join("\n".join(block) for block in blocks)

    def _head(self) -> list[str]:
        """What was looked at."""
        looked, base = sum(part.numel for part in self.parts), type(self.optimizer).__name__
        size, tensors = self._comm.size, len(self.parts)
        lines = [
            f"{self.steps} steps of {base} on {size} {'rank' if size == 1 else 'ranks'}, the first "
            f"{self.start} dense; {tensors} {'tensor' if tensors == 1 else 'tensors'} looked at, "
            f"{looked / 1e6:.3g} M of {self._work.parameters / 1e6:.3g} M elements."
        ]
        if self.skipped:
            lines.append(
                f"{self.skipped} more steps were left out: gradients or weights were not finite."
            )
        if not is_adam(self.optimizer.param_groups):
            lines.append(f"{base} has no betas: methods are judged as if AdamW took its place.")
        if any(not part.whole for part in self.parts):
            lines.append("Of a part of a tensor ranks keep more than they would of the whole.")
        return lines

    def plot(self, path: str) -> None:
        """Save what was found as a picture, for example "diagnosis.png".

        Raises ValueError where the folder is missing or matplotlib is not installed, RuntimeError
        before the block has ended.
        """
        if self._watch is None or not self.rows:
            raise RuntimeError(
                "there is nothing to plot before compopt.diagnose's block has ended."
            )
        norm = max(self._watch.norm, 1e-30)
        held = {
            name: [value / norm for value in values]
            for name, values in self._watch.shadows.residuals.items()
        }
        draw(path, self.findings, self.rows, held)


def _innermost(optimizer: Optimizer) -> Optimizer:
    """Accelerate's and Lightning's wrappers are optimizers too; the hooks are the wrapped one's."""
    inner = getattr(optimizer, "optimizer", None)
    return _innermost(inner) if isinstance(inner, Optimizer) else optimizer


def _dense_part(part: Part) -> Tensor | None:
    """Of the gradient, where there is a dense one."""
    grad = part.param.grad
    return None if grad is None or grad.layout != torch.strided else part.of(grad)


def _skipped(optimizer: Optimizer, tensors: list[Tensor | None]) -> bool:
    """Whether the step was not taken, or gradients and weights cannot be looked at."""
    if isinstance(optimizer, CompressedOptimizer) and optimizer.stats.phase == "skipped":
        return True
    found = getattr(optimizer, "found_inf", None)  # GradScaler's, while it steps
    if found is not None and float(found):
        return True
    return not all(bool(x.isfinite().all()) for x in tensors if x is not None)
