"""A reduce-scatter of TAGC inside FSDP2 on the device of fake_device.py, beside the same on the CPU; prints JSON.

A process of its own. For each case: what differs, and where the host looked, in one rank.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import fake_device
import torch
from fake_device import Device, OnDevice
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from compopt._fsdp.fsdp_bucket import PendingStates, ReduceScatterBucket, place_in_rows
from compopt._ops.operations import Ops
from compopt._state.bucket import Bucket
from compopt._state.layouts import LocalShape
from compopt._state.residuals import Residuals
from compopt._wire.requests import BitOr, ReadToHost, ReduceScatterMean, average_rows
from compopt.tagc.tagc import UnionReducer

SHAPES = [(96, 70), (33,), (130, 65)]  # the second is sent as it is
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "rounded": {"payload_dtype": "bfloat16"},
    "zeros": {"few": True},
    "everything": {"density": 1.0},
}
RANKS, STEPS = 2, 2
reads: Counter[str] = Counter()


class Rank:
    """One rank's parameters and residuals, and its reduce-scatter."""

    def __init__(self, rank: int, device: torch.device, group: dict[str, Any]):
        self.rank, names = rank, [f"tensor {i}" for i in range(len(SHAPES))]
        params = [torch.zeros(shape).to(device) for shape in SHAPES]
        self.pending_states: PendingStates = {}
        self.kept = Bucket(0, group, params, names)
        self.kept.allocate("residual", LocalShape(torch.float32, compressed_only=True), [{}] * len(params))
        comm, bucket_of = SimpleNamespace(rank=rank, size=RANKS), dict.fromkeys(params, self.kept)
        pieces = place_in_rows([(p, 0) for p in params], RANKS, bucket_of)
        engine = SimpleNamespace(option_groups=[group], comm=comm, ops=Ops())
        self.bucket = ReduceScatterBucket(0, engine, pieces, torch.float32)
        self.length = sum(piece.size for piece in pieces)

    def rows(self, few: bool) -> Tensor:
        rows = torch.randn(RANKS, self.length, generator=torch.Generator().manual_seed(self.rank))
        return rows * (torch.arange(self.length) % 50 == 0) if few else rows

    def average(self, rows: Tensor, out: Tensor) -> Generator[Any, Any, None]:
        self.bucket.load_rows(rows, self.pending_states)
        reducer = UnionReducer(self.bucket, Ops())
        mean = yield from reducer.reduce()
        self.bucket.write_shard(reducer, mean, out)
        self.bucket.collect_residuals(reducer, self.pending_states)

    def commit(self) -> list[Tensor]:
        """Write the pending residuals, and return all."""
        numbers = {p: i for i, p in enumerate(self.kept.params)}
        for p, one in self.pending_states.items():
            one.write_to(Residuals(self.kept), numbers[p], 1.0)
        self.pending_states.clear()
        return [e for e in self.kept.state["residual"] if e is not None]


def exchange(generators: list[Generator[Any, Any, None]]) -> None:
    """Both ranks, to the end of their reduce-scatter."""
    asked = [next(generator) for generator in generators]
    while asked:
        match asked[0]:
            case BitOr():
                answers = [asked[0].tensor | asked[1].tensor] * RANKS
            case ReadToHost():
                reads.update(read=RANKS)
                answers = [one.tensor.tolist() for one in asked]
            case ReduceScatterMean():
                cut = [one.tensor.split(one.sizes) for one in asked]
                answers = [average_rows(torch.stack([local[rank] for local in cut])) for rank in range(RANKS)]
        asked = [
            request
            for generator, answer in zip(generators, answers, strict=True)
            if (request := sent(generator, answer))
        ]


def sent(generator: Generator[Any, Any, None], answer: object) -> Any:
    try:
        return generator.send(answer)
    except StopIteration:
        return None


def run(device: torch.device, few: bool = False, **options: Any) -> list[Tensor]:
    """Two steps: averaged gradients, and what is owed."""
    group = dict(density=0.1, codec="compact", sketch_ratio=10, payload_dtype=None, step=1, dense_steps=0,
                 when="always", compress=None) | options  # fmt: skip
    results, ranks = [], [Rank(rank, device, group) for rank in range(RANKS)]
    for _ in range(STEPS):
        rows = [one.rows(few).to(device) for one in ranks]
        outs = [torch.zeros(one.length).to(device) for one in ranks]
        exchange([one.average(mine, out) for one, mine, out in zip(ranks, rows, outs, strict=True)])
        for one, out in zip(ranks, outs, strict=True):
            results += [out, *one.commit()]
    return results


def main() -> None:
    pretend, result = fake_device.register(), {}
    torch.set_num_threads(1)
    for name, options in CASES.items():
        with Device() as device:
            with _disable_current_modes():
                wanted = run(torch.device("cpu"), **options)
            reads.clear()
            results = run(pretend, **options)
            held = [x.held if isinstance(x, OnDevice) else x for x in results]
            differs = [i for i, (a, b) in enumerate(zip(wanted, held, strict=True)) if not torch.equal(a, b)]
            result[name] = {"differs": differs, "looks": dict(device.accesses), "mixed": dict(device.mixed)}
            result[name] |= {"owed": bool(held[1].any()), "reads": reads["read"], "steps": STEPS}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
