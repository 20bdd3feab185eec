"""torch.set_default_dtype and set_default_device change what a user's tensors are, and nothing of ours: whenever they
are called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pairs import name_of
from sim import Ranks
from slow_rows import in_turn
from table import CASES, FORMS
from torch import nn

import compopt

ROOT = Path(compopt.__file__).parent
MAKES = {"empty", "zeros", "ones", "full", "tensor", "scalar_tensor", "arange", "randn", "rand", "randint", "randperm",
         "eye", "linspace", "logspace", "empty_strided", "frombuffer", "normal"}  # fmt: skip


def without(option: str, path: Path) -> list[str]:
    """The calls of torch in a file that make a tensor and do not say its dtype, or its device.

    Parameters of modules take both from the user's defaults, as torch's own do.
    """
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    torchs = [c for c in calls if isinstance(c.func, ast.Attribute) and getattr(c.func.value, "id", "") == "torch"]
    made = [c for c in torchs if c.func.attr in MAKES and not {option, "out"} & {k.arg for k in c.keywords}]
    if option == "device":  # parameters; and what is always on the host
        made = [c for c in made if "get_default_dtype" not in ast.unparse(c) and c.func.attr != "frombuffer"]
    return [f"{path.name}:{c.lineno}: {ast.unparse(c)}" for c in made]


@pytest.mark.parametrize("option", ["dtype", "device"])
def test_every_allocation_says_its(option):
    files = [*ROOT.rglob("*.py"), *(ROOT.parent / "kernels").rglob("*.py")]
    assert [call for path in files for call in without(option, path)] == []


@contextmanager
def default(of_tensors: torch.dtype | str) -> Iterator[None]:
    """Make this dtype, or device, the default."""
    change = torch.set_default_device if isinstance(of_tensors, str) else torch.set_default_dtype
    change(of_tensors)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


class Net(nn.Module):
    """A matrix that is cut into several shards, one with an odd number of elements, a vector; float32 for good."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(150, 130), (65, 67), (33,)]
        self.all = nn.ParameterList(nn.Parameter(torch.randn(s, dtype=torch.float32)) for s in shapes)


def loss(model: Net, rank: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1 + 10 * step + rank)
    pairs = [(p, torch.randn(p.shape, generator=random, dtype=torch.float32, device="cpu")) for p in model.all]
    return sum(((p - target) ** 2).sum() for p, target in pairs)


@pytest.mark.parametrize(
    ("case", "changed"), in_turn(CASES + FORMS, (torch.float64, torch.bfloat16, "meta")), ids=name_of
)
def test_it_may_change_between_construction_and_steps(monkeypatch, case, changed):
    """TAGC's pass wrote marks of float32 into memory for another dtype: parameters that do not move, or worse.

    What is on the meta device is lost, and an accelerator would refuse to pin it.
    """
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)
    expected, ours = (Ranks(2, Net, case.make) for _ in range(2))
    expected.train(loss, 5)
    expected.world.consolidate(expected.optimizers)
    with default(changed):
        ours.train(loss, 5)
        ours.world.consolidate(ours.optimizers)
        state = ours.optimizers[0].state_dict()
        ours.optimizers[0].load_state_dict(state)
    for p, q in zip(ours.models[0].parameters(), expected.models[0].parameters(), strict=True):
        assert torch.equal(p, q)
    theirs = expected.optimizers[0].state_dict()
    for key, entry in state["state"].items():
        for name, value in entry.items():
            assert not isinstance(value, torch.Tensor) or (
                value.dtype == theirs["state"][key][name].dtype and torch.equal(value, theirs["state"][key][name])
            ), name
