"""The house's rules, read from the source: who imports whom, and who may talk to other ranks."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from ranks import HANG_GUARD

import compopt

ROOT = Path(compopt.__file__).parent

# A room may import what stands below it, and itself. Rooms on one line stand side by side.
FLOORS = [
    ["__main__"],
    ["__init__"],
    ["advise", "probe", "costmodel"],
    ["planning"],
    ["integrations", "activations", "_backends"],
    ["local_steps"],
    ["radius", "scape", "separate", "tagc", "adams", "average", "muon"],  # papers
    ["_fsdp", "_inside"],
    ["_engine"],
    ["_ops"],
    ["_state"],
    ["_wire"],
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# with torch.distributed
TALKS = {"_wire/collectives.py", "_wire/in_flight.py", "_wire/groups.py"}
TALKS |= {"_fsdp", "integrations", "activations", "planning"}


@functools.cache
def import_statements(source: str) -> list[ast.Import | ast.ImportFrom]:
    """All of a file, wherever in it; the tests read copies of the package, of which one file differs."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(path: Path, root: Path) -> list[tuple[str, ...]]:
    """Return a file's imports, wherever in it: the parts of each name, from the package's root where it is of it."""
    package, results = path.relative_to(root.parent).parts[:-1], []
    for node in import_statements(path.read_text()):
        if isinstance(node, ast.Import):
            results += [tuple(alias.name.split(".")) for alias in node.names]
        else:
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module.split(".") if node.module else ()))
            results += [(*base, alias.name) for alias in node.names]
    return results


def broken_rules(root: Path) -> list[str]:
    """A sentence for every import that goes up or sideways, every stranger, every file that stands in no room."""
    results = []
    for path in sorted(root.rglob("*.py")):
        here = path.relative_to(root)
        room = here.parts[0].removesuffix(".py")
        if room not in FLOOR_OF:
            results.append(f"{here} stands in no room: add it to FLOORS")
            continue
        for name in imported(path, root):
            other = name[1] if name[0] == "compopt" and len(name) > 1 else room
            if other != room and FLOOR_OF.get(other, FLOOR_OF[room] + 1) <= FLOOR_OF[room]:
                results.append(f"{here} imports {'.'.join(name)}, which does not stand below it")
            if name[:2] == ("torch", "distributed") and not TALKS & {str(here), here.parts[0]}:
                results.append(f"{here} imports torch.distributed: only _wire, _fsdp and the tools do")
    return results


def test_imports_go_down():
    assert broken_rules(ROOT) == []


def imported_modules(root: Path) -> dict[str, set[str]]:
    """For each module under ``root``, the modules there that it imports, for types too."""
    name = {path: ".".join(path.relative_to(root.parent).with_suffix("").parts) for path in root.rglob("*.py")}
    modules = {path: dotted.removesuffix(".__init__") for path, dotted in name.items()}
    known, graph = set(modules.values()), {}
    for path, module in modules.items():
        parts = (names[:end] for names in imported(path, root) for end in (len(names), len(names) - 1))
        graph[module] = ({".".join(names) for names in parts} & known) - {module, root.name}
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, directly or by way of others; empty where there are none."""
    left = set(graph)
    while ends := {m for m in left if not graph[m] & left or all(m not in graph[other] for other in left)}:
        left -= ends
    return sorted(left)


def test_no_module_imports_itself_by_way_of_others():
    assert find_cycle(imported_modules(ROOT)) == []


@pytest.mark.parametrize(
    "file, line",
    [
        ("_engine/method.py", "if TYPE_CHECKING:\n    from .engine import Engine"),
        ("_engine/decision.py", "def f():\n    from .._engine import method"),
        ("_engine/options.py", "import compopt._engine.optimizer"),
    ],
)
def test_a_cycle_is_found(tmp_path, file, line):
    copy = shutil.copytree(ROOT, tmp_path / "compopt", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / file).open("a") as source:
        source.write(f"\n{line}\n")
    module = "compopt." + file.removesuffix(".py").replace("/", ".")
    assert module in find_cycle(imported_modules(copy))


@pytest.mark.parametrize(
    "file, line",
    [
        ("_wire/collectives.py", "from .._state.buckets import Bucket"),
        ("_state/masks.py", "from .._ops import operations"),
        ("_ops/operations.py", "from .._engine import trial"),
        ("_engine/optimizer.py", "import compopt.scape.scape_masks"),
        ("scape/scape_masks.py", "from ..radius import radius"),
        ("scape/sharded_scape.py", "def f():\n    from ..separate.projections import project"),
        ("radius.py", "from . import scape"),
        ("scape/scape.py", "import torch.distributed as dist"),
        ("stray.py", ""),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, file, line):
    copy = shutil.copytree(ROOT, tmp_path / "compopt", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / file).open("a") as source:
        source.write(f"\n{line}\n")
    results = broken_rules(copy)
    assert len(results) == 1 and results[0].startswith(file), results


def test_every_private_room_says_what_lives_there():
    for room in (room for room in FLOOR_OF if room.startswith("_") and not room.startswith("__")):
        assert "May import" in (ROOT / room / "README.md").read_text(), room
        text = (ROOT / room / "README.md").read_text()
        for path in (ROOT / room).glob("[a-z]*.py"):
            assert path.name in text, f"{room}/README.md says nothing of {path.name}"


def test_torch_is_the_only_hard_dependency():
    for path in ROOT.rglob("*.py"):
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in top if isinstance(node, ast.ImportFrom) and node.level == 0}
        known = set(sys.stdlib_module_names) | {"torch", "compopt", "compopt_kernels"}
        foreign = {name.split(".")[0] for name in names} - known
        assert not foreign, f"{path.name} imports {foreign} at the top"


def test_importing_it_loads_nothing_slow():
    """Planning, and of torch the parts that take half a second: they are loaded where they are asked for."""
    slow = ["torch._dynamo", "torch.distributed.tensor", "triton", "transformers", "matplotlib"]
    asks = "import sys, compopt; print([name for name in sys.modules if name.startswith('compopt.planning')])\n"
    asks += f"import compopt.advise; print([name for name in {slow} if name in sys.modules], compopt.diagnose.__name__)"
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, timeout=HANG_GUARD)
    assert done.stdout == "[]\n[] diagnose\n", done.stdout + done.stderr
    assert compopt.activations.MeshRanks.__module__ == "compopt.activations.tensor_parallel"


def test_every_folder_is_in_the_wheel_and_in_the_picture():
    listed = re.findall(r'^    "(compopt[\w.]*)",$', (ROOT.parent / "pyproject.toml").read_text(), re.M)
    folders = {path.parent for path in ROOT.rglob("__init__.py")}
    assert set(listed) - {"compopt_kernels"} == {".".join(path.relative_to(ROOT.parent).parts) for path in folders}
    picture = (ROOT.parent / "CONTRIBUTING.md").read_text().split("## Layout")[1]
    assert [path.name for path in folders if f"{path.name}/" not in picture and path.parent == ROOT] == []


def test_a_base_name_is_one_files():
    """Of the package and the kernels; a C file may be named after what it does beside a Python file that calls it."""
    kernels = Path(__file__).parents[2] / "kernels"
    files = [path for root in (ROOT, kernels) for path in root.rglob("*.py") if path.name != "__init__.py"]
    names = Counter(path.stem for path in files)
    assert [name for name, count in names.items() if count > 1] == []


def list_users(root: Path) -> dict[Path, set[str]]:
    """Return for every module of the package the modules that import it."""
    modules = {(root.name, *path.relative_to(root).with_suffix("").parts): path for path in root.rglob("*.py")}
    users: dict[Path, set[str]] = {path: set() for path in modules.values()}
    for path in modules.values():
        for name in imported(path, root):
            module = modules.get(name) or modules.get(name[:-1])
            if module is not None and module != path:
                users[module].add(path.stem if path.stem != "__init__" else "")
    return users


def test_a_module_says_who_uses_it():
    """Its first lines name a module that imports it, or a class in one: who opens one file knows where it belongs."""
    silent = []
    for path, users in list_users(ROOT).items():
        if not users or "" in users or path.stem == "__init__":
            continue  # an entrance
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        sources = [ast.parse(user.read_text()) for user in ROOT.rglob("*.py") if user.stem in users]
        classes = {node.name for source in sources for node in source.body if isinstance(node, ast.ClassDef)}
        if not any(re.search(rf"\b{name}\b", text) for name in users - {""} | classes):
            silent.append(f"{path.relative_to(ROOT)}: used by {', '.join(sorted(users - {''}))}")
    assert not silent
