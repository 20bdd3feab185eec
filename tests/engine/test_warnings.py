"""Warnings name the line of the user's that led to them, however it was called, and appear on one rank."""

from __future__ import annotations

import re
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deep import Deep
from ranks import run_ranks
from sim import World
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compopt
from compopt._backends import choice as backends
from compopt._wire.warning import warn

HERE = Path(__file__).resolve()


def heard(call: Callable[[], object]) -> list[tuple[str, str, int]]:
    """Return what ``call`` warns of: the text, the file and the line it names."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [(str(w.message), str(Path(w.filename).resolve()), w.lineno) for w in found]


def line_of(mark: str) -> int:
    """The line of this file that ends in a comment."""
    return next(n for n, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {mark}"))


# Several ranks: what step(), rebind() and load_state_dict() say


def made(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Deep().layers)
    return model, compopt.RadiusAdamW(model.parameters(), lr=1e-3, density=0.3)


def changed_after_backward(rank: int, wrap: str) -> list[tuple[str, str, int]]:
    """A clip by hand, of gradients that are on their way."""
    model, optimizer = made(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if wrap == "scheduler":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(number: int) -> None:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * number + rank))
        value = model(x).square().mean()
        (scaler.scale(value) if wrap == "scaler" and number == 2 else value).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if wrap == "scaler" and number == 2:
            scaler.step(optimizer)  # scaler
        else:
            optimizer.step()  # step
        optimizer.zero_grad()

    return heard(lambda: [step(number) for number in range(4)])


def lost_a_step(rank: int) -> list[tuple[str, str, int]]:
    _, optimizer = made(rank)
    optimizer.param_groups[0]["step"] = 5 - rank
    return heard(lambda: optimizer.rebind(dist.group.WORLD))  # rebind


def loads_another_ranks(rank: int) -> list[tuple[str, str, int]]:
    _, optimizer = made(rank)
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {"residuals": "rank 0 of 2", "step": 5}
    saved["state"][0]["residual"].fill_(1.0)
    return heard(lambda: optimizer.load_state_dict(saved))  # load


def other_back_ends(rank: int) -> list[tuple[str, str, int]]:
    backends._choose_fastest = lambda devices: named("torch" if rank else "other")
    _, optimizer = made(rank)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.full_like(p, 1.0 + rank)
    return heard(lambda: optimizer.step())  # backends


def named(name: str):
    ops = backends.make_backend("torch")
    ops.name, ops.reason = name, "a test"
    return ops


def on_two(rank: int) -> dict[str, list[tuple[str, str, int]]]:
    from compopt._state import buckets

    buckets.BUCKET_BYTES = 40_000
    return {
        "step": changed_after_backward(rank, "step"),
        "scheduler": changed_after_backward(rank, "scheduler"),
        "scaler": changed_after_backward(rank, "scaler"),
        "rebind": lost_a_step(rank),
        "load": loads_another_ranks(rank),
        "backends": other_back_ends(rank),
    }


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(on_two, 2)


@pytest.mark.parametrize(
    ("call", "mark", "says", "speaker"),
    [
        ("step", "step", "gradients were changed between backward and step", 0),
        ("scheduler", "step", "gradients were changed between backward and step", 0),
        ("scaler", "step", "gradients were changed between backward and step", 0),
        ("rebind", "rebind", "rank 1 had not applied step 5, and took it over from rank 0", 0),
        ("load", "load", "holds the residuals of rank 0 of 2 and is loaded on rank 1 of 2", 1),
        ("backends", "backends", "ranks have chosen different backends", 0),
    ],
)
def test_one_rank_says_it_at_the_users_line(ranks, call, mark, says, speaker):
    ours = [[w for w in rank[call] if says in w[0]] for rank in ranks]
    assert [len(local) for local in ours] == [rank == speaker for rank in range(2)], ranks
    ((_, file, line),) = ours[speaker]
    assert (file, line) == (str(HERE), line_of(mark))


# One process


def test_ranks_that_are_gone():
    p = nn.Parameter(torch.ones(64, 64))
    optimizer = compopt.RadiusAdamW([p], process_group=World(2).comms[0])
    assert optimizer.comm.size == 2
    ((text, file, _),) = heard(lambda: optimizer.rebind(World(1).comms[0]))
    assert text.startswith("1 of 2 ranks are gone") and file == str(HERE)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_that_grows(rank):
    world = World(2)

    def adam():
        compopt.SeparateAdam(
            [nn.Parameter(torch.ones(64, 64))], projection="gaussian", ef_beta=0.1, process_group=world.comms[rank]
        )

    def wrapper():
        base = torch.optim.SGD([nn.Parameter(torch.ones(64, 64))], lr=0.1)
        compopt.Separate(base, projection="gaussian", ef_beta=0.1, process_group=world.comms[rank])

    for make in (adam, wrapper):
        found = heard(make)
        assert [file for _, file, _ in found] == [str(HERE)] * (rank == 0), found
        assert all("lets the error of" in text for text, _, _ in found)


def test_a_back_end_that_does_not_run(monkeypatch):
    def fails(name):
        if name == "native":
            raise OSError("no such library")
        return make(name)

    make = backends.make_backend
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)
    monkeypatch.setattr(backends, "explain_missing_backend", lambda name, devices: "")
    monkeypatch.setattr(backends, "make_backend", fails)
    backends._warn_once.cache_clear()
    ((text, file, _),) = heard(lambda: compopt.AdamS([nn.Parameter(torch.ones(64, 64))]))
    assert "native backend is installed but does not run" in text and file == str(HERE)


def test_installed_programs_between_are_passed_over():
    """A trainer calls step() for the user; a program that is itself installed is its own user."""
    path = str(Path(sysconfig.get_path("purelib")) / "trainer.py")
    spaces = {"warn": warn}
    exec(compile("def train():\n    warn('x')\n", path, "exec"), spaces)
    ((_, file, _),) = heard(spaces["train"])
    assert file == str(HERE)


def test_no_warning_goes_another_way():
    root = Path(compopt.__file__).parent
    others = [p for p in root.rglob("*.py") if re.search(r"warnings\.warn\b|import warnings", p.read_text())]
    assert [p.name for p in others] == ["warning.py"]


def texts(found: list[tuple[str, str, int]], words: str) -> list[str]:
    return [text for text, *_ in found if words in text]


def test_ranks_that_are_not_connected_are_told_the_line_to_add(monkeypatch):
    """torchrun has started two, and the script lacks a line. Said once, by rank 0, also for wrapped optimizers."""

    def train(make: Callable, steps: int = 3) -> None:
        model = nn.Linear(80, 80)
        optimizer = make(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 80)).sum().backward()
            optimizer.step()

    makers = [
        compopt.SeparateAdam,
        lambda params: compopt.Average(compopt.AdamS(params)),
        lambda params: compopt.LocalSteps(torch.optim.AdamW(params)),
    ]
    for make in makers:
        for size, rank, times in ((2, 0, 1), (2, 1, 0), (1, 0, 0)):
            monkeypatch.setenv("WORLD_SIZE", str(size))
            monkeypatch.setenv("RANK", str(rank))
            output_text = texts(heard(lambda make=make: train(make)), "torch.distributed is not initialized")
            assert len(output_text) == times
            assert all(
                f"WORLD_SIZE is {size}" in text and "torch.distributed.init_process_group()" in text
                for text in output_text
            )
    monkeypatch.delenv("RANK")
    assert not texts(heard(lambda: train(compopt.AdamS)), "not initialized")


def without_backward(rank: int) -> list[list[str]]:
    found = []
    makers = [
        compopt.SeparateAdam,
        compopt.TagcAdamW,
        lambda params: compopt.Average(torch.optim.AdamW(params)),
        lambda params: compopt.LocalSteps(torch.optim.AdamW(params), every=2),
    ]
    for make in makers:
        torch.manual_seed(0)
        model = nn.Linear(80, 80)
        optimizer = make(model.parameters())

        def train(model=model, optimizer=optimizer) -> None:
            for step in range(5):
                optimizer.zero_grad()
                if step and (rank == 0 or step == 1):  # first nobody runs backward, then rank 1 does once
                    model(torch.full((2, 80), rank + 1.0)).sum().backward()
                optimizer.step()

        found.append(texts(heard(train), "had no gradients"))
    return found


def test_a_rank_that_never_ran_backward_is_told_once():
    first, second = run_ranks(without_backward, 2)
    *averaging, (local_first,) = first
    assert averaging == [[]] * 3 and "rank 0 had no gradients in step 1: it adds nothing" in local_first
    *averaging, (local_second,) = second
    for output_text in averaging:
        assert output_text == [
            "rank 1 had no gradients in step 3: it counts as zeros in the mean over ranks. Call backward() on every "
            "rank before step()."
        ]
    assert local_second == (
        "rank 1 had no gradients in step 1: it adds nothing to the average of its round. Call backward() on every "
        "rank before step()."
    )
