"""`compopt.diagnose`: the training is not touched, and what is told of it."""

from __future__ import annotations

import builtins
import copy
import csv
import dataclasses
import itertools
import math
import re
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from scipy.stats import kendalltau, spearmanr
from slow_rows import slow_but
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from watched import FEW, noise, watch

import compopt
from compopt.costmodel import advise
from compopt.planning.candidates import CANDIDATES
from compopt.planning.diagnosis_report import Row, assess_start, compare_with_advice, conclude, recommend_row

ROOT = Path(__file__).parents[2]


class Odd(nn.Module):
    """With everything that is not a trained float32 matrix: frozen, empty, 1-D, bfloat16, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 80), nn.Linear(80, 64).bfloat16()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.kernel = nn.Conv2d(8, 64, 3)
        self.unused = nn.Linear(64, 64)
        self.empty = nn.Parameter(torch.zeros(0, 64))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.first(self.frozen(x))).relu()
        image = self.kernel(x.view(-1, 8, 4, 2).repeat(1, 1, 1, 2)).flatten(1).mean()
        return self.second(hidden.bfloat16()).float().square().mean() + image.square() + self.empty.sum()


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int, rank: int = 0) -> None:
    random = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        model(torch.randn(8, 64, generator=random)).backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(thing: object) -> list:
    """Everything in a state dict, tensors as their bytes."""
    if isinstance(thing, torch.Tensor):
        whole = thing.detach().contiguous().view(-1)
        return [str(thing.dtype), *thing.shape, zlib.crc32(bytes(whole.view(torch.uint8).tolist()))]
    if isinstance(thing, dict):
        return [[str(key), bits(value)] for key, value in thing.items()]
    return [bits(one) for one in thing] if isinstance(thing, list | tuple) else [repr(thing)]


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
    return [bits(model.state_dict()), bits(optimizer.state_dict()), bits(torch.get_rng_state())]


OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=False),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "ours": lambda ps: compopt.SeparateAdam(ps, lr=1e-2, rank=4, dense_steps=2, simulate=True),
    "around": lambda ps: compopt.Separate(torch.optim.SGD(ps, lr=1e-2), rank=4, simulate=True),
}


def once(make, watched: bool, steps: int = 8) -> tuple[list, int, str]:
    torch.manual_seed(0)
    model, calls = Odd(), []
    optimizer = make(list(model.parameters()))
    hook = register_optimizer_step_post_hook(lambda *of: calls.append(type(of[0])))
    try:
        if watched:
            with compopt.diagnose(model, optimizer, start=2) as records:
                train(optimizer, model, steps)
            assert records.steps == steps
        else:
            train(optimizer, model, steps)
    finally:
        hook.remove()
    assert not optimizer._optimizer_step_post_hooks and torch.get_num_threads() == once.threads
    return contents(model, optimizer), len(calls), str(records) if watched else ""


once.threads = torch.get_num_threads()


def without_times(text: str) -> str:
    """The report without what compopt-advise names, which goes by the seconds of a step."""
    assert "\n- compopt-advise " in text
    return re.sub(r"\n- compopt-advise .*?(?=\n- )", "", text, flags=re.S)


@pytest.mark.parametrize("name", slow_but(lambda name: name in ("AdamW", "ours"), OPTIMIZERS))
def test_the_training_is_the_same_to_the_bit(name, capfd):
    """Parameters, state, random numbers; and nobody's hooks see the methods' steps."""
    (plain, calls, _), (watched, records, text) = (once(OPTIMIZERS[name], watched) for watched in (False, True))
    assert plain == watched and calls == records
    assert "first.weight" in text and "second.weight" in text and "frozen" not in text and "empty" not in text
    assert without_times(once(OPTIMIZERS[name], True)[2]) == without_times(text)  # deterministic
    assert capfd.readouterr().err.count("compopt:") <= 3  # of the user's own optimizers alone


def test_gradients_are_left_as_they_are():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with compopt.diagnose(model, optimizer, start=1):
        for step in range(4):
            model.weight.grad = torch.full((64, 64), step + 1.0)
            optimizer.step()
            assert torch.equal(model.weight.grad, torch.full((64, 64), step + 1.0))


def test_a_layer_without_a_gradient_is_not_said_to_keep_nothing():
    model = nn.ModuleDict({"used": nn.Linear(64, 80), "unused": nn.Linear(64, 64)})
    optimizer = torch.optim.AdamW(model.parameters())
    with compopt.diagnose(model, optimizer, start=1) as records:
        for _ in range(4):
            model["used"](torch.randn(8, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert records.rows[0].least == records.rows[0].most > 0.9
    assert re.search(r"unused.weight  +64 x 64  +all  +-  +-\n", str(records))


def test_sparse_gradients_are_left_out():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(100, 64, sparse=True), nn.Linear(64, 64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with compopt.diagnose(model, optimizer, start=1) as records:
        for step in range(5):
            model[1](model[0](torch.tensor([step, 7]))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ("kept", "tracked 16, int8", "0.weight") not in records.findings and records.rows[0].kept > 0.5
    assert ("overlap", "0.1", "1", "0.weight") not in records.findings


def test_steps_that_are_not_finite_are_left_out():
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with compopt.diagnose(model, optimizer, start=2) as records:
        for number, g in enumerate(noise(9, 64, 64)):
            model.weight.grad = g / (number != 4)
            optimizer.step()
            nn.init.zeros_(model.weight)
    assert (records.steps, records.skipped) == (8, 1) and "1 more steps were left out" in str(records)
    assert all(math.isfinite(value) for value in records.findings.values())
    with pytest.raises(RuntimeError, match="has seen 0 steps"), compopt.diagnose(model, optimizer):
        for g in noise(13, 64, 64):  # weights are lost, and stay so
            model.weight.grad = g
            nn.init.constant_(model.weight, math.nan)
            optimizer.step()


def test_steps_without_a_gradient_do_not_count():
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with compopt.diagnose(model, optimizer, start=2) as records:
        for number, g in enumerate(noise(9, 64, 64)):
            model.weight.grad = None if number == 4 else g
            optimizer.step()
    assert (records.steps, records.skipped) == (8, 0)


def test_a_step_that_a_scaler_takes_back_is_left_out():
    """AdamW's fused kernel skips by itself, and its hooks run all the same."""
    model = nn.Sequential(nn.Linear(64, 64), Square())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with compopt.diagnose(model, optimizer, start=2) as records:
        for step in range(7):
            scaler.scale(model(torch.ones(2, 64))).backward()
            model[0].bias.grad[0] /= step != 3  # which is not looked at
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert (records.steps, records.skipped) == (6, 1)


def test_a_step_that_our_optimizer_skips_is_left_out():
    """For a gradient of a tensor that is not looked at."""
    model = nn.Sequential(nn.Linear(64, 64), Square())
    optimizer = compopt.SeparateAdam(model.parameters(), rank=4, simulate=True)
    with compopt.diagnose(model, optimizer, start=2) as records:
        for step in range(7):
            model(torch.ones(2, 64)).backward()
            model[0].bias.grad[0] /= step != 3
            optimizer.step()
            optimizer.zero_grad()
    assert (records.steps, records.skipped) == (6, 1)


def other_tensors(rank: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64 + 16 * rank), Square())
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        with compopt.diagnose(model, optimizer, start=2) as records:
            records.sampled[0] = dataclasses.replace(records.sampled[0], name=f"{rank}.weight")
            train(optimizer, model, 6)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_that_look_at_different_tensors_say_so():
    assert all("ranks have looked at different tensors" in report for report in run_ranks(other_tensors, 2))


def test_steps_after_the_limit_cost_nothing():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with compopt.diagnose(model, optimizer, steps=5, start=2) as records:
        train(optimizer, nn.Sequential(model, Square()), 9)
        assert not optimizer._optimizer_step_post_hooks
    assert records.steps == 5 and records.rows


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def on_a_rank(rank: int, ours: bool, watched: bool) -> tuple[list, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), Square())
    ddp = DistributedDataParallel(model)
    make = OPTIMIZERS["ours" if ours else "AdamW"]
    optimizer = make(list(ddp.parameters()))
    if not watched:
        train(optimizer, ddp, 6, rank)
        return bits([model.state_dict(), optimizer.state_dict()]), ""
    with compopt.diagnose(ddp, optimizer, start=2) as records:
        train(optimizer, ddp, 6, rank)
    return bits([model.state_dict(), optimizer.state_dict()]), str(records)


@pytest.mark.parametrize("ours", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_ranks_train_as_without_it_and_tell_the_same(ours):
    plain, watched = (run_ranks(on_a_rank, 2, ours, how) for how in (False, True))
    assert [one[0] for one in plain] == [one[0] for one in watched]
    assert watched[0][1] == watched[1][1] and "2 ranks" in watched[0][1]


def an_expert_without_tokens_on(rank: int) -> str:
    """Rank 1 has zeros in the gradient of the second expert, and no weight decay that would move it."""
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
    optimizer = compopt.SeparateAdam(experts.parameters(), lr=1e-2, rank=4, weight_decay=0.0)
    with compopt.diagnose(experts, optimizer, start=2) as records:
        for t in range(6):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * t + rank))
            optimizer.zero_grad()
            loss = experts[0](x).square().mean() + (1 - rank) * experts[1](x).square().mean()
            loss.backward()
            optimizer.step()
    return str(records)


def test_a_layer_that_gets_zeros_on_one_rank_is_told_by_the_other():
    reports = run_ranks(an_expert_without_tokens_on, 2)
    assert reports[0] == reports[1] and "2 ranks" in reports[0]


def sharded(rank: int, watched: bool) -> tuple[list, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), Square())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not watched:
        train(optimizer, model, 6, rank)
        return bits([p.to_local() for p in model.parameters()]), ""
    with compopt.diagnose(model, optimizer, start=2) as records:
        train(optimizer, model, 6, rank)
    return bits([p.to_local() for p in model.parameters()]), str(records)


@pytest.mark.slow
def test_under_fsdp_shards_are_looked_at():
    plain, watched = (run_ranks(sharded, 2, how) for how in (False, True))
    assert [one[0] for one in plain] == [one[0] for one in watched]
    report = watched[0][1]
    assert report == watched[1][1] and "128 x 64" in report
    assert "0.0164 M of 0.0331 M elements" in report  # bytes and advice are of the whole model


def one_step_less(rank: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Square())
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        with compopt.diagnose(model, optimizer, start=2):
            train(optimizer, model, 6 - rank)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_that_have_seen_different_steps_say_so():
    assert all("different numbers of steps (6, 5)" in report for report in run_ranks(one_step_less, 2))


def test_what_is_told_has_every_method_and_what_it_means():
    records = watch(noise(14), dict(CANDIDATES))
    text = str(records)
    assert all(name in text for name in CANDIDATES) and max(map(len, text.splitlines())) <= 110
    words = (
        "Start with",
        "Settings of this method keep ",
        "compopt-advise",
        "Radius's interval:",
        "Dense start: from",
        "not predict the value of a loss",
    )
    for word in words:
        assert word in text, word
    kept = [row.kept for row in records.rows]
    assert kept == sorted(kept, reverse=True) and records.order == [row.method for row in records.rows]
    front = [row for row in records.rows if row.front]
    assert all(a.share > b.share for a, b in itertools.pairwise(front)) and len(front) >= 2


def test_a_start_is_advised_where_the_largest_elements_settle():
    report = {(0.5, 0.6): "had not settled", (0.6, 0.5): "change faster", (0.5, 0.54): "would change little"}
    for (first, last), words in report.items():
        assert words in assess_start({("settling", "first"): first, ("settling", "last"): last})
    results = watch(noise(30), {"one": FEW["TAGC 0.1"]}).findings  # moments of the first steps change most
    assert results["settling", "first"] < results["settling", "last"] < 1


def row(method: str, kept: float, share: float, cls: str = "SeparateAdam") -> Row:
    return Row(method, f"compopt.{cls}()", cls, kept, kept, kept, 0.0, False, share)


def test_the_smallest_setting_whose_loss_does_not_matter_is_recommended():
    kept = {32: (0.98, 0.088), 16: (0.96, 0.044), 8: (0.91, 0.022), 4: (0.84, 0.01)}
    ranks = [row(f"tracked {rank}", *numbers) for rank, numbers in kept.items()]
    others = [row("Radius 0.5", 0.99, 0.53, "RadiusAdamW"), row("AdamS", 1.0, 1.0, "AdamS")]
    assert recommend_row([*ranks, *others]).method == "tracked 16"  # of a tenth of the bytes: .98 and .96 are alike
    assert recommend_row([*ranks[2:], *others]).method == "tracked 8"
    assert recommend_row(others).method == "Radius 0.5"  # nothing sends little
    unsettled = dataclasses.replace(ranks[1], grows=True)  # it sends less than it adds to its residual
    assert recommend_row([ranks[0], unsettled, *ranks[2:], *others]).method == "tracked 32"
    assert recommend_row([unsettled]) is unsettled
    training = advise(10_000_000, ranks=2, link_bits_per_s=1e9, step_s=0.4).situation
    report = conclude({}, [*ranks, *others], training)
    assert (
        report[0].startswith("Start with compopt.SeparateAdam()")
        and "keeps 0.96 of AdamW's update with 4.4% of the bytes" in report[0]
    )
    listed = "0.84 (tracked 4), 0.91 (tracked 8), 0.96 (tracked 16), 0.98 (tracked 32)"
    assert (
        report[1] == f"Settings of this method keep {listed}. More bytes than tracked 16 sends keep at most 0.05 more."
    )
    large = row("tracked 64", 1.0, 0.2)
    assert "More bytes than tracked 8 sends keep more." in conclude({}, [large, *ranks[2:]], training)[1]


def test_it_says_whether_the_advice_names_the_same_class():
    def compare(cls: str, size: int, step_s: float, ranks: int = 2) -> str:
        return compare_with_advice(advise(size, ranks=ranks, link_bits_per_s=1e9, step_s=step_s).situation, cls)

    same = compare("SeparateAdam", 10_000_000, 0.4)
    assert same.startswith("compopt-advise also names SeparateAdam, for 2 ranks and 400 ms a step. By link: ")
    spans = re.findall(r"(?:from|at) [\d.]+ .bit/s[^;]*?(?: to [\d.]+ .bit/s)? (\w+)", same)
    assert spans[-1] == "AdamW" and "SeparateAdam" in spans and "LocalSteps, which is not judged here" in same
    other = compare("TagcAdamW", 10_000_000, 0.4)
    assert other.startswith("compopt-advise does not name TagcAdamW, for") and "ended at a lower loss" in other


def test_the_step_that_the_advice_goes_by_is_the_training_s_own(monkeypatch):
    """By a clock on which a step takes a quarter of a second, and its record ten seconds."""
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr("compopt.planning.diagnosis.time", clock)
    model = nn.Sequential(nn.Linear(64, 64), Square())
    optimizer = torch.optim.AdamW(model.parameters())
    with compopt.diagnose(model, optimizer, steps=8, start=2) as records:
        record_step = records.runs.record_step

        def record_slowly(*args):
            clock.now += 10
            return record_step(*args)

        monkeypatch.setattr(records.runs, "record_step", record_slowly)
        for _ in range(8):
            clock.now += 0.25
            train(optimizer, model, 1)
    assert records.training.compute_s == 0.25 and records.seconds == 80
    assert records.training.machine.ranks == 2 and "2 ranks and" in str(records)


def test_a_line_that_is_told_can_be_run():
    params = [nn.Parameter(torch.zeros(64, 64))]
    for candidate in CANDIDATES.values():
        made = eval(candidate.line.replace("lr=...", "lr=1e-3"), {"compopt": compopt, "params": params})
        assert type(made).__name__ == candidate.class_name


def test_a_plot_is_saved(tmp_path, monkeypatch):
    records = watch(noise(8), FEW)
    records.plot(str(tmp_path / "seen.png"))
    assert (tmp_path / "seen.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="there is no folder"):
        records.plot(str(tmp_path / "nowhere" / "seen.png"))
    real = builtins.__import__

    def without(name: str, *args: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        records.plot(str(tmp_path / "seen.png"))


def test_the_page_says_how_well_it_predicts_as_the_kept_table_does():
    with (ROOT / "bench/results/diagnosed.csv").open() as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "docs/diagnose.md").read_text()
    for steps, lr in ((800, 2e-3), (400, 2e-3), (800, 4e-3), (1500, 1e-3), (800, 1e-3)):
        group = [row for row in rows if (int(row["steps"]), float(row["lr"])) == (steps, lr)]
        loss = [float(row["loss"]) for row in group]
        kept = [[-float(row[key]) for row in group] for key in ("first", "after")]
        cells = [score(numbers, loss).statistic for score in (kendalltau, spearmanr) for numbers in kept]
        assert f"| {steps}, {lr:g} | {len(group)} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |" in page


def test_wrappers_of_optimizers_are_seen_through():
    class Wrapper(torch.optim.Optimizer):
        """As Accelerate's: an optimizer by its class, without what an optimizer has."""

        def __init__(self, optimizer: torch.optim.Optimizer):
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.step()

    model = nn.Sequential(nn.Linear(64, 64), Square())
    optimizer = torch.optim.AdamW(model.parameters())
    with compopt.diagnose(model, Wrapper(Wrapper(optimizer)), start=1) as records:
        train(optimizer, model, 4)
    assert records.steps == 4


def test_mistakes_are_told_in_sentences():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="takes a model and its optimizer, in this order; got AdamW and Linear"):
        compopt.diagnose(optimizer, model)
    for name, value in (("steps", 3), ("start", 0), ("elements", 100), ("steps", 20.0), ("start", True)):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least"):
            compopt.diagnose(model, optimizer, **{name: value})
    with pytest.raises(ValueError, match="larger than start by 2"):
        compopt.diagnose(model, optimizer, steps=10)
    small = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="nothing to look at"):
        compopt.diagnose(small, torch.optim.AdamW(small.parameters()))
    with pytest.raises(RuntimeError, match="has seen 0 steps"), compopt.diagnose(model, optimizer):
        pass
    records = compopt.diagnose(model, optimizer, start=1)
    assert "0 steps seen" in str(records)
    with pytest.raises(RuntimeError, match="nothing to plot"):
        records.plot("seen.png")
    with records:
        train(optimizer, nn.Sequential(model, Square()), 4)
    with pytest.raises(RuntimeError, match="used before"), records:
        pass


def test_what_the_loop_raises_is_what_is_raised():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(KeyError), compopt.diagnose(model, optimizer):
        raise KeyError("the loop's own")
    assert not optimizer._optimizer_step_post_hooks
    assert copy.deepcopy(optimizer)  # nothing of ours is left in it
