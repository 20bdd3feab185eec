"""The backends: which one is chosen, what says so, that ranks agree on one, and that all compute the same."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import logging
import sys
import types
import warnings

import pytest
import torch
from backend_runs import SHAPE, Net, assert_same, loss, trained
from sim import Ranks, World
from slow_rows import slow_but
from table import by_name
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import compopt
from compopt._backends import apex as apex_backend
from compopt._backends import choice as backends
from compopt._backends.native import library
from compopt._ops import norms, operations
from compopt._ops.operations import Ops

needs_passes = pytest.mark.skipif(not library.find_objects(), reason="needs the compiled passes")


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


# those that select by more and that project: test_triton.py has them for several buckets
QUICK = "RadiusAdamW", "AdamS"


@pytest.mark.parametrize(
    "name, options",
    slow_but(lambda name, _: name in QUICK, [(name, options) for name, all_ in TRITON.items() for options in all_]),
)
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


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_passes)])
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
        with pytest.raises(ValueError, match=f"must be one of auto, torch, native, triton, apex, got '{unknown}'"):
            compopt.AdamS(parameters())
    monkeypatch.setenv("COMPOPT_BACKEND", "apex")
    with pytest.raises(RuntimeError, match="apex cannot run here: no parameter is on a CUDA device"):
        compopt.AdamS(parameters())
    monkeypatch.setenv("COMPOPT_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="triton cannot run here: no parameter is on an accelerator"):
        compopt.AdamS(parameters())


@pytest.fixture
def apex(monkeypatch) -> list[tuple]:
    """Stand-ins for NVIDIA's modules; what was asked of them."""
    calls: list[tuple] = []

    def adam(chunk, overflow, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay):
        calls.append((mode, bias_correction, step))
        for g, w, m, v in zip(*lists, strict=True):
            operations.adamw_(w, g, m, v, step, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)

    modules = {name: types.ModuleType(name) for name in ("amp_C", "apex", "apex.optimizers", "apex.multi_tensor_apply")}
    for name, module in modules.items():
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        monkeypatch.setitem(sys.modules, name, module)
    modules["amp_C"].multi_tensor_adam = adam
    modules["apex.multi_tensor_apply"].multi_tensor_applier = lambda op, overflow, lists, *rest: op(
        2048, overflow, lists, *rest
    )
    return calls


def test_apex_is_taken_on_cuda_where_triton_is_not(monkeypatch, apex):
    """There is no CUDA here: the device is said to be one, and the tensors are told to look so to the choice only."""
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    chosen = backends.choose_backend({"cuda"})
    assert chosen.name == "apex" and backends.choose_backend({"cpu"}).name != "apex"
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": True}
    random = torch.Generator().manual_seed(0)
    columns = [[torch.rand(10, 10, generator=random) for _ in range(4)] for _ in range(4)]
    columns[0][3] = columns[0][3].mT  # apex cannot read it
    steps = [torch.tensor(float(n)) for n in (3, 5, 3, 3)]
    plain = [[x.clone() for x in column] for column in columns]
    Ops().adamw(group, *plain, steps)
    monkeypatch.setattr(apex_backend, "APEX_DEVICE", "cpu")
    chosen.adamw(group, *columns, steps)
    assert sorted(apex) == [(1, 1, 3), (1, 1, 5)]  # a launch for each number of steps
    for ours, theirs in zip(columns, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


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
    module = importlib.import_module(f"compopt._backends.{backend}.{backend}_ops")
    fused = {"native": "NativeOps", "triton": "TritonOps"}[backend]
    for reference_function, implementation in getattr(module, fused).fused.items():
        place = reference_function.__module__.removeprefix("compopt.")
        if not implementation.is_batched:
            expected, given = (list(inspect.signature(f).parameters) for f in (reference_function, implementation.run))
            assert given == expected, place
        if "lowrank" not in implementation.run.__module__:  # whoever reads one finds the other, and the caller
            first = " ".join(implementation.run.__doc__.partition("\n\n")[0].split())
            name = f"{place.rpartition('.')[2]}.{reference_function.__name__}"
            assert f"{name}``" in first and "called by" in first, name


def test_a_batched_implementation_names_the_arguments_of_its_reference():
    pytest.importorskip("triton")
    from compopt._backends.triton import triton_lowrank, triton_updates
    from compopt._engine import reducer
    from compopt.separate import separate

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
        norms, "squared_norms_on_cpu", lambda xs: torch.stack(torch._foreach_norm(xs, dtype=torch.float64))
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


@pytest.fixture
def by_itself(monkeypatch) -> None:
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)


@pytest.mark.usefixtures("by_itself")
@needs_passes
def test_it_is_taken_on_the_cpu_where_its_passes_are_compiled(monkeypatch):
    assert backends.choose_backend({"cpu"}).name == "native"
    assert backends.choose_backend({"cpu", "meta"}).name == "torch"
    monkeypatch.setattr(backends, "find_objects", dict)
    assert backends.choose_backend({"cpu"}).name == "torch"
    monkeypatch.setenv("COMPOPT_BACKEND", "native")
    with pytest.raises(RuntimeError, match="native cannot run here: the compiled passes are not installed"):
        backends.choose_backend({"cpu"})


@pytest.mark.usefixtures("by_itself")
@needs_passes
def test_one_line_of_log_says_what_and_why(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "compopt")
    isa = library.list_isas()[0]
    optimizer = compopt.AdamS(parameters())
    assert optimizer.backend_reason == f"native ({isa}): the fastest that runs here"
    monkeypatch.setenv("COMPOPT_BACKEND", "torch")
    assert compopt.AdamS(parameters()).backend_reason == "torch: COMPOPT_BACKEND names it"
    monkeypatch.delenv("COMPOPT_BACKEND")
    monkeypatch.setattr(backends, "find_objects", dict)
    assert "passes are not installed" in compopt.AdamS(parameters()).backend_reason
    assert [record.getMessage() for record in caplog.records] == [
        f"backend: native ({isa}): the fastest that runs here",
        "backend: torch: COMPOPT_BACKEND names it",
        "backend: torch: no native, the compiled passes are not installed",
    ]


@pytest.mark.usefixtures("by_itself")
@needs_passes
@pytest.mark.parametrize("vectors, chosen", [("AVX2", "torch"), ("DEFAULT", "native"), ("NO AVX", "native")])
def test_without_vectors_it_is_taken_where_torch_has_none_either(monkeypatch, vectors, chosen):
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", "portable")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    ops = backends.choose_backend({"cpu"})
    assert ops.name == chosen and "portable" in ops.reason
    monkeypatch.setenv("COMPOPT_BACKEND", "native")  # said aloud it is taken
    assert backends.choose_backend({"cpu"}).name == "native"


def adams(world: World, rank: int) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    (p,) = parameters()
    p.grad = torch.full_like(p, rank + 1.0)
    return compopt.AdamS([p], process_group=world.comms[rank])


@pytest.mark.usefixtures("by_itself")
def test_ranks_for_which_another_back_end_was_named_are_refused(monkeypatch):
    world, optimizers = World(2), []
    for rank in range(2):
        monkeypatch.setenv("COMPOPT_BACKEND", "torch")
        optimizers.append(adams(world, rank))
    optimizers[1].ops.name = "triton"
    with pytest.raises(ValueError, match="backend: rank 0 has 'torch', rank 1 has 'triton'"):
        world.step(optimizers)


def lame(monkeypatch, make):
    """As ``make``, on a machine without the compiled passes."""
    with monkeypatch.context() as patch:
        patch.setattr(backends, "find_objects", dict)
        return make()


CLASSES = {
    "RadiusAdamW": dict(dense_steps=1, interval=3),
    "ScapeAdamS": dict(dense_steps=1, density_steps=0, density=0.1),
    "SeparateAdam": dict(dense_steps=1),
    "TagcAdamW": dict(dense_steps=1),
}


@pytest.mark.usefixtures("by_itself")
@needs_passes
@pytest.mark.parametrize("name", CLASSES)
def test_ranks_that_chose_differently_by_themselves_all_take_pytorchs_operators(monkeypatch, name):
    """From the first step on; and where one is laid out anew on another machine in the midst of training."""

    def make(params, process_group):
        def new():
            return getattr(compopt, name)(params, process_group=process_group, **CLASSES[name])

        return lame(monkeypatch, new) if process_group.rank == 1 and lames else new()

    lames = True
    ranks = Ranks(2, Net, make)
    assert [o.backend for o in ranks.optimizers] == ["native", "torch"]
    with pytest.warns(UserWarning, match="ranks have chosen different backends") as caught:
        ranks.train(loss, 3)
    assert len([w for w in caught if "different backends" in str(w.message)]) == 1  # rank 0's
    assert [o.backend for o in ranks.optimizers] == ["torch", "torch"]
    assert "ranks had chosen different backends" in ranks.optimizers[0].backend_reason
    if name == "SeparateAdam":
        frames = [o.algorithm(o._buckets[0]).gi_frame for o in ranks.optimizers]
        rules = [frame.f_locals["update"].apply.__self__ for frame in frames]
        assert all(rule is o.ops for rule, o in zip(rules, ranks.optimizers, strict=True))
    ranks.assert_replicas_equal()

    lames = False
    ranks = Ranks(2, Net, make)
    ranks.train(loss, 3)
    first, second = ranks.optimizers
    states = [optimizer.state_dict() for optimizer in ranks.optimizers]
    first.load_state_dict(states[0])
    lame(monkeypatch, lambda: second.load_state_dict(states[1]))
    assert [o.backend for o in ranks.optimizers] == ["native", "torch"]
    with pytest.warns(UserWarning, match="ranks have chosen different backends"):
        ranks.train(loss, 3)
    assert [o.backend for o in ranks.optimizers] == ["torch", "torch"]
    ranks.assert_replicas_equal()


@pytest.mark.usefixtures("by_itself")
@needs_passes
@pytest.mark.parametrize("name", CLASSES)
def test_ranks_with_different_instruction_sets_train_together(monkeypatch, name):
    here = library.list_isas()
    monkeypatch.setenv("COMPOPT_BACKEND", "native")

    def make(params, process_group):
        monkeypatch.setenv("COMPOPT_NATIVE_ISA", here[process_group.rank % len(here)])
        return getattr(compopt, name)(params, process_group=process_group, **CLASSES[name])

    ranks = Ranks(3, Net, make)
    ranks.train(loss, 5)
    assert {o.ops.isa for o in ranks.optimizers} == set(here[:3])
    ranks.assert_replicas_equal()
