"""Build the wheel, install it into an empty environment beside the torch that is here, import it, train one step."""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

STEP = """
import torch, compopt
from compopt._backends.native.build import find_compiler
p = torch.nn.Parameter(torch.randn(64, 64))
optimizer = compopt.RadiusAdamW([p], lr=0.1, dense_steps=0, interval=100, simulate=True)
before = p.detach().clone()
for _ in range(2):
    p.square().sum().backward()
    optimizer.step()
assert optimizer.stats.phase == "sparse", optimizer.stats
assert optimizer.backend == ("native" if find_compiler() else "torch"), optimizer.backend
assert not torch.equal(p, before) and "site-packages" in compopt.__file__, compopt.__file__
print("wheel", compopt.__version__, "trains:", optimizer.stats.phase)
"""


def run(*command: object, **options: object) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=600, **options)


with tempfile.TemporaryDirectory() as folder:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT, stdout=subprocess.DEVNULL)
    (wheel,) = Path(folder).glob("*.whl")
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "torch.optim" in text and not re.search(r"\]\((?!https?:)", text), (
        "links that lead nowhere from a package index"
    )
    run(sys.executable, "-m", "venv", f"{folder}/empty")
    python = f"{folder}/empty/bin/python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", wheel)
    run(python, "-c", STEP, cwd=folder)
