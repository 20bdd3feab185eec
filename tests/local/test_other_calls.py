"""Ranks that are in different calls: some end a round, others save or consolidate. Real ranks, which gloo connects."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import compopt
from compopt._engine import meetings
from compopt.integrations.snapshots import Snapshots
from compopt.local_steps import anchored

PATIENCE = 20.0


def parts(rank: int, folder: str, call: str, options: dict) -> tuple[str, float, list[float], bool]:
    """Rank 0 ends a round, and the others make another call; then all end it, and make that call."""
    meetings.LOOK_AGAIN, anchored.LOOK_AFTER = 0.05, 0.2
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = compopt.LocalSteps(torch.optim.AdamW(model.parameters()), growth_steps=0, **options)
    snapshots = Snapshots(Path(folder) / str(rank), model, optimizer)
    optimizer.patience = PATIENCE  # in save()
    calls = {"save": snapshots.save, "consolidate": lambda: optimizer.consolidate_state(PATIENCE)}

    def train(steps: range) -> None:
        for t in steps:
            optimizer.zero_grad()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + t))
            model(x).square().mean().backward()
            optimizer.step()

    train(range(5))
    optimizer.end_round()
    train(range(5, 10))
    began, message = time.monotonic(), "nothing"
    try:
        optimizer.end_round() if rank == 0 else calls[call]()
    except compopt.CommunicationError as error:
        message = str(error)
    took = time.monotonic() - began
    optimizer.end_round()
    calls[call]()
    snapshots.wait()
    train(range(10, 13))
    optimizer.end_round()
    return message, took, model.weight.flatten().tolist(), bool(snapshots.find())


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("save", {"round_seconds": 1e6}),
        ("consolidate", {"every": 4, "delay": 2}),
        pytest.param("save", {"every": 7, "fragments": 2}, marks=pytest.mark.slow),
        pytest.param("consolidate", {"round_seconds": 1e6}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_are_told_at_once_and_go_on(call, options, tmp_path):
    """The groups' timeouts are hours: without an answer they would wait for each other."""
    results = run_ranks(parts, 3, str(tmp_path), call, options)
    named = {"save": "save() of Snapshots", "consolidate": "consolidate_state()"}[call]
    for rank, (message, took, weights, is_saved) in enumerate(results):
        assert f"rank 0 ends a round, in end_round() of LocalSteps, while rank 1 is in {named}" in message, message
        assert "make both calls on all ranks in the same order" in message and "gone" not in message
        assert ("after the next step" if rank == 0 else "Nothing was") in message
        assert took < PATIENCE / 2 and weights == results[0][2]
        assert is_saved == (call == "save")
