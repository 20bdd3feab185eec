#!/usr/bin/env bash
# One prepared run on a machine with a GPU, of at most nine minutes; what it does, bench/gpu.py says. Installs nothing: torch,
# triton, pytest and pytest-xdist have to be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
"$PYTHON" kernels/native/build_passes.py
nvidia-smi --query-gpu=name,driver_version,clocks.max.mem --format=csv 2>/dev/null || true
exec "$PYTHON" bench/gpu.py "$@"
