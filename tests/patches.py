"""The lists of deliberate faults, tests/mutants/*.txt, read.

An area's file holds blocks of lines, with a blank line between two. What a line is, its beginning says::

    # a remark
    > test_radius.py::test_conservation              a test, under tests/; in a block of its own: for all that follow
    compopt/radius.py: every rank keeps its own mask        the file, and what the patch breaks
    - flat = yield Broadcast(torch.cat(masks))       before: occurs once in the file, however it is broken into lines
    + flat = torch.cat(masks)                        after: none, one or many lines, indented from the first on
    = why this changes nothing that a user sees: the patch is then not tried
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "tests" / "mutants"


@dataclass
class Mutant:
    """One patch, and the tests that should see it."""

    area: str
    number: int
    file: str = ""
    breaks: str = ""
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    equivalent: str = ""

    def __str__(self) -> str:
        return f"{self.area} {self.number}: {self.breaks} ({self.file})"

    def patched(self, text: str) -> str | None:
        """The file with the fault; None where ``before`` does not occur exactly once."""
        results = list(re.finditer(pattern_of(" ".join(self.before)), text))
        if len(results) != 1:
            return None
        start = results[0].start()
        line = text.rfind("\n", 0, start) + 1
        indent = re.match(r"[ \t]*", text[line:]).group()
        return text[:start] + f"\n{indent}".join(self.after) + text[results[0].end() :]

    def find_misfit(self) -> str:
        """Return why the patch cannot be tried: it does not fit its file, changes nothing, or leaves no Python."""
        path = ROOT / self.file
        patched = self.patched(path.read_text()) if path.is_file() else None
        if patched is None:
            return "stale, what it replaces does not occur exactly once"
        if self.before == self.after:
            return "stale, it changes nothing"
        if path.suffix == ".py":
            try:
                compile(patched, self.file, "exec")
            except SyntaxError as error:
                return f"no Python, {error}"
        return ""

    def unknown_tests(self) -> list[str]:
        """Return the tests that are not there: a file, or a function in it."""
        return [test for test in self.tests if not is_there(test)]


def is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    path = ROOT / "tests" / file
    return path.is_file() and f"def {name.split('[')[0]}(" in path.read_text() if name else path.is_file()


def pattern_of(source: str) -> str:
    """A regular expression of this source however it is broken into lines, with or without a last comma."""
    pattern, before = "", ""
    for token in re.findall(r"\w+|[^\w\s]", source):
        between = r"\s+" if before[-1:].isalnum() and token[0].isalnum() else r"\s*"
        comma = r"(?:,\s*)?" if token in ")]}" and before != "," else ""
        pattern += (between if before else "") + comma + re.escape(token)
        before = token
    return pattern


def read(path: Path) -> list[Mutant]:
    """The mutants of one area."""
    mutants: list[Mutant] = []
    tests: list[str] = []
    for block in re.split(r"\n\s*\n", path.read_text()):
        lines = [line for line in block.splitlines() if line.strip() and not line.startswith("#")]
        if not lines:
            continue
        if all(line.startswith("> ") for line in lines):
            tests = [line[2:] for line in lines]
            continue
        mutant = Mutant(path.stem, len(mutants) + 1)
        for line in lines:
            mark, rest = line[:2], line[2:]
            if line[:1] in "-+>=" and line[1:2] in ("", " "):
                {"-": mutant.before, "+": mutant.after, ">": mutant.tests}.get(line[0], []).append(rest)
                mutant.equivalent += rest if mark == "= " else ""
            else:
                mutant.file, _, mutant.breaks = (part.strip() for part in line.partition(": "))
        mutant.tests = mutant.tests or tests
        mutants.append(mutant)
    return mutants
