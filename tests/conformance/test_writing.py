"""docs/writing.md says what the code says, and an optimizer that is somewhere forgotten is named in a sentence."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from randomk import RandomK, randomk
from table import CASES, DERIVED, FORMS, Case
from torch import nn

import compopt
from compopt._engine.optimizer import CompressedOptimizer

ROOT = Path(compopt.__file__).parents[1]
PAGE = (ROOT / "docs" / "writing.md").read_text()
EXAMPLE = (ROOT / "examples" / "randomk.py").read_text()
TWO_MOMENTS = {"exp_avg", "exp_avg_sq"}  # "AdamW's two moments"

for module in pkgutil.iter_modules(compopt.__path__):
    if not module.name.startswith("_"):
        importlib.import_module(f"compopt.{module.name}")


# What was forgotten of an optimizer: the list at the end of the page


def descendants(cls: type) -> set[type]:
    return {cls}.union(*(descendants(each) for each in cls.__subclasses__()))


def optimizers() -> list[type[torch.optim.Optimizer]]:
    """Of the package and of examples/; not what they share, which is in a private room, nor what tests define."""
    results = []
    for cls in descendants(CompressedOptimizer) | {compopt.MuonAdamW}:
        private = any(part.startswith("_") for part in cls.__module__.split("."))
        file = source_of(cls)
        has_own_folder = file.parent.name == file.stem
        if not private and (has_own_folder or file.parent in (ROOT / "compopt", ROOT / "examples")):
            results.append(cls)
    return sorted(results, key=lambda cls: cls.__name__)


def source_of(cls: type) -> Path:
    return Path(sys.modules[cls.__module__].__file__)


def read(*names: str) -> str:
    return "\n".join((ROOT / name).read_text() for name in names)


def forgotten(cls: type[torch.optim.Optimizer], table: Sequence[Case] = (*CASES, *FORMS, *DERIVED)) -> list[str]:
    """A sentence for every place in which a class is missing."""
    name, file = cls.__name__, source_of(cls)
    results = [*_in_its_file(cls)]
    if issubclass(cls, CompressedOptimizer):  # the table is of those that average gradients
        results += _in_the_table(cls, table)
    if not any((ROOT / "tests").rglob(f"test_{file.stem}.py")):
        results.append(f"{name} has no tests of its own: write tests/methods/test_{file.stem}.py, with an oracle")
    if file.parent == ROOT / "examples":
        if f"examples/{file.name}" not in read(*(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))):
            results.append(f"{name} is on no page: name examples/{file.name} in docs/")
        return results
    if name not in compopt.__all__:
        results.append(f"{name} is not public: import it in compopt/__init__.py and add it to __all__")
    places = {
        "docs/api.md": f"compopt.{name}",
        "docs/choosing.md": name,
        "README.md": f"`{name}",
        "CHANGELOG.md": f"`{name}",
    }
    results += [f"{name} is not in {place}" for place, words in places.items() if words not in read(place)]
    if not re.search(rf"{file.stem}(\.py|/)", read("CONTRIBUTING.md").split("## Layout")[1]):
        results.append(f"{name} is not in CONTRIBUTING.md's layout picture: add {file.name}")
    return results


def _in_its_file(cls: type[torch.optim.Optimizer]) -> list[str]:
    name, file, doc = cls.__name__, source_of(cls).name, cls.__doc__ or ""
    results = []
    if "::\n" not in (sys.modules[cls.__module__].__doc__ or ""):
        results.append(f"{file} does not open with the pseudo-code of {name}: a numbered block behind '::'")
    for part in ("Args", "State", "Raises"):
        if not re.search(rf"^ *{part}\b.*:", doc, re.MULTILINE):
            results.append(f"the docstring of {name} has no section {part}:")
    cited = [other for other in re.findall(r":class:`(?:compopt\.)?(\w+)`", doc) if other in compopt.__all__]
    others = " ".join(getattr(compopt, other).__doc__ for other in cited)
    for option in list(inspect.signature(cls.__init__).parameters)[1:]:
        if not re.search(rf"\b{option}\b", doc + others):
            results.append(f"the docstring of {name} says nothing of its argument {option}")
    return results


def _in_the_table(cls: type[CompressedOptimizer], table: Sequence[Case]) -> list[str]:
    name, cases = cls.__name__, [case for case in table if case.cls is cls]
    if not cases:
        return [f"{name} is in no line of tests/support/table.py: add one, and it takes the tests of conformance"]
    results, optimizer = [], cases[0].make([nn.Parameter(torch.zeros(64, 64))])
    for state in sorted(optimizer.state_layouts(torch.float32).keys() - TWO_MOMENTS):
        if f"``{state}``" not in cls.__doc__ and state not in cls.__doc__.split("State")[-1]:
            results.append(f"the docstring of {name} says nothing of its state {state!r}")
        if state == "residual" and state not in optimizer.rank_local_state:
            results.append(f"{name} keeps a residual that is not in rank_local_state: checkpoints would lose it")
    return results


@pytest.mark.parametrize("cls", optimizers(), ids=lambda cls: cls.__name__)
def test_nothing_is_forgotten_of_an_optimizer(cls):
    assert forgotten(cls) == []


def test_all_optimizers_are_looked_at():
    public = [getattr(compopt, name) for name in compopt.__all__ if inspect.isclass(getattr(compopt, name))]
    assert {cls for cls in public if issubclass(cls, torch.optim.Optimizer)} | {RandomK} <= set(optimizers())


def test_what_is_forgotten_is_named(monkeypatch):
    class Sloppy(RandomK):
        """Sends something, sometimes."""

    monkeypatch.setattr(Sloppy, "__module__", "compopt.radius")  # as if it stood there
    assert forgotten(Sloppy)[:4] == [
        "the docstring of Sloppy has no section Args:",
        "the docstring of Sloppy has no section State:",
        "the docstring of Sloppy has no section Raises:",
        "the docstring of Sloppy says nothing of its argument params",
    ]
    assert forgotten(Sloppy)[-6:] == [
        "Sloppy is in no line of tests/support/table.py: add one, and it takes the tests of conformance",
        "Sloppy is not public: import it in compopt/__init__.py and add it to __all__",
        "Sloppy is not in docs/api.md",
        "Sloppy is not in docs/choosing.md",
        "Sloppy is not in README.md",
        "Sloppy is not in CHANGELOG.md",
    ]


def test_a_residual_that_checkpoints_would_lose_is_named(monkeypatch):
    class Forgetful(RandomK):
        rank_local_state = ()

    Forgetful.__doc__ = RandomK.__doc__.replace("residual", "rest")
    monkeypatch.setattr(Forgetful, "__module__", "loose")
    monkeypatch.setitem(sys.modules, "loose", SimpleNamespace(__doc__="", __file__=str(ROOT / "examples/loose.py")))
    assert forgotten(Forgetful, [Case(Forgetful, {}, {}, torch.optim.AdamW)]) == [
        "loose.py does not open with the pseudo-code of Forgetful: a numbered block behind '::'",
        "the docstring of Forgetful says nothing of its state 'residual'",
        "Forgetful keeps a residual that is not in rank_local_state: checkpoints would lose it",
        "Forgetful has no tests of its own: write tests/methods/test_loose.py, with an oracle",
        "Forgetful is on no page: name examples/loose.py in docs/",
    ]


# The page


def test_the_pages_code_is_the_examples():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    assert [block for block in blocks if block not in EXAMPLE] == []


def test_the_pages_pseudo_code_is_the_examples():
    lines = re.findall(r"^    (\d  .*)", PAGE, re.MULTILINE)
    assert len(lines) == 6
    assert lines == re.findall(r"^    (\d  .*)", EXAMPLE, re.MULTILINE)


def test_the_code_cites_every_line_of_its_pseudo_code():
    cited = {number for numbers in re.findall(r"# line (\d)|[Ll]ine (\d)", EXAMPLE) for number in numbers if number}
    assert cited == set("123456")


def spans() -> list[str]:
    text = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", text)


def test_what_the_page_names_exists():
    files = [path for room in ("compopt", "examples", "tests") for path in (ROOT / room).rglob("*.py")]
    source = " ".join(path.read_text() for path in files if path != Path(__file__))
    words = {word for span in spans() if not re.search(r"/|\.md", span) for word in re.findall(r"[A-Za-z_]\w+", span)}
    assert sorted(word for word in words - {"NAME"} if not re.search(rf"\b{word}\b", source)) == []


def test_what_the_page_calls_can_be_called(monkeypatch):
    optimizer = RandomK([nn.Parameter(torch.zeros(64, 64))])
    p = optimizer.param_groups[0]["params"][0]
    p.grad, records = torch.ones(64, 64), {}

    def spied(bucket: object, reducer: object, update: object) -> object:
        records.update(bucket=bucket, ops=reducer.ops, optimizer=optimizer)
        return randomk(bucket, reducer, update)

    monkeypatch.setattr(f"{RandomK.__module__}.randomk", spied)
    optimizer.step()
    for owner, name in {pair for span in spans() for pair in re.findall(r"\b(bucket|ops|optimizer)\.(\w+)", span)}:
        assert hasattr(records[owner], name), f"{owner} has no {name}"
