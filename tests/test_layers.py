"""The house's rules, read from the source: who imports whom, and who may talk to other ranks."""

from __future__ import annotations

import ast
from pathlib import Path

import compopt

ROOT = Path(compopt.__file__).parent
ALGORITHMS = {"radius", "scape", "adams", "separate", "tagc"}
HELPERS = {
    "_masks",
    "_selection",
    "_projections",
    "_projecting",
    "_tracking",
    "_sketch",
    "_sparsify",
    "_sharded_scape",
    "_sharded_adamw",
}  # of the algorithms, in files of their own
ALLOWED = {
    "algorithm": {
        "_base",
        "_ops",
        "_math",
        "_buckets",
        "_requests",
        "_options",
        "_stats",
        "_shards",
        "_settings",
        "_weakly",
        "_when",
        "_scratch",
    }
    | HELPERS,
    "_base": {
        "_alike",
        "_frozen",
        "_runtime",
        "_buckets",
        "_offload",
        "_checkpoint",
        "_handshake",
        "_recovery",
        "_saving",
        "_stepping",
        "_settings",
        "_backends",
        "_comm",
        "_requests",
        "_stats",
        "_options",
        "_when",
        "_shards",
        "_weakly",
    },
    "_handshake": {"_comm", "_requests", "_buckets"},
    "_recovery": {"_handshake", "_checkpoint", "_comm", "_requests", "_buckets"},
    "_saving": {"_checkpoint", "_frozen", "_comm", "_requests"},
    "_settings": {"_control"},
    "_control": set(),
    "_weakly": set(),
    "_alike": {"_control"},
    "_frozen": {"_checkpoint", "_comm", "_handshake"},
    "_shards": {"_masks"},
    "_masks": set(),
    "_checkpoint": {"_buckets", "_math", "_shards", "_requests", "_comm", "_when"},
    "_runtime": {"_comm", "_exchanges", "_control", "_buckets", "_requests", "_math"},
    "_exchanges": {"_comm", "_control", "_buckets", "_requests"},
    "_stepping": {
        "_alike",
        "_frozen",
        "_runtime",
        "_buckets",
        "_handshake",
        "_settings",
        "_signals",
        "_comm",
        "_requests",
    },
    "_signals": set(),
    "_ops": {"_math", "_masks", "_buckets", "_requests", "_scratch"},
    "_ops_triton": {"_ops", "_math", "_masks", "_buckets", "_requests"},
    "_ops_compile": {"_ops", "_math"},
    "_ops_apex": {"_ops"},
    "_ops_native": {"_ops", "_buckets", "_requests", "_native", "_native_adamw", "_native_adams", "_native_build"},
    "_native_adamw": {"_ops", "_math", "_buckets", "_requests", "_native"},
    "_native_adams": {"_ops", "_masks", "_selection_native", "_buckets", "_requests", "_native", "_native_adamw"},
    "_selection_native": {"_ops", "_masks", "_selection", "_buckets", "_native", "_requests"},
    "_native": set(),
    "_native_build": set(),
    "_backends": {"_ops", "_ops_triton", "_ops_compile", "_ops_apex", "_ops_native", "_native_build", "_race"},
    "_race": {"_ops", "_math", "_buckets"},
    "_buckets": {"_control", "_requests", "_shards", "_offload", "_scratch"},
    "_offload": set(),
    "_comm": {"_requests", "_wire"},
    "_wire": {"_requests", "_quantise"},
    "_math": set(),
    "_options": {"_when"},
    "_stats": set(),
    "_when": set(),
    "_requests": {"_quantise", "_scratch"},
    "_quantise": {"_scratch"},
    "_scratch": set(),
}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Modules of compopt, and modules from outside, that a file imports."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            outside.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            inside |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return inside, outside


def test_imports_go_one_way():
    for path in ROOT.glob("*.py"):
        allowed = ALLOWED["algorithm"] if path.stem in ALGORITHMS | HELPERS else ALLOWED.get(path.stem)
        if allowed is not None:
            assert imports(path)[0] <= allowed, f"{path.name} imports {imports(path)[0] - allowed}"


def test_only_comm_and_the_integrations_touch_torch_distributed():
    for path in ROOT.glob("*.py"):
        if path.stem != "_comm":
            assert not any(name.startswith("torch.distributed") for name in imports(path)[1]), path.name
            assert "dist." not in path.read_text().replace("dist.init", ""), path.name


def test_torch_is_the_only_hard_dependency():
    import sys

    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in top if isinstance(node, ast.ImportFrom) and node.level == 0}
        foreign = (
            {name.split(".")[0] for name in names}
            - set(sys.stdlib_module_names)
            - {"torch", "compopt", "compopt_kernels"}
        )
        assert not foreign, f"{path.name} imports {foreign} at the top"
