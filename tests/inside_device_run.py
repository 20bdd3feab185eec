"""A reduce-scatter of TAGC inside FSDP2 on the device of fake_device.py, beside the same on the CPU; prints JSON.

A process of its own. For each case: what differs, and where the host looked, in one rank.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import fake_device
import torch
from fake_device import Device, OnDevice
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from compopt._engine.inside import Held
from compopt._ops.operations import Ops
from compopt._sharded.inside import averaged
from compopt._sharded.parcels import Parcel
from compopt._wire.requests import BitOr, ReadToHost, ReduceScatterMean, average_rows

SHAPES = [(96, 70), (33,), (130, 65)]  # the second is sent as it is
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "rounded": {"payload_dtype": "bfloat16"},
    "zeros": {"few": True},
    "everything": {"sparsity": 0.0},
}
RANKS, STEPS = 2, 2
reads: Counter[str] = Counter()


def rows_of(parcel: Parcel, rank: int, few: bool) -> Tensor:
    rows = torch.randn(RANKS, parcel.length, generator=torch.Generator().manual_seed(rank))
    return rows * (torch.arange(parcel.length) % 50 == 0) if few else rows


def exchange(flows: list[Generator[Any, Any, None]]) -> None:
    """Both ranks, to the end of their reduce-scatter."""
    asked = [next(flow) for flow in flows]
    while asked:
        match asked[0]:
            case BitOr():
                answers = [asked[0].tensor | asked[1].tensor] * RANKS
            case ReadToHost():
                reads.update(read=RANKS)
                answers = [one.tensor.tolist() for one in asked]
            case ReduceScatterMean():
                cut = [one.tensor.split(one.sizes) for one in asked]
                answers = [average_rows(torch.stack([own[rank] for own in cut])) for rank in range(RANKS)]
        asked = [request for flow, answer in zip(flows, answers, strict=True) if (request := sent(flow, answer))]


def sent(flow: Generator[Any, Any, None], answer: object) -> Any:
    try:
        return flow.send(answer)
    except StopIteration:
        return None


def run(device: torch.device, few: bool = False, **options: Any) -> list[Tensor]:
    """Two steps: averaged gradients, and what is owed."""
    h = dict(sparsity=0.9, codec="compact", sketch_ratio=10, payload_dtype=None, step=1, warmup_steps=0,
             total_steps=None, when="always") | options  # fmt: skip
    found, parcels = [], []
    for rank in range(RANKS):
        params = [torch.zeros(shape).to(device) for shape in SHAPES]
        given = [(p, 0, None if p.dim() == 1 else torch.zeros_like(p)) for p in params]
        parcels.append(Parcel(given, h, rank, RANKS))
    for _ in range(STEPS):
        rows = [rows_of(parcel, rank, few).to(device) for rank, parcel in enumerate(parcels)]
        outs = [torch.zeros(parcel.length).to(device) for parcel in parcels]
        work = zip(parcels, rows, outs, strict=True)
        held: list[Held] = [{} for _ in parcels]
        averages = zip(work, held, strict=True)
        exchange([averaged(parcel, Ops(), mine, out, unsent) for (parcel, mine, out), unsent in averages])
        for parcel, out, unsent in zip(parcels, outs, held, strict=True):
            for one in unsent.values():
                one.replace_residual(one.residual, 1.0)
            found += [out, *(piece.residual for piece in parcel.pieces if piece.residual is not None)]
    return found


def main() -> None:
    pretend, result = fake_device.register(), {}
    torch.set_num_threads(1)
    for name, options in CASES.items():
        with Device() as device:
            with _disable_current_modes():
                wanted = run(torch.device("cpu"), **options)
            reads.clear()
            found = run(pretend, **options)
            held = [x.held if isinstance(x, OnDevice) else x for x in found]
            differs = [i for i, (a, b) in enumerate(zip(wanted, held, strict=True)) if not torch.equal(a, b)]
            result[name] = {"differs": differs, "looks": dict(device.accesses), "mixed": dict(device.mixed)}
            result[name] |= {"owed": bool(held[1].any()), "reads": reads["read"], "steps": STEPS}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
