"""`advise`: predicts the run of every method, decides (see `decision`) and explains.

``costmodel`` exports it, `compopt-advise` prints it, and ``diagnosis`` asks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from . import advice_report as report
from .advice_decision import choose_row
from .formatting import format_advice
from .hardware import Machine, check_positive, find_device, source_of
from .losses import TOKENS_PER_PARAMETER
from .prediction import (
    BACKWARD,
    BASELINE,
    CPU_BUCKET,
    DEVICE_BUCKET,
    LAST_BUCKET,
    STEPS,
    Row,
    Situation,
    predict_rows,
)
from .workload import Workload

# Seconds of a message between machines of one room, and with --wan.
LATENCY, WAN_LATENCY = 50e-6, 30e-3


@dataclass(frozen=True)
class Advice:
    """Result of `advise`: a row a method, what to do, the line of Python for it, and why.

    `str()` shows all of it but the rows that another one beats.
    """

    situation: Situation
    rows: list[Row]
    method: str
    line: str
    why: str

    @property
    def recommendation(self) -> str:
        """The recommendation and its reasons, in one paragraph."""
        baseline = self.rows[0]
        if self.method != BASELINE:
            recommendation = f"Use {self.method}"
        elif baseline.fits and not baseline.is_bound_by_shards:
            recommendation = "Stay dense"
        else:
            recommendation = "Change the setup"
        return f"{recommendation}: {self.why}"

    def __str__(self) -> str:
        return self.format()

    def format(self, all_rows: bool = False) -> str:
        """The recommendation, the line to paste, the table, and the inputs."""
        return format_advice(
            self.recommendation,
            self.line,
            report.format_table(self.situation, self.rows, self.method, all_rows),
            report.format_situation(self.situation),
        )


def advise(
    model: torch.nn.Module | Workload | int,
    *,
    ranks: int,
    link_bits_per_s: float | None = None,
    step_s: float,
    overlap_s: float | None = None,
    latency_s: float | None = None,
    device: str | None = None,
    local: tuple[float, float] | None = None,
    interference: tuple[float, float] = (0.0, 0.0),
    memory_bytes: float | None = None,
    shard: int | None = None,
    loss_budget: float = 0.02,
    sources: dict[str, str] | None = None,
    ranks_per_node: int | None = None,
    sites: int | None = None,
    inside_bits_per_s: float | None = None,
    steps: int | None = None,
    tokens_per_parameter: float | None = None,
    save_every: int | None = None,
    frozen_bytes: float | None = None,
) -> Advice:
    """Predict a training step and run with every method of `METHODS`, and say what to use.

    Args:
        model: a model, a `Workload`, or a number of parameters (a transformer's shapes are then
            assumed).
        ranks: processes in all.
        link_bits_per_s: rate at which one rank sends to other machines while it receives as
            much; needed unless all ranks are in one machine.
        step_s: seconds of a dense step of one process, without communication.
        overlap_s: seconds of it during which gradients may already travel; None: nine tenths of
            backward.
        latency_s: seconds of one message; None: 50 us.
        device: a name in `DEVICES`, for the speed of the optimizer's own work and for memory; None:
            "a100".
        local: bytes and float32 operations a second of a rank, where they were measured.
        interference: share of a step that a rank waits for the slowest, and seconds that
            computation loses for each byte sent beside it, where they were measured.
        memory_bytes: of one rank's device; None: the device's.
        shard: ranks that share one copy of the model (FSDP2); None: one, or where AdamW or a method
            does not fit there, all of a machine, or several machines.
        loss_budget: share by which a method's measured loss may exceed AdamW's.
        sources: for a number by its name, "given", "measured" or "assumed", where that is not plain
            from the call.
        ranks_per_node: of the ranks, how many share a machine; None: as many as ``shard``, or one.
        sites: places of equally many ranks, which share one link each; ``link_bits_per_s`` is
            then that of a site, and a site's ranks count as one machine's. None: see
            ``ranks_per_node``.
        inside_bits_per_s: rate at which one rank sends to those; None: the device's.
        steps: of the run; None: 10,000.
        tokens_per_parameter: that the run trains on, in all; None: 20.
        save_every: steps between two saves, each after a `consolidate_state()`; None: no save.
        frozen_bytes: of weights that are not trained; None: those of the model.

    Raises:
        ValueError: a number is out of range; the sentence names it.
    """
    if isinstance(model, torch.nn.Module):
        model = Workload.of(model.named_parameters())
    work = model if isinstance(model, Workload) else Workload.of_size(model)
    if frozen_bytes is not None:
        check_positive(frozen_bytes=frozen_bytes)
        work = replace(work, frozen_bytes=frozen_bytes)
    hardware, device_name = find_device(device)
    if not 0 <= loss_budget < math.inf:
        raise ValueError(f"loss_budget must be a share such as 0.01; got {loss_budget}.")
    numbers = {
        "steps": steps,
        "tokens_per_parameter": tokens_per_parameter,
        "memory_bytes": memory_bytes,
        "save_every": save_every,
        "inside_bits_per_s": inside_bits_per_s,
    }
    check_positive(**{name: value for name, value in numbers.items() if value is not None})
    if sites is not None:
        if ranks_per_node is not None:
            raise ValueError("sites and ranks_per_node say the same: give one of them.")
        if not 1 <= sites <= ranks or ranks % sites:
            raise ValueError(f"sites must divide the {ranks} ranks; got {sites}.")
        ranks_per_node = ranks // sites
        if link_bits_per_s is not None:
            link_bits_per_s /= ranks_per_node
    node = count_ranks_per_node(ranks, shard, ranks_per_node)
    if link_bits_per_s is None and node != ranks:
        raise ValueError(
            "link_bits_per_s is missing: how fast one rank sends to other machines "
            f"(ranks_per_node={ranks} where all ranks are in one)."
        )
    # Where all ranks share one machine there is one kind of link.
    shared = link_bits_per_s if node == ranks else None
    inside = inside_bits_per_s or shared or hardware.inside_bits_per_s
    machine = Machine(
        ranks,
        (link_bits_per_s or inside) / 8,
        LATENCY if latency_s is None else latency_s,
        *(local or hardware.local),
        *interference,
        ranks_per_node=node,
    )
    default_sources = {
        "computation": "given",
        "overlap": source_of(overlap_s),
        "link": "given",
        "latency": source_of(latency_s),
        "nodes": source_of(ranks_per_node),
        "inside": source_of(inside_bits_per_s, f"assumed: {device_name}"),
        "steps": source_of(steps),
        "saves": source_of(save_every),
        "tokens": source_of(tokens_per_parameter),
        "memory": source_of(memory_bytes, f"assumed: {device_name}"),
        "own work": f"assumed: {device_name}" if local is None else "measured",
    }
    sources = {**default_sources, **(sources or {})}
    if inside_bits_per_s is None and shared is not None:
        sources["inside"] = sources["link"]
    situation = Situation(
        work,
        machine,
        compute_s=step_s,
        overlap_s=(1 - LAST_BUCKET) * BACKWARD * step_s if overlap_s is None else overlap_s,
        shard=shard,
        memory_bytes=hardware.memory_bytes if memory_bytes is None else memory_bytes,
        loss_budget=loss_budget,
        sources=sources,
        steps=STEPS if steps is None else steps,
        tokens_per_parameter=(
            TOKENS_PER_PARAMETER if tokens_per_parameter is None else tokens_per_parameter
        ),
        save_every=save_every,
        inside_bytes_per_s=inside / 8,
        bucket_bytes=CPU_BUCKET if device == "cpu" else DEVICE_BUCKET,
    )
    rows = predict_rows(situation)
    best = choose_row(situation, rows)
    row, why = best or rows[0], report.explain_choice(situation, rows, best)
    return Advice(situation, rows, row.method, report.make_line(situation, row), why)


def count_ranks_per_node(ranks: int, shard: int | None, ranks_per_node: int | None) -> int:
    """Ranks of a machine; raise ValueError where copies or machines do not divide all ranks."""
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1; got {ranks}.")
    node = ranks_per_node or shard or 1
    for name, value in (("shard", shard), ("ranks_per_node", ranks_per_node)):
        if value is not None and (value < 1 or ranks % value):
            raise ValueError(f"{name} must divide the {ranks} ranks; got {value}.")
    if shard is not None and shard % node and node % shard:
        raise ValueError(
            f"shard must divide the {node} ranks of a machine, or be a multiple; got {shard}."
        )
    return node
