"""The scaling ladder: batched ranks are real ranks, runs go on to the bit, and the search ends at no edge."""

from __future__ import annotations

import csv
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import _ladder_runs
import ladder
from _ladder_ranks import SIZES, Size, StackedGPT, Text, ThreadGroup
from _ladder_runs import (
    BASELINES,
    MAIN,
    ROWS,
    Run,
    Training,
    best_of,
    claimed,
    count_steps,
    keep,
    kept,
    list_missing,
    scheduled,
    start_of,
)
from _rivals import DeMo, PowerSGD, SparseLoCo
from ladder import tabulate
from torch import Tensor

pytestmark = pytest.mark.slow

TINY, RANKS, STEPS = Size(1, 64, 2, batch=2, context=16), 2, 14  # past the dense starts of ten steps
SIZES["tiny"] = TINY
PARAMETERS = sum(p.numel() for p in TINY.make(0).parameters())
TOKENS = STEPS * RANKS * TINY.batch * TINY.context / PARAMETERS


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(bytes(range(32, 127)) * 300)
    return str(path)


def a_run(row: str, **others) -> Run:
    return ROWS[row].start("tiny", ranks=RANKS, tokens=TOKENS, products="float64", **others)


def a_training(row: str, text: str) -> Training:
    return Training(a_run(row), data=text, dtype=torch.float64)


# The stacked model


def test_a_replica_has_the_losses_and_gradients_of_the_model():
    models = [SIZES["0.2M"].make(seed).double() for seed in range(3)]
    stacked = StackedGPT(models[0], 3)
    for name, p in stacked.params.items():
        p.data.copy_(torch.stack([model.get_parameter(name) for model in models]))
    x, y = torch.randint(256, (2, 3, 4, 16)).unbind()
    losses = stacked.backward(x, y)
    for r, model in enumerate(models):
        loss = model(x[r], y[r])
        loss.backward()
        assert losses[r] == pytest.approx(loss.item(), rel=1e-12)
        for name, view in stacked.views(r).items():
            torch.testing.assert_close(view.grad, model.get_parameter(name).grad, rtol=1e-12, atol=1e-15)


def test_products_in_bfloat16_are_those_of_autocast():
    model = SIZES["0.2M"].make(0)
    x, y = torch.randint(256, (2, 1, 4, 16)).unbind()
    losses = StackedGPT(model, 1, torch.bfloat16).backward(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x[0], y[0]).item()
    exact = model(x[0], y[0]).item()
    assert losses[0] != exact
    assert losses[0] == pytest.approx(expected, rel=2e-3)


def test_sizes_have_about_the_parameters_of_their_names():
    for name in ("0.2M", "0.4M", "0.9M", "1.7M"):
        count = sum(p.numel() for p in SIZES[name].make(0).parameters())
        assert count / 1e6 == pytest.approx(float(name[:-1]), rel=0.1)
    assert (
        len({size.width // size.heads for name, size in SIZES.items() if name.endswith("M") and size.width < 200}) == 1
    )
    for name in ("35M", "124M"):
        size = SIZES[name]
        count = 12 * size.layers * size.width**2 + (512 + size.context) * size.width
        assert count / 1e6 == pytest.approx(float(name[:-1]), rel=0.05)


# Batched ranks and real ones


def train_real_ranks(rank: int, path: str, make_model) -> dict[str, tuple[list[float], list[Tensor]]]:
    """Every row on this rank: its losses, and its parameters at the end."""
    found = {}
    for name, row in MAIN.items():
        run, text = a_run(name), Text(TINY, RANKS, 0, path)
        model, params = make_model(TINY.make(0).double())
        optimizer, losses = row.make(run, STEPS, params, None), []
        for step in range(STEPS):
            x, y = (part[rank : rank + 1] for part in text.next())
            losses.append(model(x, y))
            for p in params.values() if name in BASELINES else ():
                dist.all_reduce(p.grad)
                p.grad /= RANKS
            for group in optimizer.param_groups:
                group["lr"] = scheduled(run.lr, step, STEPS)
            optimizer.step()
        getattr(optimizer, "end_round", lambda: None)()
        found[name] = losses, [p.detach().clone() for p in params.values()]
    return found


def as_users_have_it(model):
    def backward(x: Tensor, y: Tensor) -> float:
        model.zero_grad()
        loss = model(x[0], y[0])
        loss.backward()
        return loss.item()

    return backward, dict(model.named_parameters())


def as_one_replica(model):
    stacked = StackedGPT(model, 1)
    return lambda x, y: stacked.backward(x, y)[0], stacked.views(0)


def train_real_ranks_in_both_ways(rank: int, path: str) -> list[dict]:
    return [train_real_ranks(rank, path, make_model) for make_model in (as_users_have_it, as_one_replica)]


@pytest.fixture(scope="module")
def real(text) -> list[tuple[dict, ...]]:
    """The answers of real ranks, one a rank, in each of the two ways."""
    return list(zip(*run_ranks(train_real_ranks_in_both_ways, RANKS, text), strict=True))


@pytest.fixture(scope="module")
def batched(text) -> dict[str, tuple[list[list[float]], dict[str, Tensor]]]:
    found = {}
    for name in MAIN:
        training, losses = a_training(name, text), []
        for step in range(STEPS):
            x, y = training.text.next()
            shape = (training.replicas, -1, TINY.context)
            losses.append(training.model.backward(x.reshape(shape), y.reshape(shape)))
            training.ranks.step(scheduled(training.run.lr, step, STEPS))
        training.ranks.finish()
        found[name] = losses, training.model.params
    return found


def check_equal(found: tuple, real: list[dict], name: str, tolerance: float) -> None:
    """Batched losses and parameters of a row are those of the real ranks, within a relative difference."""
    losses, params = found
    for rank in range(RANKS):
        theirs, weights = real[rank][name]
        replica = rank if len(losses[0]) > 1 else 0
        for p, expected in zip(params.values(), weights, strict=True):
            torch.testing.assert_close(p[replica].detach(), expected, rtol=tolerance, atol=tolerance, msg=name)
        if len(losses[0]) > 1:
            assert [step[rank] for step in losses] == pytest.approx(theirs, rel=tolerance, abs=0), name


def test_batched_ranks_are_real_ranks_that_train_the_model_itself(real, batched):
    """Up to the order of sums, which bfloat16 inside of Muon's orthogonalization may make visible."""
    for name in MAIN:
        check_equal(batched[name], real[0], name, 1e-3 if "Muon" in name else 1e-12)


def test_batched_ranks_are_to_the_bit_real_ranks_with_a_batched_model_of_one(real, batched):
    for name in MAIN.keys() - set(BASELINES):  # whose batch is whole here
        check_equal(batched[name], real[1], name, 0.0)


# Runs that go on


@pytest.mark.parametrize(
    "name", ["DDP + Muon", "LocalSteps(Muon) 30", "Separate(Muon) 16", "PowerSGD 4", "DeMo 8", "SparseLoCo 15"]
)
def test_a_run_goes_on_from_its_checkpoint_to_the_bit(name, text, tmp_path):
    whole, path = a_training(name, text), tmp_path / "run.pt"
    while not whole.is_over:
        whole.advance()
        if whole.step == 11:  # in the middle of a round, and of what an evaluation averages
            whole.save(path)
    resumed = a_training(name, text)
    resumed.load(path)
    while not resumed.is_over:
        resumed.advance()
    lines = [training.line() | {"seconds": 0, "bytes": 0, "share": 0} for training in (whole, resumed)]
    assert lines[0] == lines[1]
    assert 0 <= resumed.ranks.bytes_sent - whole.ranks.bytes_sent < 500  # ranks have verified each other again
    assert lines[0]["val_loss"] is not None and len(lines[0]["evals"]) == 10
    for name, p in whole.model.params.items():
        assert torch.equal(p, resumed.model.params[name]), name


def test_replicas_are_equal_at_the_end(batched):
    for name in MAIN.keys() - set(BASELINES):
        _, params = batched[name]
        for p in params.values():
            assert torch.equal(p[0], p[1]), name


def test_a_run_that_diverges_ends_and_has_no_loss(text):
    training = Training(a_run("DDP + AdamW")._replace(lr=math.inf), data=text, dtype=torch.float64)
    while not training.is_over:
        training.advance()
    assert training.step < STEPS
    assert training.line()["val_loss"] is None


def test_bytes_are_those_of_the_whole_run(text):
    shares = {}
    for name in ("DDP + AdamW", "LocalSteps(Muon) 30", "PowerSGD 4"):
        training = a_training(name, text)
        while not training.is_over:
            training.advance()
        shares[name] = training.line()["share"]
    factors = sum(
        4 * sum(p.shape[1:]) if p[0].numel() >= 4096 else p[0].numel() for p in training.model.params.values()
    )
    sent = 10 * PARAMETERS + (STEPS - 10) * factors
    assert shares["DDP + AdamW"] == 1
    assert shares["PowerSGD 4"] == pytest.approx(sent / (STEPS * PARAMETERS), abs=1e-6)
    assert 0.02 < shares["LocalSteps(Muon) 30"] < 0.1


def test_steps_follow_from_tokens_per_parameter():
    run = ROWS["DDP + AdamW"].start("0.4M")
    assert run.tokens == 20 and run.ranks == 4
    assert count_steps(run, 1_000_000) == round(20 * 1_000_000 / (4 * 8 * 64))
    assert scheduled(1.0, 0, 1000) == pytest.approx(1 / 40)
    assert scheduled(1.0, 1000, 1000) == pytest.approx(0.1)


# The rivals that have no class here


def exchange_in_threads(make, gradients: list[list[Tensor]]) -> list[Tensor]:
    """The parameter of every rank after these steps; ``gradients[step][rank]``."""
    size, groups = len(gradients[0]), ThreadGroup.make(len(gradients[0]))
    params = [torch.zeros_like(gradients[0][0]).requires_grad_() for _ in range(size)]
    optimizers = [make([p], group) for p, group in zip(params, groups, strict=True)]
    with ThreadPoolExecutor(size) as pool:
        for step in gradients:
            for p, g in zip(params, step, strict=True):
                p.grad = g.clone()
            list(pool.map(lambda optimizer: optimizer.step(), optimizers))
    return params


def test_powersgd_is_algorithm_1_and_keeps_what_it_does_not_send():
    torch.manual_seed(0)
    gradients = [[torch.randn(96, 64, dtype=torch.float64) for _ in range(3)] for _ in range(4)]
    q = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).double()
    errors, weights = [torch.zeros(96, 64).double() for _ in range(3)], torch.zeros(96, 64).double().requires_grad_()
    adamw = torch.optim.AdamW([weights], 1e-2)
    for step in gradients:
        residuals = [g + e for g, e in zip(step, errors, strict=True)]
        p = sum(m @ torch.linalg.qr(q)[0] for m in residuals) / 3
        p = torch.linalg.qr(p)[0]
        q = sum(m.T @ p for m in residuals) / 3
        errors = [m - p @ q.T for m in residuals]
        weights.grad = p @ q.T
        adamw.step()
    for w in exchange_in_threads(lambda params, group: PowerSGD(params, 1e-2, 4, group, weight_decay=1e-2), gradients):
        torch.testing.assert_close(w, weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(128, 64), (96, 160), (40, 480)])
def test_demo_that_sends_all_components_takes_the_sign_of_the_mean(shape):
    torch.manual_seed(0)
    gradients = [[torch.randn(shape, dtype=torch.float64) for _ in range(2)] for _ in range(2)]
    params = exchange_in_threads(lambda params, group: DeMo(params, 1.0, k=4096, group=group), gradients)
    expected = -sum(sum(step).sign() for step in gradients)
    for p in params:
        torch.testing.assert_close(p.detach(), expected)


@pytest.mark.parametrize("over_senders", [False, True])
def test_what_one_rank_sends_counts_whole_or_by_its_share(over_senders):
    """Each rank has 64 elements of its own. AdamW moves them all by the rate, which two bits hold exactly."""
    gradients = [[torch.zeros(64, 64, dtype=torch.float64) for _ in range(2)]]
    for rank, g in enumerate(gradients[0]):
        g[rank] = 1.0
    expected = torch.zeros(64, 64).double()
    expected[:2] = -1e-2 if over_senders else -5e-3
    options = dict(every=1, k=64, over_senders=over_senders, weight_decay=0.0)
    for p in exchange_in_threads(lambda params, group: SparseLoCo(params, 1e-2, group=group, **options), gradients):
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=1e-12)


def test_demo_divides_a_component_by_those_who_sent_it():
    """Both ranks send component (0, 0), a constant 1. Rank 1 alone sends (0, 1), which halved would turn no signs."""
    n = torch.arange(64).double()
    cosine = torch.cos(torch.pi * (n + 0.5) / 64).expand(64, 64) * 2**0.5
    gradients = [[1 + 0.01 * cosine.T, 1 + 1.2 * cosine]]
    signs = {}
    for over_senders in (False, True):
        options = dict(k=2, over_senders=over_senders)
        p, _ = exchange_in_threads(lambda params, group, o=options: DeMo(params, 1.0, group=group, **o), gradients)
        signs[over_senders] = -p.detach()
    assert torch.equal(signs[False], (1 + 0.6 * cosine).sign())
    assert torch.equal(signs[True], (1 + 1.2 * cosine).sign())
    assert not torch.equal(signs[False], signs[True])


def test_the_last_round_of_sparseloco_ends_with_the_run_and_no_step_is_dense(text):
    training, sent = a_training("SparseLoCo 15", text), []
    training.steps = 40
    training.ranks = ROWS["SparseLoCo 15"].build(training.run, 40, training.model)
    while not training.is_over:
        before = training.ranks.bytes_sent
        training.advance()
        sent.append(training.ranks.bytes_sent - before)
    assert [n + 1 for n, count in enumerate(sent) if count] == [10, 25, 40]
    assert max(sent) < PARAMETERS * 4 / 10


# The search, and processes side by side


def finished(*losses: tuple[Run, float | None]) -> dict[Run, dict]:
    return {run: {**run._asdict(), "val_loss": loss} for run, loss in losses}


@pytest.mark.parametrize(
    ("curve", "rates"),
    [
        ({4e-3: 1.6, 8e-3: 1.5, 1.6e-2: 1.4, 3.2e-2: None}, {8e-3, 1.6e-2, 3.2e-2}),
        ({2e-3: 1.6, 4e-3: 1.4, 8e-3: 1.5, 1.6e-2: 1.6}, {2e-3, 4e-3, 8e-3, 1.6e-2}),
    ],
)
def test_the_search_begins_at_the_start_and_ends_beside_no_untried_rate(curve, rates):
    start, runs = ROWS["DDP + AdamW"].start("0.2M"), {}
    assert list_missing({}, start, False) == [start]
    while todo := list_missing(runs, start, True):
        runs |= finished((todo[0], curve[round(todo[0].lr, 6)]))
    assert runs[best_of(runs, start)]["val_loss"] == 1.4
    assert {run.lr for run in runs} == rates


def test_outer_settings_are_searched_where_there_are_any():
    start = ROWS["LocalSteps(Muon) 30"].start("0.2M")
    runs = finished((start, 1.4), (start._replace(lr=start.lr * 2), 1.5), (start._replace(lr=start.lr / 2), 1.5))
    assert list_missing(runs, start, False) == []
    todo = list_missing(runs, start, True)
    assert {(run.momentum, run.outer_lr) for run in todo} == {(0.0, 1.0), (0.6, 1.0), (0.3, 0.7)}
    other = start._replace(seed=1)
    assert list_missing(runs, other, False) == [other]


def test_a_larger_size_begins_at_the_best_of_the_smaller():
    start = ROWS["LocalSteps(Muon) 30"].start("0.2M")
    best = start._replace(lr=4e-3, momentum=0.6)
    runs = finished((start, 1.4), (best, 1.3))
    assert start_of("LocalSteps(Muon) 30", "0.9M", runs) == best._replace(size="0.9M")
    assert start_of("DeMo 8", "0.9M", runs) == ROWS["DeMo 8"].start("0.9M")


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(_ladder_runs, "KEPT", tmp_path / "ladder.jsonl")
    monkeypatch.setattr(_ladder_runs, "UNFINISHED", tmp_path / "unfinished")
    monkeypatch.setattr(ladder, "KEPT", tmp_path / "ladder.jsonl")
    return tmp_path


def test_a_run_belongs_to_one_process_and_is_done_once(results):
    run = a_run("DDP + AdamW")
    with claimed(run) as is_mine:
        assert is_mine
        with claimed(run) as is_mine:
            assert not is_mine
        with claimed(run._replace(seed=1)) as is_mine:
            assert is_mine
        keep(run._asdict() | {"val_loss": 1.0})
    with claimed(run) as is_mine:
        assert not is_mine
    assert list(kept()) == [run]


def test_ratios_are_of_equal_seeds_and_settings_of_seed_0():
    adamw, local = ROWS["DDP + AdamW"].start("0.2M"), ROWS["LocalSteps(AdamW) 30"].start("0.2M")
    faster = adamw._replace(lr=2 * adamw.lr)
    runs = finished((adamw, 2.0), (adamw._replace(seed=1), 4.0), (faster, 2.5), (faster._replace(seed=1), 1.0))
    runs |= finished((local, 2.2), (local._replace(seed=1), 4.8), (local._replace(seed=2), 9.0))
    for line in runs.values():
        line.update(parameters=1, steps=1, share=0.01, seconds=1.0)
    first, second = tabulate(runs)
    assert (first["loss"], first["seeds"], first["lr"], first["lr_at_an_edge"]) == (3.0, 2, adamw.lr, True)
    assert second["to_adamw"] == pytest.approx((1.1 + 1.2) / 2)
    assert (second["to_muon"], second["seeds"], second["range"]) == (None, 3, pytest.approx(6.8))


def test_the_command_trains_goes_on_and_shows(results, text, monkeypatch, capsys):
    def call(*words: str, ranks: str = "--ranks 2") -> None:
        monkeypatch.setattr(sys, "argv", ["ladder.py", *words, "--tokens", str(TOKENS), *ranks.split()])
        ladder.main()

    common = ["--size", "tiny", "--data", text, "--products", "float32"]
    call("run", *common, "--rows", "DDP + AdamW", "--minutes", "0")
    assert not (results / "ladder.jsonl").exists() and list((results / "unfinished").glob("*.pt"))
    call("tune", *common, "--rows", "DDP + AdamW", "LocalSteps(Muon) 30")
    call("run", *common, "--rows", "DDP + AdamW", "--seed", "1")
    lines = [json.loads(line) for line in (results / "ladder.jsonl").read_text().splitlines()]
    assert not list((results / "unfinished").glob("*.pt"))
    assert len(lines) == len(kept()) >= 7
    assert {(line["row"], line["seed"]) for line in lines} == {
        ("DDP + AdamW", 0),
        ("LocalSteps(Muon) 30", 0),
        ("DDP + AdamW", 1),
    }
    call("run", *common, "--rows", "DDP + AdamW", ranks="--ranks 1 4")
    assert {run.ranks for run in kept()} == {1, 2, 4}
    capsys.readouterr()
    call("--show", "--products", "float32", ranks="")
    printed = capsys.readouterr().out
    assert all(f"{ranks} ranks, " in printed for ranks in (1, 2, 4)) and printed.count("LocalSteps(Muon) 30") == 2
    assert {line["ranks"] for line in csv.DictReader((results / "ladder.csv").open())} == {"1", "2", "4"}
    assert (results / "ladder-outer.csv").exists() and (results / "ladder.png").exists()
