"""Every command line of README, docs and docstrings, as it is written there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import HANG_GUARD

import compopt
from compopt.__main__ import main
from compopt.planning import advise_command

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "compopt/planning/advise_command.py",
]
OURS = r"(?:compopt-advise|python -m compopt)\b"
QUOTED, INDENTED = re.compile(rf"`({OURS}[^`]*)`"), re.compile(rf"^    ({OURS}.*)$", re.M)
TARGET = re.compile(r"(?:^    |`)make (\w+)", re.M)


def commands() -> list[str]:
    """Those of ours that say what to compute; a bare name in a sentence is none."""
    texts = [page.read_text() for page in PAGES]
    results = [" ".join(words.split()) for text in texts for of in (QUOTED, INDENTED) for words in of.findall(text)]
    return sorted({line for line in results if "--" in line})


def bash(line: str, folder: Path) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_GUARD
    )


def test_the_pages_name_commands():
    assert any(line.startswith("compopt-advise --parameters") for line in commands())


@pytest.mark.parametrize("line", [line for line in commands() if "--profile" not in line])
def test_it_runs(line, tmp_path, monkeypatch, capsys):
    """In this process; bash starts others below."""
    probed = {"ranks": 2, "link_bits_per_s": 1e8, "latency_s": 1e-4, "local": [1e10, 1e11]}
    (tmp_path / "probe.json").write_text(json.dumps(probed))  # as compopt.probe would
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)
    assert not {"|", "&&", ";", "&", ">"} & set(words), "needs a shell"
    if words[0] == "python":
        main(words[3:])
    else:
        advise_command.main(words[1:])
    assert ("Quantize" if "--pipeline" in line else "AdamW+DDP") in capsys.readouterr().out


def test_no_shell_has_a_command_of_this_name():
    """bash has a builtin `compopt`: a command of that name cannot be run."""
    assert bash("type -t compopt", ROOT).stdout.strip() == "builtin"
    assert bash("type -t compopt-advise", ROOT).stdout.strip() == "file"


def test_python_m_compopt_names_its_commands_and_version(tmp_path, capsys):
    assert bash("python -m compopt --version", tmp_path).stdout.strip() == f"compopt {compopt.__version__}"
    with pytest.raises(SystemExit):
        main(["advise", "--help"])
    assert "python -m compopt advise" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["advize"])
    assert ended.value.code == 2 and "invalid choice: 'advize'" in capsys.readouterr().err


@pytest.mark.parametrize("target", sorted({name for page in PAGES for name in TARGET.findall(page.read_text())}))
def test_make_has_every_target_that_is_named(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize("name", ["links", pytest.param("activations", marks=pytest.mark.slow)])
def test_a_page_shows_what_the_command_prints(name, tmp_path):
    page = (ROOT / f"docs/{name}.md").read_text()
    command = re.search(r"^    (compopt-advise .*)$", page, re.M)[1]
    printed = bash(command, tmp_path).stdout.strip().splitlines()
    assert len(printed) > 20
    first, *_, last = shown = ["    " + line if line else "" for line in printed]
    quoted = page[page.index(first) : page.index(last) + len(last)]
    for part in quoted.split("    ...\n"):  # lines that the page leaves out
        assert part.rstrip("\n") in "\n".join(shown)
