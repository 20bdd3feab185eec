#!/usr/bin/env bash
# The kernels' and the steps' tables on a CUDA machine. Builds nothing: compopt, torch and triton have to be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
nvidia-smi --query-gpu=name,driver_version,clocks.max.mem --format=csv 2>/dev/null || true
date -u +%F
"$PYTHON" bench/gpu_kernels.py "$@"
