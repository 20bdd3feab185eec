"""Check that this tree computes, keeps and sends the same as another commit's, to the bit.

    python tests/check_same_bits.py [--rev REV] [--only PATTERN] [-j N] [--ignore WHAT]

The same cases run in processes of their own, once on the package and the simulated ranks of REV,
once on those of this tree as it lies here. They are compared on one machine and not with stored
digests, because matrix products differ between processors. Every class, backend, number format
and number of ranks is a case; see ``bits_cases.py``. For each that differs a line says in what and from
which step on:

    parameters   of all ranks, after every step
    messages     what all ranks handed to collectives, up to and in a step; before int8 rounding
    bytes        what ``stats`` says was sent
    phase, norm  as in ``stats``
    others       an entry of the state dict: at the checkpoint, at the end, in some cases always

A message also holds a checksum of the options: where options come or go, ``--ignore messages``.
COMPOPT_NATIVE_ISA applies to both trees. Exit status: 0 all equal, 1 something differs or raised.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "support"))
from bits_cases import chosen

ROOT = Path(__file__).parents[1]
CASES, RUN = (ROOT / "tests/support" / name for name in ("bits_cases.py", "bits_run.py"))
BEFORE = "23120117715f113b801005a3b9768bcecb8d60ce"  # the last commit before the house was rebuilt


def differences(before: dict[str, dict], after: dict[str, dict], ignored: set[str]) -> list[str]:
    """In what two runs of a case differ, and from which step on."""
    outcomes = []
    for what in [*before, *(name for name in after if name not in before)]:
        a, b = before.get(what, {}), after.get(what, {})
        steps = [t for t in sorted({*a, *b}, key=int) if a.get(t) != b.get(t)]
        if steps and what not in ignored:
            outcomes.append(f"{what} from step {int(steps[0]) + 1}{shown(a, b, steps[0])}")
    return outcomes


def shown(before: dict, after: dict, step: Any) -> str:
    """Return the part that is short enough to be read."""
    pair = [side.get(step, "nothing") for side in (before, after)]
    digest = re.compile("[0-9a-f]{40}$")
    return "" if any(map(digest.match, pair)) else f" ({pair[0]}, now {pair[1]})"


def unpack(revision: str, folder: Path) -> None:
    words = ["git", "-C", str(ROOT), "archive", "--format=tar", revision]
    packed = subprocess.run(words, capture_output=True)
    if packed.returncode:
        raise SystemExit(f"git archive {revision} failed: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as file:
        file.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    if (script := folder / "kernels/native/build_passes.py").exists():  # older commits compile at the first step
        subprocess.run([sys.executable, script], check=True)


def prepare(tree: Path, folder: Path) -> Path:
    """A folder from which Python finds that tree's packages first; the cases of this one in it, as a script."""
    folder.mkdir()
    for name in ("compopt", "tests"):
        (folder / name).symlink_to(tree / name)
    if (tree / "kernels").exists():
        (folder / "compopt_kernels").symlink_to(tree / "kernels")
    shutil.copy(CASES, folder)
    return Path(shutil.copy(RUN, folder))


def run_tree(script: Path, pattern: str, part: int, parts: int) -> dict[str, dict]:
    """Return what each case gave, by name. A process that died says so in the case that it was in."""
    env = dict(os.environ, TRITON_INTERPRET="1")
    words = [sys.executable, "-W", "ignore", str(script), f"{part}/{parts}", pattern]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    lines = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    if done.returncode:
        left = [case.name for case in chosen(pattern)[part::parts] if case.name not in lines]
        died = f"the process ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        lines |= {name: {"raised": died} for name in left}
    return lines


def run_both(revision: str, pattern: str, jobs: int, folder: Path) -> list[dict[str, dict]]:
    """The cases' results in the commit's tree, and in this one."""
    old = folder / "tree"
    unpack(revision, old)
    scripts = [prepare(old, folder / "before"), prepare(ROOT, folder / "after")]
    with ThreadPoolExecutor(jobs) as pool:
        futures = [[pool.submit(run_tree, script, pattern, part, jobs) for part in range(jobs)] for script in scripts]
        results = []
        for side, parts in zip((revision[:12], "this tree"), futures, strict=True):
            lines = {name: line for one in parts for name, line in one.result().items()}
            seconds = sum(line.get("seconds", 0) for line in lines.values())
            print(f"{side}: {len(lines)} cases, {seconds:.0f} s of a processor", flush=True)
            results.append(lines)
    return results


def compare(before: dict[str, dict], after: dict[str, dict], ignored: set[str]) -> int:
    """Print a line a case that differs, and the count. How many differ."""
    counts: Counter[str] = Counter()
    for name, a in before.items():
        b = after[name]
        why = compare_answers(a, b, ignored)
        if "absent" in a and "absent" in b:
            counts["not run"] += 1
        elif why:
            counts["differ"] += 1
            print(f"{name}: {why}")
        else:
            counts["equal"] += 1
    for why in sorted({line["absent"] for line in before.values() if "absent" in line}):
        print(f"not run: {why}")
    print(", ".join(f"{counts[word]} {word}" for word in ("equal", "differ", "not run")))
    raised = {line.get("raised", "") for line in [*before.values(), *after.values()]}
    for text in sorted(raised - {""})[:3]:
        print(text)
    return counts["differ"]


def compare_answers(a: dict[str, Any], b: dict[str, Any], ignored: set[str]) -> str:
    for side, line in ("before", a), ("now", b):
        if "raised" in line:
            return f"{side} it raised {line['raised'].splitlines()[-1]}"
    if ("absent" in a) != ("absent" in b):
        return f"only one tree has the backend: {a.get('absent') or b.get('absent')}"
    if "absent" in a:
        return ""
    return ", ".join(differences(a["found"], b["found"], ignored))


def phases(lines: dict[str, dict]) -> str:
    """Which phases the cases went through: so that nobody believes in what did not happen."""
    records = {
        phase
        for line in lines.values()
        for words in line.get("found", {}).get("phase", {}).values()
        for phase in re.findall(r"'([a-z+]+)'", words)
    }
    return "phases seen: " + ", ".join(sorted(records))


def main() -> int:
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rev", default=BEFORE, help="the commit to compare with")
    parser.add_argument("--only", default="", help="cases whose name this expression matches")
    parser.add_argument("-j", type=int, default=1, help="processes at a time")
    parser.add_argument("--ignore", action="append", default=[], help="what may differ")
    parser.add_argument("--list", action="store_true", help="name the cases")
    asked = parser.parse_args()
    if asked.list:
        print(*(case.name for case in chosen(asked.only)), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        before, after = run_both(asked.rev, asked.only, asked.j, Path(folder).resolve())
    print(phases(after))
    return 1 if compare(before, after, set(asked.ignore)) or not before else 0


if __name__ == "__main__":
    sys.exit(main())
