"""Build the wheel, install it into an empty environment beside the torch that is here, import it, train one step."""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "kernels" / "native"))
import build_passes

ROOT = Path(__file__).parent.parent

# Those of this kind of machine are in the wheel; where there is no compiler, none.
OBJECTS = {f"compopt_kernels/native/{isa}.so" for isa in build_passes.ISAS if build_passes.find_compiler()}
STEP = f"""
COMPILED = {bool(OBJECTS)}
import torch, compopt
from compopt._backends.native.library import list_isas
p = torch.nn.Parameter(torch.randn(64, 64))
optimizer = compopt.RadiusAdamW([p], lr=0.1, dense_steps=0, interval=100, simulate=True)
before = p.detach().clone()
for _ in range(2):
    p.square().sum().backward()
    optimizer.step()
assert optimizer.stats.phase == "sparse", optimizer.stats
print(optimizer.backend_reason)
assert optimizer.backend == ("native" if COMPILED else "torch") and bool(list_isas()) == COMPILED
assert not torch.equal(p, before) and "site-packages" in compopt.__file__, compopt.__file__
print("wheel", compopt.__version__, "trains:", optimizer.stats.phase)
"""


def run(*command: object, **options: object) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=600, **options)


with tempfile.TemporaryDirectory() as folder:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT, stdout=subprocess.DEVNULL)
    (wheel,) = Path(folder).glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", wheel.name), wheel.name
    assert {name for name in names if name.endswith(".so")} == OBJECTS, names
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "torch.optim" in text and not re.search(r"\]\((?!https?:)", text), (
        "links that lead nowhere from a package index"
    )
    run(sys.executable, "-m", "venv", f"{folder}/empty")
    python = f"{folder}/empty/bin/python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", wheel)
    run(python, "-c", STEP, cwd=folder)
