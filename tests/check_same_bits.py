"""Whether this tree computes, keeps and sends the same as another commit's, to the bit.

    python tests/check_same_bits.py [--rev REV] [--only PATTERN] [-j N] [--ignore WHAT]

The same cases run in processes of their own, once on the package and the simulated ranks of REV,
once on those of this tree as it lies here. They are compared on one machine and not with stored
digests, because matrix products differ between processors. Every class, back end, number format
and number of ranks is a case; see ``cases``. For each that differs a line says in what and from
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
import functools
import hashlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
BEFORE = "23120117715f113b801005a3b9768bcecb8d60ce"  # the last commit before the house was rebuilt

# The cases. Names of compopt's classes are text here: the script's own process imports neither tree.

Shapes = dict[str, tuple[int, ...]]

# Beside what the code counts in: 4,096 elements to be compressed, 16,384 for a threshold, 2**17 for
# threads. A group of its own makes a second bucket.
SMALL: Shapes = {
    "one": (1,),
    "below.weight": (63, 65),
    "just.weight": (64, 64),
    "odd.weight": (17, 241),
    "deep.weight": (66, 7, 9),
    "turned.weight": (61, 70),  # not contiguous, see ``turned``
    "bias": (33,),
}
LARGE: Shapes = SMALL | {"table.weight": (280, 250)}
TOLD: Shapes = {"told.weight": (96, 33), "vector": (4095,)}  # to be compressed
LONG: Shapes = TOLD | {"long": (131_073,)}
# Of what is projected the matrices grow with the longest side.
PROJECTED: Shapes = {"told.weight": (96, 33)}
PROJECTED_LARGE: Shapes = PROJECTED | {"square.weight": (363, 361)}
# In Triton's interpreter every 1024 elements count.
TINY: list[Shapes] = [{"one": (1,), "bias": (33,)}, {"told.weight": (9, 131)}]


@dataclass(frozen=True)
class Form:
    """A class with options that show all it does within some steps."""

    cls: str
    options: dict[str, Any]
    says: str = ""
    base: str = ""  # of Separate: the optimizer that it wraps
    payloads: tuple[str, ...] = ("int8", "bfloat16")

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.cls, self.says]))

    @property
    def projects(self) -> bool:
        return self.cls.startswith("Separate")


RADIUS = dict(density=0.3, interval=4, warmup_steps=3)
SCAPE = dict(density=0.05, warmup_steps=2, density_warmup_steps=5)
PROJECT = dict(ratio=8, warmup_steps=2, reset_interval=8)
TAGC = dict(sparsity=0.9, warmup_steps=2)

FORMS = [
    Form("RadiusAdamW", RADIUS),
    Form("RadiusAdamW", RADIUS | dict(offload="residual", residual_scale=0.5), "offloaded"),
    Form("ScapeAdamS", SCAPE, "delayed"),
    Form("ScapeAdamS", SCAPE | dict(mask_delay=0, selection="exact"), "at once"),
    Form("ScapeAdamS", SCAPE | dict(offload="residual"), "offloaded"),
    Form("ScapeAdamS", SCAPE | dict(offload="all", mask_delay=0), "all offloaded"),
    Form("ScapeAdamS", SCAPE | dict(sharded=True), "sharded", payloads=("bfloat16",)),
    Form(
        "ScapeAdamS",
        SCAPE | dict(sharded=True, mask_delay=0, selection="exact"),
        "sharded at once",
        payloads=("bfloat16",),
    ),
    Form("AdamS", {}, payloads=()),
    Form("Separate", PROJECT, "over SGD", base="SGD"),
    Form("Separate", PROJECT | dict(projection="orthonormal"), "over AdamW", base="AdamW"),
    Form("Separate", PROJECT | dict(projection="tracked", rank=3), "over AdamS", base="AdamS"),
    Form("SeparateAdam", PROJECT, "gaussian"),
    Form(
        "SeparateAdam",
        PROJECT | dict(projection="orthonormal", ef_beta=0.5, clip="reconstructed"),
        "orthonormal",
    ),
    Form("SeparateAdam", PROJECT | dict(projection="tracked", rank=3), "tracked"),
    Form("SeparateAdam", PROJECT | dict(adaptive=True, adapt_interval=5, ef_beta=0.9), "adaptive"),
    Form("TagcAdamW", TAGC, "compact", payloads=("bfloat16",)),
    Form("TagcAdamW", TAGC | dict(codec="sketch", sketch_ratio=4), "sketch", payloads=("bfloat16",)),
]


@dataclass(frozen=True)
class Case:
    form: Form
    backend: str
    precision: str  # "float32", "bfloat16", or a payload narrower than float32 parameters
    ranks: int
    groups: list[Shapes]
    steps: int = 30

    @property
    def name(self) -> str:
        return f"{self.form.name}, {self.backend}, {self.precision}, {self.ranks} ranks"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

    @property
    def payload(self) -> torch.dtype | None:
        return getattr(torch, self.precision.removeprefix("payload "), None) if self.sends else None

    @property
    def sends(self) -> bool:
        return self.precision.startswith("payload")

    # What happens to it besides

    @property
    def clips(self) -> bool:
        return self.form.cls != "AdamS" and (self.ranks == 2 or self.sends)

    @property
    def maximizes(self) -> bool:
        return self.ranks == 3 and not self.form.base

    @property
    def overlaps(self) -> bool:
        """Buckets start in backward, as DistributedDataParallel's hook lets them."""
        return self.ranks > 1 and not self.sends

    @property
    def looks(self) -> bool:
        """The state dict is read after every step, which makes the state what it means."""
        return self.ranks == 1 and not self.sends

    @property
    def own_checkpoints(self) -> bool:
        """Each rank loads what it saved itself, not consolidated."""
        return self.ranks == 1 or (self.ranks == 2 and self.precision == "payload bfloat16")

    @property
    def ranks_after(self) -> int:
        """Ranks that go on from the checkpoint."""
        return 2 if self.ranks == 3 else self.ranks


def cases() -> list[Case]:
    """Every form on every back end in every precision, at 1, 2 and 3 ranks.

    Less of what is slow: Triton's interpreter takes a hundred times as long as anything else.
    """
    return [
        Case(form, backend, precision, ranks, groups_for(form, precision, ranks))
        for form in FORMS
        for backend in ("torch", "native")
        for precision in precisions(form)
        for ranks in ((2,) if precision == "payload bfloat16" else (1, 2, 3))
    ] + [
        Case(form, "triton", precision, 2, TINY, steps=10)
        for form in FORMS
        for precision in precisions(form)
        if precision != "payload bfloat16"
    ]


def precisions(form: Form) -> list[str]:
    return ["float32", "bfloat16", *(f"payload {name}" for name in form.payloads)]


def groups_for(form: Form, precision: str, ranks: int) -> list[Shapes]:
    if ranks != 2 or precision == "payload bfloat16":
        return [SMALL, PROJECTED if form.projects else TOLD]
    if form.projects:
        return [LARGE, PROJECTED_LARGE]
    return [LARGE, LONG if precision == "float32" else TOLD]


# Digests


class Digests:
    """What a run looked like: of every kind of thing a digest a step."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, str]] = {}

    def note(self, what: str, step: int, values: list[Any]) -> None:
        code = hashlib.sha1()
        for value in values:
            update(code, value)
        self.of.setdefault(what, {})[step] = code.hexdigest()

    def say(self, what: str, step: int, values: list[Any]) -> None:
        """A value a rank as it is: short, and of use to whoever reads the report."""
        alike = all(value == values[0] for value in values)
        self.of.setdefault(what, {})[step] = repr(values[0] if alike else values)


def update(code: Any, value: Any) -> None:
    """Take a tensor's bits, or the text of anything else."""
    if not isinstance(value, Tensor):
        code.update(repr(value).encode())
        return
    flat = value.detach().contiguous().reshape(-1)
    code.update(f"{value.dtype}{tuple(value.shape)}".encode())
    code.update(flat.view(torch.uint8).numpy())


# One case, on the tree whose compopt and sim are imported


class Run:
    """Simulated ranks that train on noise; tensors without a gradient, an inf, a checkpoint."""

    def __init__(self, case: Case):
        self.case, self.found = case, Digests()
        names = [list(shapes) for shapes in case.groups]
        self.names = [name for group in names for name in group]
        self.begin(case.ranks, start(case))

    def begin(self, ranks: int, values: list[Tensor]) -> None:
        from sim import World

        self.world = World(ranks)
        self.world.record = True
        self.params = [self.own(values) for _ in range(ranks)]
        pairs = zip(self.params, self.world.comms, strict=True)
        self.optimizers = [make(self.case, self.grouped(own), comm) for own, comm in pairs]

    def own(self, values: list[Tensor]) -> list[nn.Parameter]:
        named = zip(self.names, values, strict=True)
        return [nn.Parameter(turned(name, value.clone())) for name, value in named]

    def grouped(self, params: list[nn.Parameter]) -> list[dict[str, Any]]:
        named = iter(zip(self.names, params, strict=True))
        groups = [[next(named) for _ in shapes] for shapes in self.case.groups]
        first, *rest = groups
        return [{"params": first}, *({"params": own, "compress": True} for own in rest)]

    def all(self) -> dict[str, dict[int, str]]:
        """Train to the end; the digests."""
        case = self.case
        for t in range(case.steps):
            if t == case.steps // 2:
                self.go_on_from_a_checkpoint(t)
            self.set_options(t)
            self.backward(t)
            self.world.step(self.optimizers)
            self.look(t)
        self.look_at_state(case.steps - 1)
        return self.found.of

    def set_options(self, t: int) -> None:
        """Learning rates fall, and near the end the dense start is taken up again."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (1 - t / (2 * self.case.steps))
                if t == self.case.steps * 4 // 5 and "warmup_steps" in group:
                    group["warmup_steps"] = group["step"] + 2

    def backward(self, t: int) -> None:
        case, ranks = self.case, self.world.size
        for rank, own in enumerate(self.params):
            for n, (p, name) in enumerate(zip(own, self.names, strict=True)):
                g = gradient(name, tuple(p.shape), n, rank, t).to(p.dtype, copy=True)
                g = turned(name, g) if t % 2 else g
                if t == case.steps * 3 // 8 and rank == ranks - 1 and n == 1:
                    g.view(-1)[-1] = float("inf")
                p.grad = None if absent(n, rank, ranks, t) else g
        if case.overlaps:
            self.start_in_backward()
        if t == case.steps * 2 // 3:
            # stale: what has been sent early goes out again, and nothing is sent early from then on
            for p in self.params[-1]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    def start_in_backward(self) -> None:
        """What the integrations call when gradients are ready."""
        for own, optimizer in zip(self.params, self.optimizers, strict=True):
            optimizer.gradients_ready(reversed(own))
            optimizer.backward_done()

    def look(self, t: int) -> None:
        stats = [optimizer.stats for optimizer in self.optimizers]
        self.found.note("parameters", t, [p for own in self.params for p in own])
        self.found.note("messages", t, [tensor for _, sent in self.world.log for tensor in sent])
        self.world.log.clear()
        sent = [(s.bytes_sent, s.bytes_dense, s.parameter_bytes) for s in stats]
        done = [(s.step, s.phase, s.skipped, s.early_buckets, s.resent) for s in stats]
        self.found.say("bytes", t, sent)
        self.found.say("phase", t, done)
        self.found.say("norm", t, [s.grad_norm for s in stats])
        if self.case.looks:
            self.look_at_state(t)

    def look_at_state(self, t: int) -> None:
        """Everything in the state dicts of all ranks, a digest a name."""
        entries: dict[str, list[Any]] = {}
        for optimizer in self.optimizers:
            for name, value in entries_of(optimizer.state_dict()):
                entries.setdefault(name, []).append(value)
        for name, values in entries.items():
            self.found.note(name, t, values)

    def go_on_from_a_checkpoint(self, t: int) -> None:
        own = self.case.own_checkpoints
        if not own:
            self.world.consolidate(self.optimizers)
        self.look_at_state(t)
        saved = [through_a_file(optimizer.state_dict()) for optimizer in self.optimizers]
        self.begin(self.case.ranks_after, [p.detach() for p in self.params[0]])
        for rank, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(saved[rank if own else 0])


def start(case: Case) -> list[Tensor]:
    """Where all ranks begin."""
    shapes = [shape for group in case.groups for shape in group.values()]
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=draw).to(case.dtype) for shape in shapes]


def make(case: Case, groups: list[dict[str, Any]], comm: object) -> torch.optim.Optimizer:
    import compopt

    form, options = case.form, dict(case.form.options, process_group=comm)
    if case.payload is not None:
        options["payload_dtype"] = case.payload
    if case.clips:
        options["max_grad_norm"] = 6.0
    if case.maximizes:
        options["maximize"] = True
    if not form.base:
        return getattr(compopt, form.cls)(groups, lr=1e-2, **options)
    of_base = dict(momentum=0.9) if form.base == "SGD" else {}
    module = compopt if hasattr(compopt, form.base) else torch.optim
    base = getattr(module, form.base)(groups, lr=1e-2, **of_base)
    return getattr(compopt, form.cls)(base, **options)


@functools.lru_cache(maxsize=4096)
def gradient(name: str, shape: tuple[int, ...], n: int, rank: int, t: int) -> Tensor:
    """Noise that ranks have partly in common; of a norm around 1 a tensor, every sixth step of 8."""
    common = torch.Generator().manual_seed(100 * t + n)
    own = torch.Generator().manual_seed(1_000_000 * (rank + 1) + 100 * t + n)
    x = torch.randn(shape, generator=common) + 0.5 * torch.randn(shape, generator=own)
    scale = 2.0 ** (n % 3 - 1) * (8 if t % 6 == 4 else 1)
    return x.mul_(scale / x.numel() ** 0.5)


def turned(name: str, value: Tensor) -> Tensor:
    """The same numbers; those of some tensors lie column by column."""
    return value.t().contiguous().t() if name.startswith("turned") else value


def absent(n: int, rank: int, ranks: int, t: int) -> bool:
    """The third tensor on one rank at times, the fourth on all; the last never in the beginning."""
    on_one = n == 2 and t % 7 == 3 and rank == t % ranks
    on_all = n == 3 and t % 9 == 5
    late = n == 5 and t < 8 and rank == 0
    return on_one or on_all or late


def entries_of(saved: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for number in sorted(saved["state"]):
        for name, value in sorted(saved["state"][number].items()):
            yield prefix + name, value
    for group in saved.get("param_groups", []):
        said = [group.get(name) for name in ("step", "lr", "residuals", "class", "format")]
        yield prefix + "groups", said
    if "base" in saved:
        yield from entries_of(saved["base"], "base's ")


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(case: Case) -> dict[str, dict[int, str]]:
    """The digests of a case, on the tree whose compopt and sim are found."""
    torch.manual_seed(0)
    with mock.patch.dict(os.environ, COMPOPT_BACKEND=case.backend):
        return Run(case).all()


def why_not(backend: str) -> str:
    """Why the back end cannot run here; nothing where it can."""
    import compopt

    with mock.patch.dict(os.environ, COMPOPT_BACKEND=backend):
        try:
            compopt.AdamS([nn.Parameter(torch.zeros(1))])
        except RuntimeError as error:
            return str(error)
    return ""


# Both trees, and what differs


def work(pattern: str, part: int, parts: int) -> None:
    """A process on one tree: a line of JSON a case."""
    here = Path(__file__).parent  # beside it are links to one tree's packages and tests
    sys.path[:0] = [str(here), str(here / "tests")]
    sys.meta_path.insert(0, PathFinder)  # before that of an editable installation
    for module in map(importlib.import_module, ("compopt", "sim")):
        assert Path(module.__file__).is_relative_to(here), f"{module.__file__} is not in {here}"
    torch.set_num_threads(1)
    reasons: dict[str, str] = {}
    for case in chosen(pattern)[part::parts]:
        if case.backend not in reasons:
            reasons[case.backend] = why_not(case.backend)
        line: dict[str, Any] = {"name": case.name}
        began = time.process_time()
        if reasons[case.backend]:
            line["absent"] = reasons[case.backend]
        else:
            line |= run_or_say_why(case)
        line["seconds"] = time.process_time() - began
        print(json.dumps(line), flush=True)


def run_or_say_why(case: Case) -> dict[str, Any]:
    try:
        return {"found": run(case)}
    except Exception:
        return {"raised": traceback.format_exc()}


def chosen(pattern: str) -> list[Case]:
    return [case for case in cases() if re.search(pattern, case.name)]


def differences(before: dict[str, dict], after: dict[str, dict], ignored: set[str]) -> list[str]:
    """In what two runs of a case differ, and from which step on."""
    found = []
    for what in [*before, *(name for name in after if name not in before)]:
        a, b = before.get(what, {}), after.get(what, {})
        steps = [t for t in sorted({*a, *b}, key=int) if a.get(t) != b.get(t)]
        if steps and what not in ignored:
            found.append(f"{what} from step {int(steps[0]) + 1}{shown(a, b, steps[0])}")
    return found


def shown(before: dict, after: dict, step: Any) -> str:
    """What is short enough to be read."""
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


def prepare(tree: Path, folder: Path) -> Path:
    """A folder from which Python finds that tree's packages first; this script in it."""
    folder.mkdir()
    for name in ("compopt", "tests"):
        (folder / name).symlink_to(tree / name)
    if (tree / "kernels").exists():
        (folder / "compopt_kernels").symlink_to(tree / "kernels")
    return Path(shutil.copy(__file__, folder))


def run_tree(script: Path, pattern: str, part: int, parts: int) -> dict[str, dict]:
    """What each case gave, by name. A process that died says so in the case that it was in."""
    env = dict(os.environ, TRITON_INTERPRET="1")
    words = [sys.executable, "-W", "ignore", str(script)]
    words += ["--work", f"{part}/{parts}", "--only", pattern]
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
        why = verdict(a, b, ignored)
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


def verdict(a: dict[str, Any], b: dict[str, Any], ignored: set[str]) -> str:
    for side, line in ("before", a), ("now", b):
        if "raised" in line:
            return f"{side} it raised {line['raised'].splitlines()[-1]}"
    if ("absent" in a) != ("absent" in b):
        return f"only one tree has the back end: {a.get('absent') or b.get('absent')}"
    if "absent" in a:
        return ""
    return ", ".join(differences(a["found"], b["found"], ignored))


def phases(lines: dict[str, dict]) -> str:
    """Which phases the cases went through: so that nobody believes in what did not happen."""
    seen = {
        phase
        for line in lines.values()
        for words in line.get("found", {}).get("phase", {}).values()
        for phase in re.findall(r"'([a-z+]+)'", words)
    }
    return "phases seen: " + ", ".join(sorted(seen))


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
    parser.add_argument("--work", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.only, *map(int, asked.work.split("/")))
        return 0
    if asked.list:
        print(*(case.name for case in chosen(asked.only)), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        before, after = run_both(asked.rev, asked.only, asked.j, Path(folder).resolve())
    print(phases(after))
    return 1 if compare(before, after, set(asked.ignore)) or not before else 0


if __name__ == "__main__":
    sys.exit(main())
