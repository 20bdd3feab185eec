"""The keywords of all classes: one set with one meaning, and the table of them in docs/api.md."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import compopt
from compopt._engine.options import TorchOptions

API = Path(__file__).parents[2] / "docs" / "api.md"
FIRST = ("SeparateAdam", "Separate", "Average", "LocalSteps")
CLASSES = {name: getattr(compopt, name) for name in (*FIRST, "RadiusAdamW", "TagcAdamW", "ScapeAdamS", "AdamS")}
TORCHS = {"maximize", *inspect.signature(torch.optim.AdamW).parameters} | TorchOptions.__annotations__.keys()
# One set with one meaning. A class that lacks one says why in docs/api.md.
COMMON = ("payload_dtype", "residual_dtype", "max_grad_norm", "dense_steps", "process_group", "simulate")
LACKING = {
    "residual_dtype": {"ScapeAdamS"},
    "dense_steps": {"Average", "AdamS"},
}
OLD = ("warmup_steps", "every_warmup_steps", "density_warmup_steps", "sparsity", "total_steps")


def keywords(cls: type) -> dict[str, str]:
    """The keywords of a class beside torch's, with their defaults as text."""
    parameters = list(inspect.signature(cls).parameters.values())[1:]  # not what is wrapped, or the parameters
    ours = [p for p in parameters if p.name not in TORCHS and p.kind is not p.VAR_KEYWORD]
    return {p.name: repr(p.default).replace("'", '"') for p in ours}


def make_table() -> str:
    """As docs/api.md has it: a table of the keywords that classes share, first the set with one meaning; below it those
    of one or two classes, with one default.
    """
    defaults = {name: keywords(cls) for name, cls in CLASSES.items()}
    names = dict.fromkeys(name for row in defaults.values() for name in row)
    classes = {name: tuple(cls for cls, row in defaults.items() if name in row) for name in names}
    differing = {name for name in names if len({defaults[cls][name] for cls in classes[name]}) > 1}
    shared = [
        *COMMON,
        *(name for name in names if name not in COMMON and (len(classes[name]) > 2 or name in differing)),
    ]
    lines = [["keyword", *(f"`{name}`" for name in CLASSES)], ["---"] * (len(CLASSES) + 1)]
    lines += [[f"`{name}`", *(row.get(name, "") for row in defaults.values())] for name in shared]
    table = [re.sub(" +", " ", f"| {' | '.join(line)} |") for line in lines]
    others: dict[tuple[str, ...], list[str]] = {}
    for name in (name for name in names if name not in shared):
        others.setdefault(classes[name], []).append(f"`{name}={defaults[classes[name][0]][name]}`")
    rows = [f"- {', '.join(f'`{cls}`' for cls in of)}: {', '.join(words)}" for of, words in others.items()]
    return "\n".join([*table, "", "Keywords of one or two classes:", "", *rows, ""])


def test_the_table_in_the_reference_is_that_of_the_signatures():
    table = make_table()
    assert table in API.read_text(), f"write this into docs/api.md, and what has changed into CHANGELOG.md:\n{table}"


@pytest.mark.parametrize("name", COMMON)
def test_every_class_has_the_common_ones_or_says_why_not(name):
    assert {cls for cls in CLASSES if name not in keywords(CLASSES[cls])} == LACKING.get(name, set())
    for cls in LACKING.get(name, ()):
        assert re.search(rf"^- `{name}`:[^-]*{cls}", API.read_text(), re.M), (
            f"docs/api.md does not say why {cls} lacks it"
        )


@pytest.mark.parametrize("name", COMMON)
def test_the_common_ones_have_one_type(name):
    """But for what a default stands for ("auto"), and LocalSteps, whose start is no share of a run."""
    types = {
        str(inspect.signature(cls).parameters[name].annotation) for cls in CLASSES.values() if name in keywords(cls)
    }
    types = {text.replace(" | Literal['auto']", "") for text in types}
    assert types - {"int"} and len(types - {"int"}) == 1, types


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_no_old_name_is_taken(cls):
    p = torch.nn.Parameter(torch.zeros(64, 64))
    first = [p] if "lr" in inspect.signature(cls).parameters else torch.optim.SGD([p], lr=0.1)
    for name in OLD:
        with pytest.raises(TypeError, match=name):
            cls(first, **{name: 1})


def test_density_is_what_is_kept():
    for name in ("RadiusAdamW", "TagcAdamW", "ScapeAdamS"):
        optimizer = CLASSES[name]([torch.nn.Parameter(torch.zeros(64, 64))], density=1.0)
        assert optimizer.param_groups[0]["density"] == 1.0
        with pytest.raises(ValueError, match="density must be in"):
            CLASSES[name]([torch.nn.Parameter(torch.zeros(64, 64))], density=0.0)
