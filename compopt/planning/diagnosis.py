"""`Diagnosis`: hooks on a training, their records of each step, and the findings at the end.

``diagnose`` makes one.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .._engine.optimizer import CompressedOptimizer
from .._state.tensors import to_local
from .._wire.collectives import Communicator, connect, is_sharded_over
from .._wire.groups import ProcessGroup, Ranks
from .._wire.requests import AllGather, AllReduceMean
from ..separate.projections import one_thread
from . import diagnosis_report
from .advice import advise
from .candidates import CANDIDATES, TINY, Candidate, CandidateRuns, adam_options
from .diagnosis_report import Findings, Row
from .figures import plot_diagnosis
from .formatting import format_number_of
from .gradient_statistics import (
    DENSITIES,
    SampledTensor,
    TopKStability,
    find_eligible_tensors,
    sample_tensors,
)
from .prediction import Situation
from .workload import Workload


class Diagnosis:
    """The result of :func:`diagnose`; ``print`` shows it when its block has ended.

    Attributes:
        rows: the methods, those with the largest ``kept`` first, each with ``method``, ``line``
            (the constructor call), ``kept``, ``residual`` and ``share`` (of the bytes).
        findings: every finite number, by its key, a tuple of texts.
        steps: steps that were recorded.
        skipped: steps that were left out, because a gradient or a weight was not finite.
        seconds: time that the diagnosis took in this process.
    """

    runs: CandidateRuns
    stability: TopKStability

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: int,
        start: int,
        elements: int,
        process_group: ProcessGroup | Ranks | None = None,
        candidates: Mapping[str, Candidate] = CANDIDATES,
    ):
        self.optimizer, self.candidates = unwrap_optimizer(optimizer), candidates
        self.limit, self.start = steps, start
        groups = self.optimizer.param_groups
        names = {id(p): name for name, p in model.named_parameters()}
        self.sampled = sample_tensors(find_eligible_tensors(groups, names), elements)
        if not self.sampled:
            raise ValueError(
                "compopt.diagnose has nothing to look at: no tensor of this optimizer requires a "
                "gradient and has 2 dimensions and 4096 elements, so none would be compressed."
            )
        self._device = self.sampled[0].param.device
        self._comm = connect(process_group)
        # Between nodes a rank averages its shards; what FSDP2 shards over all ranks they average.
        self._work = Workload.of(
            (names.get(id(p), ""), p if is_sharded_over(p, self._comm) else to_local(p))
            for group in groups
            for p in group["params"]
        )
        self._hook: RemovableHandle | None = None
        self._is_used = False
        self.steps, self.skipped, self.seconds = 0, 0, 0.0
        self.gradient_norms: list[float] = []
        self._step_seconds: list[float] = []
        self._ended: float | None = None  # The end of the last step's hook.
        self.rows: list[Row] = []
        self.findings: Findings = {}

    @property
    def order(self) -> list[str]:
        """The methods' names, the one with the largest ``kept`` first."""
        return [row.method for row in self.rows]

    def __enter__(self) -> Diagnosis:
        if self._is_used:
            raise RuntimeError("this diagnosis was used before: call compopt.diagnose again.")
        self._is_used = True
        groups = adam_options(self.optimizer.param_groups)
        self.runs = CandidateRuns(self.candidates, self.sampled, groups, self.start)
        self.stability = TopKStability([tensor.numel for tensor in self.sampled])
        self._hook = self.optimizer.register_step_post_hook(self.after_step)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.remove_hook()
        if kind is None and not self.rows:
            self.finish()

    def remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Record a step; a hook of the optimizer."""
        began = time.perf_counter()
        if self._ended is not None:
            self._step_seconds.append(began - self._ended)
        grads = [
            tensor.extract(grad)
            if (grad := tensor.param.grad) is not None and grad.layout == torch.strided
            else None
            for tensor in self.sampled
        ]
        weights = [tensor.extract(tensor.param) for tensor in self.sampled]
        if was_skipped(optimizer, [*grads, *weights]):
            self.skipped += 1
        elif any(g is not None for g in grads):
            self.steps += 1
            # On one thread: its result must not depend on their number, and on tensors of this size
            # more threads are slower where others want the cores too.
            with one_thread():
                updates = self.runs.record_step(weights, grads)
                self.stability.record_step(
                    [None if g is None else u for g, u in zip(grads, updates, strict=True)]
                )
                squares = [float(g.square().sum()) for g in grads if g is not None]
                self.gradient_norms.append(sum(squares) ** 0.5)
        if self.steps == self.limit:
            self.remove_hook()
        self._ended = time.perf_counter()
        self.seconds += self._ended - began

    # Results

    def finish(self) -> None:
        """Compute the findings, on all ranks together. Leaving the block does it.

        Raises RuntimeError where too few steps were recorded, or ranks have recorded different
        ones.
        """
        if self.steps < self.start + 2:
            steps = format_number_of(self.steps, "step")
            raise RuntimeError(
                f"compopt.diagnose has seen {steps} of this optimizer "
                f"({self.skipped} more were skipped): it needs {self.start + 2} at least, and some "
                "dozens to tell anything. Step the optimizer inside its block, or lower start=."
            )
        began = time.perf_counter()
        comm, device = self._comm, self._device
        findings = summarize_runs(self.runs, self._gradient_norm)
        findings["seconds", "step"] = median(self._step_seconds)
        findings |= summarize_stability(self.stability, self.sampled)
        if comm.size > 1:
            check_same_on_all_ranks(map(str, sorted(findings)), self.steps, comm, device)
            findings = average_findings(findings, comm, device)
        self.findings = findings = {
            name: number
            for name, number in findings.items()
            if name[0] != "kept" or not math.isnan(number)
        }
        self.rows = diagnosis_report.make_rows(
            findings, self.candidates, self._work, max(2, comm.size), self.sampled
        )
        self.seconds += time.perf_counter() - began

    @property
    def _gradient_norm(self) -> float:
        """The mean norm of the gradient after the start."""
        return max(mean(self.gradient_norms[self.start :]), TINY)

    def __str__(self) -> str:
        if not self.rows:
            steps = format_number_of(self.steps, "step")
            return f"compopt.diagnose: {steps} seen; it tells when its block has ended."
        findings = self.findings
        items = [
            textwrap.fill(
                f"- {sentence}",
                100,
                subsequent_indent="  ",
                break_on_hyphens=False,
                break_long_words=False,
            )
            for sentence in diagnosis_report.conclude(findings, self.rows, self.training)
        ]
        blocks = [
            self._summarize_sample(),
            ["What it means", *items],
            diagnosis_report.format_methods(self.rows),
            diagnosis_report.format_stability(findings),
            diagnosis_report.format_layers(findings, self.rows, self.sampled),
        ]
        return "\n\n".join("\n".join(block) for block in blocks)

    @property
    def training(self) -> Situation:
        """This training as `compopt-advise` sees it, over any link."""
        return advise(
            self._work,
            ranks=max(2, self._comm.size),
            link_bits_per_s=1e9,
            step_s=self.findings["seconds", "step"],
            device="cpu" if self._device.type == "cpu" else None,
        ).situation

    def _summarize_sample(self) -> list[str]:
        """Summarize what was recorded, with the numbers of ranks and elements."""
        elements = sum(tensor.numel for tensor in self.sampled)
        base, size, tensors = type(self.optimizer).__name__, self._comm.size, len(self.sampled)
        steps, ranks = format_number_of(self.steps, "step"), format_number_of(size, "rank")
        lines = [
            f"{steps} of {base} on {ranks}; methods compress from step {self.start + 1} on.",
            f"{format_number_of(tensors, 'tensor')} looked at, "
            f"{elements / 1e6:.3g} M of {self._work.parameters / 1e6:.3g} M elements.",
        ]
        if self.skipped:
            lines.append(
                f"{self.skipped} more steps were left out: gradients or weights were not finite."
            )
        if any("betas" not in group for group in self.optimizer.param_groups):
            lines.append(f"{base} has no betas: methods are judged as if AdamW took its place.")
        if any(not tensor.is_complete for tensor in self.sampled):
            lines.append("Of a part of a tensor ranks keep more than they would of the whole.")
        return lines

    def plot(self, path: str) -> None:
        """Save the findings as a picture, for example "diagnosis.png".

        Raises ValueError where the folder is missing or matplotlib is not installed, RuntimeError
        before the block has ended.
        """
        if not self.rows:
            raise RuntimeError(
                "there is nothing to plot before compopt.diagnose's block has ended."
            )
        residuals = {
            name: [value / self._gradient_norm for value in values]
            for name, values in self.runs.residuals.items()
        }
        plot_diagnosis(path, self.findings, self.rows, residuals)


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside Accelerate's and Lightning's wrappers, which are optimizers too."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrap_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def was_skipped(optimizer: Optimizer, tensors: list[Tensor | None]) -> bool:
    """True if the step was not applied, or some gradient or weight is not finite."""
    if isinstance(optimizer, CompressedOptimizer) and optimizer.stats.phase == "skipped":
        return True
    found_inf = getattr(optimizer, "found_inf", None)  # GradScaler sets it for the step.
    if found_inf is not None and float(found_inf):
        return True
    return not all(bool(x.isfinite().all()) for x in tensors if x is not None)


# Findings: numbers by names of texts, ("kept", method, layer), ("overlap", density, lag, layer) and
# so on. The layer "" stands for all sampled tensors.


def weighted_mean(sampled: Sequence[SampledTensor], values: Mapping[int, float]) -> float:
    """The mean over sampled tensors, each weighted by the elements that it stands for."""
    sizes = {i: sampled[i].weight * sampled[i].numel for i in values}
    return sum(sizes[i] * value for i, value in values.items()) / sum(sizes.values())


def summarize_runs(runs: CandidateRuns, gradient_norm: float) -> Findings:
    """Summarize the share of AdamW's update that each candidate keeps, and its residual over the
    gradient's norm.
    """
    findings: Findings = {}
    layers = [*(tensor.name for tensor in runs.sampled), ""]
    for name, rows in runs.cosines.items():
        for layer, cosines in zip(layers, zip(*rows, strict=True), strict=True):
            seen = [cosine for cosine in cosines if not math.isnan(cosine)]
            findings["kept", name, layer] = mean(seen) if seen else math.nan
        residuals = runs.residuals[name]
        half = len(residuals) // 2
        early, late = max(residuals[:half]), max(residuals[half:])
        findings["residual", name] = late / gradient_norm
        # Without a residual in the first half there is nothing to compare with.
        findings["growth", name] = late / early if early else 1.0
    return findings


def summarize_stability(stability: TopKStability, sampled: Sequence[SampledTensor]) -> Findings:
    """Summarize overlaps and norms by density and lag, and the overlap from step to step in the
    first and in the last third of the steps.
    """
    findings: Findings = {}
    for kind, table in (("overlap", stability.overlaps), ("norm", stability.norms)):
        for density, lag in sorted({(density, lag) for density, lag, _ in table}):
            means = {i: mean(v) for (d, g, i), v in table.items() if (d, g) == (density, lag)}
            for i, value in means.items():
                findings[kind, str(density), str(lag), sampled[i].name] = value
            findings[kind, str(density), str(lag), ""] = weighted_mean(sampled, means)
    rows = [v for (d, lag, _), v in stability.overlaps.items() if (d, lag) == (DENSITIES[1], 1)]
    if rows and min(map(len, rows)) >= 6:
        findings["settling", "first"] = mean(mean(row[: len(row) // 3]) for row in rows)
        findings["settling", "last"] = mean(mean(row[-(len(row) // 3) :]) for row in rows)
    return findings


def average_findings(findings: Findings, comm: Communicator, device: torch.device) -> Findings:
    """The means over ranks; one on which no gradient has reached a tensor does not count."""
    names = sorted(findings)
    values = [findings[name] for name in names]
    numbers = torch.tensor(values, dtype=torch.float32, device=device)
    message = torch.cat([numbers.nan_to_num(0.0), (~numbers.isnan()).float()])
    comm.start(AllReduceMean(message)).wait()
    means, shares = message.chunk(2)
    return dict(zip(names, (means / shares).tolist(), strict=True))


def check_same_on_all_ranks(
    names: Iterable[str], steps: int, comm: Communicator, device: torch.device
) -> None:
    """Raise RuntimeError on all ranks where they have recorded different things."""
    code = zlib.crc32("\n".join(names).encode()) % 2**23  # float32 holds it exactly.
    values = torch.tensor([float(steps), float(code)], dtype=torch.float32, device=device)
    rows: Tensor = comm.start(AllGather(values)).wait()  # type: ignore[assignment]
    counts, codes = rows.t().tolist()
    if any(a != b for a, b in itertools.pairwise(counts)):
        listed = ", ".join(str(int(n)) for n in counts)
        raise RuntimeError(
            f"ranks have seen different numbers of steps ({listed}): take the same steps inside "
            "compopt.diagnose on all ranks."
        )
    if any(a != b for a, b in itertools.pairwise(codes)):
        raise RuntimeError(
            "ranks have looked at different tensors: give compopt.diagnose the same model and the "
            "same optimizer on all ranks."
        )
