"""The pages for users and the source say the same; README.md is short, its links work; docs/launch.md runs."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import HANG_GUARD, free_port, run_ranks
from torch import nn

import compopt

ROOT = Path(compopt.__file__).parent
DOCS = ROOT.parent / "docs"
FILES = [*ROOT.glob("*.py"), *(ROOT / "integrations").glob("*.py")]
ELSEWHERE = {
    "_requests",
    "_masks",
    "_selection",
    "_projections",
    "_snapshot_files",  # what is wrong with a damaged file, or one that others may write: quoted by a warning
    "advise",
    "probe",
}  # not what a user of an optimizer meets


SAY_IT_ALL = [  # they name the argument or the call, and what to write instead: the page need not
    "torch.distributed is not initialized: every process trains",
    "TORCHFT_LIGHTHOUSE is not set",
    "cuts its state into shards, one a rank",
    "has cut its state into shards, of which this rank holds one",
    "torchft is not installed",
    "there was no quorum yet",
    "so there is no step after which all parameters are equal",
    "pass 0 <= rank < size",
    "but there is no group to reach other ranks by",
    "the ranks have changed since they were given",
    "delay needs a second process group of the same ranks",
    # what FaultTolerant repeats, and notes in its log
    "no answer within",
    "this replica group is not in the quorum",
    "the store at ",
    "another rank of this replica group could not reach its peers",
    "no quorum: ",
    "wraps another one, and both collect",
    "process group of this DistributedDataParallel was destroyed",
    "optimize_ddp = 'python_reducer'",
    "has a comm hook already",
    "belong to no compopt optimizer",
    "was replaced: an optimizer made later",
    "Snapshots are of whole replicas",
    "optimizers of compopt share a module that fully_shard wraps",
    "model holds no DistributedDataParallel",
    "selects by name, and these parameters have none",
    "without a name, which may be a hidden matrix",
    "return the rows of each matrix, which are",
    " in more than one group.",
    "params is empty: pass",
    "params must be named parameters or groups",
    "params must be in an order",
    "which have different shards of",
    "belongs to a FullyShardedDataParallel",
    "hook into FSDP2's all-gather",
    "is for parameters that FSDP2 gathers",
    "are not among those that FSDP2 shards over",
    "compares compressed steps with dense ones",
    "on the meta device",
    "params holds a complex ",
    "torch.distributed is not initialized",
    "process_group is a DeviceMesh",
    "process_group does not contain this rank",
    "when the optimizer was made: make the optimizer after",
    "the native backend reads",
    "base has optimizers that share",
    "cannot tell which of",
    "has cut its state into shards, and the parameters of a group have",
    "leave use_anchors() first",
    "outer must make an optimizer of torch",
    "and the process group has no backend for those",
    "had no gradient in this backward",
    "does not know a GradScaler's scale",
    "got a sparse gradient for",
    "lets the error of",
    "grow without end",
    "ranks differ in consolidate_state()",
    "of a running round and lacks parameter",
    "residuals but not the base optimizer's state",
    "cannot be pickled",
    "put CompoptCallback last in callbacks",
    "CompoptCallback needs an optimizer of compopt",
    "belongs to an optimizer that was deleted",
    "Snapshots are of one optimizer of compopt",
    "which a snapshot does not hold",
    "another run writes snapshots into",
    "had parameters that are not finite after step",
    "leave Join out, and call end_round() after",
    "use_muon chooses ",
    "rows are not so many matrices of equal size",
    "return the rows of each matrix, which are",
    " must be ",  # and what it is
    "its payload must be exact",
    "no snapshot in",
    "are of replicas of",
    "process_group of the optimizer has ranks",
    "averages by a comm hook of its own",
    "lets ranks end at different steps",
    "has to come before its optimizer in Join",
    " the parameters over the ranks",
    "before the optimizer sees it",
]
TELLS = (
    "warn",
    "warn_on_rank_0",
    "_warn_once",
    "warn_once",
    "warn_once_on_rank_0",
    "post_note",
    "raise_told",
    "raise_problems",
)


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
            results += [texts(arg) for arg in node.args[name.startswith("warn_once") :]]  # its first is a key
    return [message for message in results if message]


def quoted() -> list[str]:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    return [words for row in rows for words in re.findall(r"`([^`]+)`", row)]


def test_every_message_in_the_troubleshooting_page_exists():
    everything = " ".join(message for path in ROOT.rglob("*.py") for message in messages(path))
    assert [words for words in [*quoted(), *SAY_IT_ALL] if words not in everything] == []


def test_every_error_is_in_the_troubleshooting_page_or_says_it_all():
    known = [*quoted(), *SAY_IT_ALL, "needs Hugging Face's transformers"]
    known += ["has no attribute"]  # Python's own words, of a module that loads its submodules lazily
    known += ["compopt.integrations.lightning needs Lightning", "compopt.integrations.torchtitan needs torchtitan"]
    known += [
        "OptimizersContainer.Config needs make=",
        "OptimizersContainer saves no state of pipelines",
        "make= must return an optimizer",
        "shard_only cannot take the mesh",
    ]
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


REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
LAUNCH = (REPOSITORY / "docs" / "launch.md").read_text()
SETTINGS = (REPOSITORY / "docs" / "settings.md").read_text()
LINK = re.compile(r"\]\(([^)#]+)\)")


def script() -> str:
    (text,) = re.findall(r"## A complete `train.py`\n\n```python\n(.*?)```", LAUNCH, re.S)
    return text


def launches() -> list[str]:
    """The lines that start train.py: on one machine, on the first of two, on the second."""
    return re.findall(r"^    (.*torchrun .* train\.py)$", LAUNCH, re.M)


def start(line: str, folder: Path, text: str) -> subprocess.Popen:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    (folder / "train.py").write_text(text)
    return subprocess.Popen(["bash", "-c", line], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    try:
        output, _ = process.communicate(timeout=HANG_GUARD)
        assert process.returncode == 0, output
        return output
    finally:
        process.terminate()


def check(output: str) -> None:
    """It learned, and at the end sent little."""
    steps = re.findall(r"^(\d+) loss ([\d.]+), ([\d.]+)% of the bytes$", output, re.M)
    assert [int(step) for step, _, _ in steps] == [50, 100, 150, 200]
    assert float(steps[-1][1]) < 0.8 * float(steps[0][1]) and float(steps[-1][2]) < 20


@pytest.mark.slow
def test_the_command_for_one_machine_starts_two_ranks(tmp_path):
    """Those for two machines, below, train the script."""
    # One write a line: torchrun's ranks write unbuffered into the same pipe.
    text = 'import os; os.write(1, f\'{os.environ["RANK"]} {os.environ["WORLD_SIZE"]}\\n\'.encode())'
    output = finish(start(launches()[0], tmp_path, text))
    assert sorted(output.splitlines()) == ["0 2", "1 2"]


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_for_two_machines_train_on_this_one(tmp_path):
    here = {"10.0.0.1": "127.0.0.1", "eth0": "lo", "29500": str(free_port())}
    lines = [re.sub("|".join(map(re.escape, here)), lambda of: here[of[0]], line) for line in launches()[1:]]
    assert [re.findall(r"--node-rank (\d)", line) for line in lines] == [["0"], ["1"]]
    first, second = (start(line, tmp_path, script()) for line in lines)
    check(finish(first))
    assert finish(second) == ""


def test_the_readme_is_short_and_its_links_lead_somewhere():
    lines = README.splitlines()
    assert len(lines) <= 110 and max(len(line) for line in lines if not line.startswith(("|", "!"))) <= 100
    assert len(script().splitlines()) <= 25
    assert [target for target in LINK.findall(README) if not (REPOSITORY / target).exists()] == []


def test_the_readme_starts_two_sites_as_the_page_does():
    lines = re.findall(r"^    (GLOO.*torchrun .*\\\n.* train\.py)$", README, re.M)
    assert [re.sub(r"\s*\\\s*", " ", line) for line in lines] == launches()[1:]


def test_every_measured_figure_of_the_readme_is_next_to_a_link_to_its_table():
    """In its paragraph, its list item, or the paragraph behind its table."""
    blocks = re.split(r"\n\n(?!\|)|\n(?=- |\d\. )", re.sub(r"^(    .*|\| .* \|)$", "", README, flags=re.M))
    figures = [block for block in blocks if re.search(r"\d %|\d\.\d{3}|bytes per parameter|Mbit/s:", block)]
    assert len(figures) > 5
    assert [block for block in figures if "(bench/RESULTS.md#" not in block] == []


@pytest.mark.parametrize(
    ("address", "wanted"), [("", []), ("https://a.b/", ["https://a.b/docs/x.md", "https://a.b/p"])]
)
def test_a_package_index_shows_no_relative_link(address, wanted):
    described = runpy.run_path(str(REPOSITORY / "setup.py"))["described"]
    assert LINK.findall(described("[x](docs/x.md) and\n![p](p)\n", address)) == wanted
    assert all(target.startswith("http") for target in LINK.findall(described(README, address)))
    assert described("[kept](https://c.d)", address) == "[kept](https://c.d)"


def share(rank: int) -> float:
    """Of a dense step's bytes, for the four matrices of a GPT block of width 128."""
    sizes = [(128, 384), (128, 128), (128, 512), (512, 128)]
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = compopt.SeparateAdam(params, projection="tracked", rank=16, payload_dtype="int8", dense_steps=1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    assert optimizer.stats.phase == "projected"
    return optimizer.stats.bytes_sent / optimizer.stats.bytes_dense


def test_the_stated_share_of_bytes_is_what_is_counted():
    rows = dict(re.findall(r"^\| (128|768|4096) \| ([\d.]+) %", SETTINGS, re.M))
    assert len(rows) == 3
    for width, percent in rows.items():  # rank * (rows + columns) values of 1 + 4 / 128 bytes, of 4 * rows * columns
        by_formula = 100 * 16 * 16 * int(width) * (1 + 4 / 128) / (4 * 12 * int(width) ** 2)
        assert float(percent) == pytest.approx(by_formula, rel=0.04)
    counted = float(re.search(r"\(([\d.]+) % counted", SETTINGS)[1])
    assert [round(100 * of, 1) for of in run_ranks(share, 2)] == [counted, counted]
