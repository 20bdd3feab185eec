"""The backends: which one is chosen, and that all compute the same."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import warnings

import pytest
import torch
from sim import Ranks
from table import by_name
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import compopt
from compopt._ops import backends, operations
from compopt._ops.native import build
from compopt._ops.operations import Ops

SHAPE = (64, 68)
needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="needs a C compiler")


class Net(nn.Module):
    """Two matrices that are compressed, one of them transposed in memory, and a vector that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(SHAPE)), nn.Parameter(torch.randn(SHAPE[::-1]).t())
        self.scale, self.unused = nn.Parameter(torch.ones(SHAPE[1])), nn.Parameter(torch.randn(SHAPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.a).tanh() * self.scale) @ self.b.t()


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, SHAPE[0], generator=torch.Generator().manual_seed(10 * step + rank)).to(model.a.device)
    return (model(x) - x).square().mean()


def trained(backend: str, monkeypatch, name: str, device: str = "cpu", steps: int = 5, **options) -> Ranks:
    """Two ranks in lockstep."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    world = Ranks(2, lambda: Net().to(device), lambda params, **o: by_name[name].make(params, **options, **o))
    assert {o.backend for o in world.optimizers} == {backend}
    world.train(loss, steps)
    world.assert_replicas_equal()
    return world


def assert_same(ours: Ranks, theirs: Ranks, tolerance: float = 1e-5) -> None:
    for mine, yours in zip(ours.optimizers, theirs.optimizers, strict=True):
        assert mine.stats.phase == yours.stats.phase and mine.stats.bytes_sent == yours.stats.bytes_sent
        a, b = mine.state_dict(), yours.state_dict()
        for key in (k for k, state in a["state"].items() if state["step"]):  # without a gradient all are equally large
            for name, value in a["state"][key].items():
                if name == "basis":  # QR and Cholesky-QR may choose other signs
                    value, b["state"][key][name] = value.abs(), b["state"][key][name].abs()
                torch.testing.assert_close(value, b["state"][key][name], rtol=tolerance, atol=tolerance)
    for p, q in zip(ours.models[0].parameters(), theirs.models[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


TRITON = {  # each class twice: what it does in all its phases, and the options that its kernels see
    "RadiusAdamW": [{"dense_steps": 2, "interval": 4, "maximize": True, "max_grad_norm": 0.5, "lr": 1e-3}],
    "ScapeAdamS": [
        {"dense_steps": 1, "lr": 1e-3, "max_grad_norm": 0.5, "clip": "scape", "maximize": True},
    ],
    "AdamS": [{"steps": 2}],
    "SeparateAdam": [
        {
            "rank": 7,
            "dense_steps": 1,
            "lr": 1e-3,
            "projection": "tracked",
            "payload_dtype": None,
            "ratio": None,
            "steps": 3,
        }
    ],
}


@pytest.mark.parametrize("name, options", [(name, options) for name, all_ in TRITON.items() for options in all_])
def test_triton_equals_torch(monkeypatch, device, name, options):
    plain, ours = (trained(backend, monkeypatch, name, device, **options) for backend in ("torch", "triton"))
    assert_same(ours, plain)


def test_triton_brings_float32_masters_to_bfloat16_parameters(monkeypatch, device):
    monkeypatch.setenv("COMPOPT_BACKEND", "triton")
    p = nn.Parameter(torch.randn(SHAPE, device=device).bfloat16())
    optimizer = compopt.RadiusAdamW([p], lr=0.1, dense_steps=0, simulate=True)
    before = p.detach().clone()
    for _ in range(2):
        p.square().sum().backward()
        optimizer.step()
    assert optimizer.stats.phase == "sparse" and not torch.equal(p, before)
    torch.testing.assert_close(p.float(), optimizer.state[p]["master"], rtol=1e-2, atol=1e-2)  # it cuts off


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_compiler)])
def test_a_rank_without_a_gradient_computes_the_same_bits(monkeypatch, backend):
    """A gradient of its own, or none, must not choose between two loops that round differently."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    ranks = Ranks(2, Net, lambda params, **o: by_name["RadiusAdamW"].make(params, dense_steps=0, **o))
    for _ in range(4):
        ranks.backward(loss)
        ranks.models[1].a.grad = None
        ranks.world.step(ranks.optimizers)
    assert ranks.optimizers[0].stats.phase == "sparse"
    ranks.assert_replicas_equal()


def parameters(device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(SHAPE, device=device))]


def test_what_cannot_be_had_is_refused_in_words(monkeypatch):
    for unknown in ("fast", "compile"):  # there was one of torch.compile's loops
        monkeypatch.setenv("COMPOPT_BACKEND", unknown)
        with pytest.raises(ValueError, match=f"must be one of auto, torch, native, triton, got '{unknown}'"):
            compopt.AdamS(parameters())
    monkeypatch.setenv("COMPOPT_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="triton cannot run here: no parameter is on an accelerator"):
        compopt.AdamS(parameters())


def test_a_back_end_that_is_installed_but_does_not_run_gives_way(monkeypatch):
    """As on a CUDA machine without a compiler."""
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pytest.importorskip("triton")

    def broken(name: str) -> Ops:
        if name != "torch":
            raise RuntimeError("Failed to find C compiler")
        return Ops()

    monkeypatch.setattr(backends, "make_backend", broken)
    monkeypatch.setattr(backends, "has_triton_driver", lambda: True)
    with pytest.warns(UserWarning, match="triton backend is installed but does not run.* Failed to find C compiler"):
        assert backends.choose_backend({"cuda"}).name == "torch"


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_fused_implementation_has_its_references_place_and_arguments(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    module = importlib.import_module(f"compopt._ops.{backend}.{backend}_ops")
    fused = {"native": "NativeOps", "triton": "TritonOps"}[backend]
    for key, implementation in getattr(module, fused).fused.items():
        place, _, name = key.rpartition(".")
        reference_function = getattr(importlib.import_module(f"compopt.{place}"), name)
        assert operations.reference_key(reference_function) == key
        if not implementation.is_batched:
            expected, given = (list(inspect.signature(f).parameters) for f in (reference_function, implementation.run))
            assert given == expected, key
        if "lowrank" not in implementation.run.__module__:  # whoever reads one finds the other, and the caller
            first = " ".join(implementation.run.__doc__.partition("\n\n")[0].split())
            assert f"``{key}``" in first and ("called by" in first or "made by" in first), key


def test_a_batched_implementation_names_the_arguments_of_its_reference():
    pytest.importorskip("triton")
    from compopt import separate
    from compopt._engine import reducer
    from compopt._ops.triton import triton_lowrank, triton_updates

    calls = {
        reducer.step_adamw: triton_updates.AverageCall,
        reducer.step_adams: triton_updates.AverageCall,
        separate.update_tensors: triton_lowrank.SeparateCall,
    }
    for reference_function, call in calls.items():
        names = [name for name in inspect.signature(reference_function).parameters if name != "ops"]
        assert list(call._fields) == names


class Waits(TorchDispatchMode):
    """Counts the operators that make the host wait for a GPU: those whose result, or its size, it has to know."""

    NAMES = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "is_nonzero"}

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name == "index" else []
        if name in self.NAMES or any(i is not None and i.dtype == torch.bool for i in indices):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["RadiusAdamW", "ScapeAdamS"])
def test_a_compressed_step_waits_for_the_device_once(monkeypatch, device, name):
    """For the verdict, a list of numbers. Everything else stays on the device, sizes are known beforehand."""
    monkeypatch.setenv("COMPOPT_BACKEND", "triton")
    model = Net().to(device)
    model.unused.requires_grad_(device.type != "cpu")  # absent, SCAPE decodes a mask: a wait on CPUs only
    options = {"RadiusAdamW": {"dense_steps": 0}, "ScapeAdamS": {"density": 0.1, "density_steps": 0}}
    optimizer = getattr(compopt, name)(model.parameters(), simulate=True, **options[name])
    monkeypatch.setattr(
        operations, "squared_norms_on_cpu", lambda xs: torch.stack(torch._foreach_norm(xs, dtype=torch.float64))
    )
    lists, brought = [], torch.Tensor.tolist  # the norm as on a GPU: on the CPU it looks whether float32 overflowed
    for step in range(4):
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        if step == 1:  # the first greets the other ranks
            monkeypatch.setattr(torch.Tensor, "tolist", lambda t: lists.append(t.shape) or brought(t))
        with Waits() as waits:
            optimizer.step()
        assert step == 0 or (optimizer.stats.phase == "sparse" and waits.seen == [])
    assert len(lists) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["RadiusAdamW", "ScapeAdamS"])
def test_cuda_sees_one_wait_a_step(monkeypatch, device, name):
    """The same, as CUDA counts it."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    monkeypatch.setenv("COMPOPT_BACKEND", "triton")
    model = Net().to(device)
    optimizer = by_name[name].make(model.parameters(), dense_steps=1)
    for step in range(5):
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        torch.cuda.set_sync_debug_mode("warn" if step == 4 else "default")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchronizing" in str(w.message)]) == 1
