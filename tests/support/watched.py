"""Models and records for tests of `compopt.diagnose`."""

from __future__ import annotations

import torch
from torch import nn

from compopt.planning.candidates import CANDIDATES, Candidate
from compopt.planning.diagnosis import Diagnosis

FEW = {name: CANDIDATES[name] for name in ("tracked 16, int8", "Radius 0.4", "SCAPE 0.1", "TAGC 0.1")}


def watch(rows: list[torch.Tensor], candidates: dict[str, Candidate], start: int = 3, **options: object) -> Diagnosis:
    """Return the diagnosis of a model of one matrix that has these gradients."""
    model = nn.Linear(rows[0].shape[1], rows[0].shape[0], bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "weight_decay": 0.0, **options})
    with Diagnosis(model, optimizer, len(rows), start, 1 << 20, None, candidates) as records:
        for g in rows:
            model.weight.grad = g.clone()
            optimizer.step()
    return records


def noise(steps: int, rows: int = 64, columns: int = 80) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(rows, columns, generator=random) for _ in range(steps)]
