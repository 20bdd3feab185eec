"""One thread for all tests: tensors are small, and threads that spin on a shared machine cost more than they save.

Without a GPU Triton's kernels run in its interpreter, which has to be asked for before they are imported.
"""

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """Where Triton's kernels run: in the interpreter, or on a GPU; never both in one process."""
    pytest.importorskip("triton")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if (request.param == "cpu") != (os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("kernels run either on the GPU or, with TRITON_INTERPRET=1, in the interpreter")
    return torch.device(request.param)


@pytest.fixture(params=["torch", "native", "triton"])
def backend(request, monkeypatch) -> str:
    """Each back end that float32 parameters on the CPU can have here; Triton's kernels in the interpreter."""
    from compopt._ops.backends import _missing

    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("kernels run either on the GPU or, with TRITON_INTERPRET=1, in the interpreter")
    if reason := _missing(request.param, {"cpu"}):
        pytest.skip(f"{request.param} cannot run here: {reason}")
    monkeypatch.setenv("COMPOPT_BACKEND", request.param)
    return request.param
