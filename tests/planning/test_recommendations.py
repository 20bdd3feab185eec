"""README's table, docs/choosing.md and `compopt-advise` recommend the same class for the same training.

The conditions are read from the pages; the numbers that they speak of, waits and runs, are those that advise predicts.
`pytest -s` prints the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from compopt.costmodel import Advice, Workload, advise

ROOT = Path(__file__).parents[2]
README, CHOOSING = ((ROOT / name).read_text() for name in ("README.md", "docs/choosing.md"))

WAN = {"latency_s": 0.04}
CASES = {  # parameters or a workload, ranks, bit/s, seconds of computation, what else is known
    "350 M, 8 ranks, 100 Mbit/s": (350e6, 8, 1e8, 0.4, {}),
    "350 M, 8 ranks, 1 Gbit/s": (350e6, 8, 1e9, 0.4, {}),
    "350 M, 8 ranks, 1 Gbit/s, WAN": (350e6, 8, 1e9, 0.4, WAN),
    "350 M, 8 ranks, 400 Gbit/s": (350e6, 8, 4e11, 0.4, {}),
    "124 M, 2 ranks, 10 Mbit/s": (124e6, 2, 1e7, 0.9, {}),
    "124 M, 2 ranks, 100 Mbit/s": (124e6, 2, 1e8, 0.9, {}),
    "124 M, 2 ranks, 100 Mbit/s, WAN": (124e6, 2, 1e8, 0.9, WAN),
    "124 M, 2 ranks, 10 Gbit/s": (124e6, 2, 1e10, 0.9, {}),
    "124 M, 4 ranks, 1 Gbit/s, WAN": (124e6, 4, 1e9, 0.9, WAN),
    "124 M, 8 ranks, 1 Gbit/s, WAN": (124e6, 8, 1e9, 0.9, WAN),
    "124 M, 32 ranks, 1 Gbit/s, WAN": (124e6, 32, 1e9, 0.9, WAN),
    "10 M, 2 ranks, 10 Mbit/s": (10e6, 2, 1e7, 0.3, {}),
    "10 M, 2 CPUs, 100 Mbit/s": (10e6, 2, 1e8, 0.4, {"device": "cpu"}),
    "10 M, 4 ranks, 10 Gbit/s, WAN": (10e6, 4, 1e10, 0.3, WAN),
    "10 M, 2 CPUs, 1 Gbit/s": (10e6, 2, 1e9, 0.4, {"device": "cpu"}),
    "1 M, 4 ranks, 10 Mbit/s": (1e6, 4, 1e7, 0.05, {}),
    "1 M, 4 ranks, 100 Mbit/s": (1e6, 4, 1e8, 0.05, {}),
    "1 M, 8 ranks, 10 Mbit/s": (1e6, 8, 1e7, 0.05, {}),
    "1.5 B, 4 ranks, 25 Mbit/s, WAN": (1.5e9, 4, 2.5e7, 9.0, {**WAN, "memory_bytes": 2e11}),
    "1.5 B, 2 sites of 8, 1 Gbit/s a site": (1.5e9, 16, 1e9, 2.0, {"sites": 2}),
    "1.5 B, 2 sites of 8, 1 Gbit/s a site, WAN": (1.5e9, 16, 1e9, 2.0, {**WAN, "sites": 2}),
    "7 B, 2 sites of 8, 200 Mbit/s a site, WAN": (7e9, 16, 2e8, 4.0, {**WAN, "sites": 2, "device": "h100"}),
    "7 B, 8 machines of 8, 400 Gbit/s a rank": (7e9, 64, 4e11, 2.0, {"ranks_per_node": 8, "device": "h100"}),
    "3 B, 64 ranks, 1 Gbit/s": (3e9, 64, 1e9, 3.0, {"device": "h200"}),
    "LoRA 16 on 14 GB, 2 ranks, 100 Mbit/s": (Workload.of_adapters(40_000_000, 16, 14e9), 2, 1e8, 0.9, {}),
    "LoRA 16 on 14 GB, 2 ranks, 10 Gbit/s": (Workload.of_adapters(40_000_000, 16, 14e9), 2, 1e10, 0.9, {}),
    "LoRA 16 on 14 GB, 8 ranks, 1 Gbit/s": (Workload.of_adapters(40_000_000, 16, 14e9), 8, 1e9, 0.9, {}),
}

Facts = dict[str, float]  # "wait": share of DDP's step; seconds of runs by class; "sites" and "parameters"


def find_facts(advice: Advice) -> Facts:
    """The numbers that a reader of the pages would measure."""
    rows = {row.method.removesuffix(", offloaded").removesuffix(", residual in int8"): row for row in advice.rows}
    dense = rows["AdamW+DDP"]
    return {
        "wait": dense.step.exchange / dense.step.total,
        "DDP": dense.run_s,
        **{name: rows[name].run_s for name in ("SeparateAdam", "LocalSteps")},
        "sites": advice.situation.machine.nodes,
        "parameters": advice.situation.work.parameters,
    }


def read_limits(page: str) -> list[tuple[float, int]]:
    """Sizes from which local steps are recommended on so many ranks."""
    words = re.search(r"up to (\d+)\s+ranks \((\d+) from (\d+) M parameters on,\s+(\d+) from (\d+) B\)", page)
    few, more, millions, most, billions = map(int, words.groups())
    return [(0, few), (1e6 * millions, more), (1e9 * billions, most)]


def suits_local_steps(facts: Facts, page: str) -> bool:
    limit = max(ranks for size, ranks in read_limits(page) if facts["parameters"] >= size)
    return facts["sites"] <= limit and facts["LocalSteps"] * 1.25 <= facts["SeparateAdam"]


def is_no_faster(name: str, facts: Facts) -> bool:
    return facts["DDP"] < 1.05 * facts[name]


CONDITIONS: dict[str, Callable[[Facts, str], bool]] = {  # in the words of the pages
    "less than a fifth of the step": lambda facts, page: facts["wait"] < 0.2,
    "The wait is less than a fifth of the step": lambda facts, page: facts["wait"] < 0.2,
    "more": lambda facts, page: facts["wait"] >= 0.2,
    "It is more": lambda facts, page: facts["wait"] >= 0.2,
    "more, and a run with this one is 1.25 times as fast": lambda facts, page: (
        facts["wait"] >= 0.2 and suits_local_steps(facts, page)
    ),
    "A run with `LocalSteps` is 1.25 times as fast as that, or more": lambda facts, page: (
        facts["wait"] >= 0.2 and suits_local_steps(facts, page)
    ),
}


def apply_rules(rules: list[tuple[str, str]], facts: Facts, page: str) -> str:
    """The class of the last rule whose condition holds, unless a run with it is no faster."""
    name = [name for condition, name in rules if CONDITIONS[condition](facts, page)][-1]
    return "DDP" if name != "DDP" and is_no_faster(name, facts) else name


def find_name(text: str) -> str:
    return re.search(r"DDP|SeparateAdam|LocalSteps", text)[0]


def readme_says(facts: Facts) -> str:
    rows = re.findall(r"^\| ((?:less|more)[^|]*) \| ([^|]*) \|", README, re.M)
    assert len(rows) == 3 and "Keep DDP where a run is no faster" in " ".join(README.split())
    return apply_rules([(condition, find_name(use)) for condition, use in rows], facts, README)


def choosing_says(facts: Facts) -> str:
    rules = re.findall(r"^\d\. \*\*(.*?)\*\*[^:]*: (.*)$", CHOOSING, re.M)
    assert len(rules) == 4 and rules[-1][0] == "The run is no faster than with DDP"
    return apply_rules([(condition, find_name(use)) for condition, use in rules[:-1]], facts, CHOOSING)


def advise_says(advice: Advice) -> str:
    return "DDP" if advice.recommendation.startswith("Stay dense") else advice.method.split(",")[0]


@pytest.mark.parametrize("words", CASES)
def test_the_pages_and_the_command_recommend_the_same(words):
    model, ranks, link, seconds, more = CASES[words]
    model = model if isinstance(model, Workload) else round(model)
    advice = advise(model, ranks=ranks, link_bits_per_s=link, step_s=seconds, **more)
    facts = find_facts(advice)
    answers = readme_says(facts), choosing_says(facts), advise_says(advice)
    print(f"{words:<46}", *(f"{answer:<14}" for answer in answers))
    assert len(set(answers)) == 1, str(advice)


def test_every_class_is_recommended_somewhere():
    """Else the table above shows nothing."""
    answers = {
        advise_says(advise(m if isinstance(m, Workload) else round(m), ranks=n, link_bits_per_s=b, step_s=s, **more))
        for m, n, b, s, more in CASES.values()
    }
    assert answers == {"DDP", "SeparateAdam", "LocalSteps"} and len(CASES) >= 20


def test_ranks_of_a_site_share_its_link():
    model = dict(model=1_500_000_000, ranks=16, step_s=2.0, latency_s=0.03)
    sites = advise(**model, sites=2, link_bits_per_s=1e9)
    each = advise(**model, ranks_per_node=8, link_bits_per_s=1e9 / 8)
    assert [row.run_s for row in sites.rows] == [row.run_s for row in each.rows]
    assert "1 Gbit/s a machine or site, 125 Mbit/s a rank between machines (given)" in str(sites)
    assert "by HSDP as below (docs/hsdp.md), or by DDP, which sends 8 times the bytes" in sites.why
    assert 'mesh.get_group("replicate")' in sites.line
    apart = str(advise(**model, link_bits_per_s=1e9))
    assert "if some share one: --sites" in apart and "a machine or site" not in apart
    with pytest.raises(ValueError, match="sites must divide the 16 ranks; got 3"):
        advise(**model, sites=3, link_bits_per_s=1e9)
    with pytest.raises(ValueError, match="give one of them"):
        advise(**model, sites=2, ranks_per_node=8, link_bits_per_s=1e9)


def test_no_loss_of_adapters_is_claimed():
    why = advise(Workload.of_adapters(40_000_000, 16, 14e9), ranks=2, link_bits_per_s=1e8, step_s=0.9).why
    assert "No loss of LoRA was measured" in why and "its loss was" not in why.lower()
