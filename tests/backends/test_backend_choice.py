"""Which backend is chosen on a CPU, what says so, and that ranks agree on one."""

from __future__ import annotations

import logging

import pytest
import torch
from sim import Ranks, World
from test_backends import Net, loss, parameters

import compopt
from compopt._ops import backends
from compopt._ops.native import build

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def by_itself(monkeypatch) -> None:
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)


@needs_compiler
def test_it_is_taken_on_the_cpu_where_there_is_a_compiler(monkeypatch):
    assert backends.choose_backend({"cpu"}).name == "native"
    assert backends.choose_backend({"cpu", "meta"}).name == "torch"
    monkeypatch.setattr(backends, "find_compiler", lambda: None)
    assert backends.choose_backend({"cpu"}).name == "torch"
    monkeypatch.setenv("COMPOPT_BACKEND", "native")
    with pytest.raises(RuntimeError, match="native cannot run here: there is no C compiler"):
        backends.choose_backend({"cpu"})


@needs_compiler
def test_one_line_of_log_says_what_and_why(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "compopt")
    isa = build.list_isas(build.find_compiler())[0]
    optimizer = compopt.AdamS(parameters())
    assert optimizer.backend_reason == f"native ({isa}): the fastest that runs here"
    monkeypatch.setenv("COMPOPT_BACKEND", "torch")
    assert compopt.AdamS(parameters()).backend_reason == "torch: COMPOPT_BACKEND names it"
    monkeypatch.delenv("COMPOPT_BACKEND")
    monkeypatch.setattr(backends, "find_compiler", lambda: None)
    assert "there is no C compiler" in compopt.AdamS(parameters()).backend_reason
    assert [record.getMessage() for record in caplog.records] == [
        f"backend: native ({isa}): the fastest that runs here",
        "backend: torch: COMPOPT_BACKEND names it",
        "backend: torch: no native, there is no C compiler ($CC, cc, gcc, clang)",
    ]


@needs_compiler
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


def test_ranks_for_which_another_back_end_was_named_are_refused(monkeypatch):
    world, optimizers = World(2), []
    for rank in range(2):
        monkeypatch.setenv("COMPOPT_BACKEND", "torch")
        optimizers.append(adams(world, rank))
    optimizers[1].ops.name = "triton"
    with pytest.raises(ValueError, match="backend: rank 0 has 'torch', rank 1 has 'triton'"):
        world.step(optimizers)


def lame(monkeypatch, make):
    """As ``make``, on a machine without a compiler."""
    with monkeypatch.context() as patch:
        patch.setattr(backends, "find_compiler", lambda: None)
        return make()


CLASSES = {
    "RadiusAdamW": dict(dense_steps=1, interval=3),
    "ScapeAdamS": dict(dense_steps=1, density_steps=0, density=0.1),
    "SeparateAdam": dict(dense_steps=1),
    "TagcAdamW": dict(dense_steps=1),
}


@needs_compiler
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


@needs_compiler
@pytest.mark.parametrize("name", CLASSES)
def test_ranks_with_different_instruction_sets_train_together(monkeypatch, name):
    here = build.list_isas(build.find_compiler())
    monkeypatch.setenv("COMPOPT_BACKEND", "native")

    def make(params, process_group):
        monkeypatch.setenv("COMPOPT_NATIVE_ISA", here[process_group.rank % len(here)])
        return getattr(compopt, name)(params, process_group=process_group, **CLASSES[name])

    ranks = Ranks(3, Net, make)
    ranks.train(loss, 5)
    assert {o.ops.isa for o in ranks.optimizers} == set(here[:3])
    ranks.assert_replicas_equal()
