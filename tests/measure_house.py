"""The house in numbers: how large and how dense the package's source is.

    python tests/measure_house.py                  # this tree, as it lies here
    python tests/measure_house.py --rev 2312011    # a commit beside it: this is the one before the rebuild
    python tests/measure_house.py --mypy           # with the errors of mypy --strict, a minute a tree

Counted are the Python files of compopt/ and kernels/. A line of code has a token that is not a
comment and not of a docstring; a token is what Python's own tokenizer makes of the source, an
f-string is one. Branches are counted in two ways: McCabe's complexity as ruff has it (C901), and
with every choice that is made inside a line as well: `x if c else y`, `and`, `or`, and a
comprehension's `for` and `if`. mypy reads all trees with this tree's settings.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
WIDE, LONG, BRANCHES = 100, 300, 12
GENERATORS = ("radius", "scape", "separate", "tagc")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
OPENS, CLOSES = (getattr(tokenize, name, -1) for name in ("FSTRING_START", "FSTRING_END"))  # Python 3.12
Span = tuple[int, int]  # first and last line


def sources(tree: Path, *folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (tree / folder).rglob("*.py"))


def docstrings(source: str) -> list[Span]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    results = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
            results.append((node.body[0].lineno, node.body[0].end_lineno))
    return results


def tokens(source: str) -> Iterator[Span]:
    """The lines of every token of code."""
    not_counted, depth = docstrings(source), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth -= token.type == CLOSES
        line, counts = token.start[0], depth == 0 and token.type not in {*NOT_CODE, CLOSES}
        if counts and not any(first <= line <= last for first, last in not_counted):
            yield line, token.end[0]
        depth += token.type == OPENS


def density(source: str, within: Span | None = None) -> tuple[int, int]:
    """Lines of code, and tokens on them."""
    first, last = within or (1, len(source.splitlines()))
    results = [span for span in tokens(source) if first <= span[0] <= last]
    return len({line for a, b in results for line in range(a, b + 1)}), len(results)


def generator(tree: Path, name: str) -> str:
    """Of the paper's generator: lines of code, and tokens a line."""
    source = (tree / "compopt" / f"{name}.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            lines, count = density(source, (node.lineno, node.end_lineno))
            return f"{lines} lines, {count / lines:.1f} a line"
    return "none"


def complaints(tree: Path, *command: object) -> int:
    done = subprocess.run([str(word) for word in command], cwd=tree, capture_output=True, text=True, timeout=500)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{command[0]} failed in {tree}:\n{done.stdout}{done.stderr}")
    return sum(" C901 " in line or " error: " in line for line in done.stdout.splitlines())


def choices(node: ast.AST) -> int:
    """Of a function, without those in it."""
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    one = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.match_case)
    results = 0
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, inner):
            results += isinstance(child, one) + choices(child)
            results += len(child.values) - 1 if isinstance(child, ast.BoolOp) else 0
            results += 1 + len(child.ifs) if isinstance(child, ast.comprehension) else 0
    return results


def branching(texts: list[str]) -> int:
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    return sum(isinstance(node, ast.FunctionDef) and choices(node) > BRANCHES for node in nodes)


def ruff(tree: Path) -> int:
    words = ["check", "--isolated", "--select", "C901", "--config", f"lint.mccabe.max-complexity={BRANCHES}"]
    return complaints(tree, BIN / "ruff", *words, "--ignore-noqa", "--output-format", "concise", "compopt", "kernels")


def mypy(tree: Path) -> int:
    with tempfile.TemporaryDirectory() as cache:
        words = ["--strict", "--config-file", ROOT / "pyproject.toml", "--cache-dir", cache, "compopt", "kernels"]
        return complaints(tree, sys.executable, "-m", "mypy", *words)


def measure(tree: Path, types: bool) -> dict[str, object]:
    """Return the counts, by name."""
    files = sources(tree, "compopt", "kernels")
    texts = [path.read_text() for path in files]
    lines = [line for text in texts for line in text.splitlines()]
    pairs = [density(text) for text in texts]
    code, count = (sum(pair[i] for pair in pairs) for i in (0, 1))
    long = [p for p in sources(tree, "compopt") if len(p.read_text().splitlines()) > LONG]
    results: dict[str, object] = {
        "files": len(files),
        "lines": len(lines),
        "lines of code": code,
        "tokens a line of code": f"{count / code:.1f}",
        f"lines over {WIDE} columns": sum(len(line) > WIDE for line in lines),
        "fmt: skip": sum("fmt: skip" in line for line in lines),
        f"files above {LONG} lines in compopt/": len(long),
        f"functions of complexity above {BRANCHES}": ruff(tree),
        f"functions with more than {BRANCHES} choices": branching(texts),
        "private modules at the top of compopt/": len(list((tree / "compopt").glob("_[!_]*.py"))),
    }
    if types:
        results["errors of mypy --strict"] = mypy(tree)
    return results | {f"{name}()": generator(tree, name) for name in GENERATORS}


def of_revision(rev: str, act: Callable[[Path], dict[str, object]]) -> dict[str, object]:
    packed = subprocess.run(["git", "archive", rev], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
        return act(Path(folder))


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--rev", action="append", default=[], help="a commit beside it; may be repeated")
    cli.add_argument("--mypy", action="store_true", help="count the errors of mypy --strict as well")
    args = cli.parse_args()
    columns = {rev: of_revision(rev, lambda tree: measure(tree, args.mypy)) for rev in args.rev}
    columns["here"] = measure(ROOT, args.mypy)
    print(f"{'':<42}" + "".join(f"{name:>26}" for name in columns))
    for what in next(iter(columns.values())):
        print(f"{what:<42}" + "".join(f"{results[what]!s:>26}" for results in columns.values()))


if __name__ == "__main__":
    main()
