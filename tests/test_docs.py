"""The pages for users and the source say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from unittest import mock

import torch

import compopt

ROOT = Path(compopt.__file__).parent
DOCS = ROOT.parent / "docs"
FILES = [*ROOT.glob("*.py"), *(ROOT / "integrations").glob("*.py")]
ELSEWHERE = {
    "_requests",
    "_masks",
    "_selection",
    "_projections",
    "_snapshot_files",  # what is wrong with a damaged file: quoted by a warning
    "advise",
    "probe",
}  # not what a user of an optimizer meets


TELLS = ("warn", "warn_once", "post_note", "raise_told", "raise_problems")


def texts(node: ast.AST) -> str:
    """Its fixed words; what stands on both sides of a value is no phrase that is printed."""
    return "\0".join(str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def messages(path: Path) -> list[str]:
    """The fixed words of every error and warning in a file."""
    results = []
    nodes = list(ast.walk(ast.parse(path.read_text())))
    raised = {node.exc for node in nodes if isinstance(node, ast.Raise)}
    for node in nodes:
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if node in raised or name in TELLS or name.endswith("Error"):
            results += [texts(arg) for arg in node.args[name == "warn_once" :]]  # its first is a key
    return [message for message in results if message]


def quoted() -> list[str]:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    return [words for row in rows for words in re.findall(r"`([^`]+)`", row)]


def test_every_message_in_the_troubleshooting_page_exists():
    everything = " ".join(message for path in ROOT.rglob("*.py") for message in messages(path))
    assert [words for words in quoted() if words not in everything] == []


def test_every_error_is_in_the_troubleshooting_page():
    known = [*quoted(), "is not a request a communicator can answer", "needs Hugging Face's transformers"]
    known += ["has no attribute"]  # Python's own words, of a module that loads its submodules lazily
    known.append("compopt.integrations.lightning needs Lightning")
    known.append("fragments or steps ")  # quoted by another error
    for path in FILES:
        if path.stem not in ELSEWHERE:
            unknown = [message for message in messages(path) if not any(words in message for words in known)]
            assert unknown == [], path.name


def test_every_page_opens_with_what_to_type():
    for page in DOCS.glob("*.md"):
        opening = page.read_text().splitlines()[:16]
        assert any(line.startswith(("```", "    ")) for line in opening), page.name


def test_every_page_is_on_the_index_with_what_it_is_for():
    rows = re.findall(r"^\| [^|]+ \| \[[^]]+\]\((\w+)\.md\) \|$", (DOCS / "index.md").read_text(), re.M)
    assert set(rows) == {page.stem for page in DOCS.glob("*.md")} - {"index"}


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and MyST make them; docutils makes the same from headings of words."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_into_pages_lead_to_headings():
    pages = [DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    wrong = []
    for page in pages:
        for target, anchor in re.findall(r"\]\(([\w./]*)#([^)]+)\)", page.read_text()):
            if anchor not in anchors(page.parent / target if target else page):
                wrong.append(f"{page.name}: {target}#{anchor}")
    assert wrong == []


def test_pages_link_to_files_that_exist():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (DOCS / target).exists(), f"{page.name} links to {target}"
        for example in re.findall(r"`(examples/\w+\.py)`", page.read_text()):
            assert (DOCS.parent / example).exists(), f"{page.name} names {example}"


def test_the_lines_for_loggers_log_the_last_step(monkeypatch):
    monkeypatch.setenv("COMPOPT_QUIET", "1")
    section = (DOCS / "ddp.md").read_text().split("### W&B")[1]
    p = torch.nn.Parameter(torch.zeros(64, 80))
    optimizer = compopt.SeparateAdam([p], simulate=True)
    p.grad = torch.ones(64, 80)
    optimizer.step()
    names = {"optimizer": optimizer, "step": 7, "wandb": mock.Mock(), "writer": mock.Mock()}
    for code in re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S):
        exec(code, names)
    ((logged,), options) = names["wandb"].log.call_args
    scalars = {call.args[0]: call.args[1:] for call in names["writer"].add_scalar.call_args_list}
    assert options == {"step": 7} and "step" not in logged
    assert logged["bytes_sent"] > 0 and logged["run_share"] > 0 and logged["phase"] == "dense"
    assert scalars["compopt/bytes_sent"] == (logged["bytes_sent"], 7) and "compopt/phase" not in scalars
