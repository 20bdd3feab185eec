"""Long runs with faults at random, on simulated ranks; and what lives of optimizers that are gone, on real ones."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conservation import TOLERANCE, Ledger, everywhere
from ranks import FOREVER, run_ranks
from sim import World
from slow_rows import slow_but
from table import CASES, FORMS
from test_properties import Example, Run
from torch import nn

import compopt
from compopt._wire import in_flight

STEPS = int(os.environ.get("COMPOPT_SOAK", 0)) // len(CASES) or 60  # of each class
FAULTS = ["not finite", "absent", "absent everywhere", "failure", "saved and loaded", "rank replaced"]
FIRST = 20  # steps after which nothing should grow


class Soak(Run):
    def make(self, comm):
        optimizer = super().make(comm)
        optimizer.check_replicas_every = 50
        return optimizer

    def rank_replaced(self, step: int) -> None:
        """A rank dies; another takes its place, from a checkpoint that the others consolidate among themselves."""
        dead = step % len(self.optimizers)
        self.optimizers.pop(dead)
        self.join(self.optimizers)
        self.world.consolidate(self.optimizers)
        if self.optimizers[0].sharded:  # nobody's shards fit any more
            with pytest.raises(ValueError, match="ranks, because its state is sharded"):
                self.optimizers[0].rebind(World(4).comms[0])
            old, self.world = self.optimizers[0], World(4)
            self.optimizers = [self.resumed(old, comm) for comm in self.world.comms]
        else:
            self.optimizers.insert(dead, self.resumed(self.optimizers[0], World(1).comms[0]))
            self.join(self.optimizers)
        self.backward(step)

    def resumed(self, old, comm):
        """A new rank's optimizer, from what another one saved."""
        new = self.make(comm)
        with torch.no_grad():
            for p, q in zip(everywhere(new), everywhere(old), strict=True):
                p.copy_(q)
        new.load_state_dict(old.state_dict())
        return new

    def join(self, optimizers: list) -> None:
        self.world = World(len(optimizers))
        pairs = zip(optimizers, self.world.comms, strict=True)
        self.world.run([partial(optimizer.rebind, comm) for optimizer, comm in pairs])


def tensors(run: Soak) -> int:
    """Alive in this process, less what the simulator keeps."""
    run.join(run.optimizers)
    gc.collect()
    return sum(type(o) is torch.Tensor or type(o) is torch.nn.Parameter for o in gc.get_objects())


class MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``, over all arenas."""

    FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def memory() -> int:
    """Bytes in use: malloc's and, at about 64 bytes a block, Python's small objects.

    The size of the process is no measure: garbage that waits for the collector raises it for good.
    """
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd + 64 * sys.getallocatedblocks()


@pytest.fixture
def prompt_collector() -> Iterator[None]:
    """All there is before the run is set aside. Else what a run drops waits until it is a quarter of all that, and what
    is measured is how much waits.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_soak(case, capsys, prompt_collector):
    dice = random.Random(0)
    groups = [{"shapes": [(12, 16), (20, 8)], "compress": True}, {"shapes": [(12,)], "compress": None}]
    run = Soak(Example(case, torch.float64, 4, groups, {}, [], seed=0, repeat=False))
    counts: dict[str, int] = {}
    worst, held = 0.0, (0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            event = dice.choice(FAULTS) if dice.random() < 0.1 else "nothing"
            counts[event] = counts.get(event, 0) + 1
            run.backward(step, {0, 1} if event == "absent" else set())
            getattr(run, event.replace(" ", "_"))(step)
            audited = event != "nothing" or dice.random() < 0.1
            books = Ledger(case, run.optimizers) if audited else None
            run.world.step(run.optimizers)
            if books:
                worst = max(worst, books.check(run.optimizers))
            run.assert_equal_replicas(step)
            if step == max(FIRST, STEPS // 2):  # the allocator has settled by then
                held = tensors(run), memory()
    grown, more = tensors(run) - held[0], memory() - held[1]
    with capsys.disabled():
        if STEPS > 60:
            print(
                f"\n{case.name}: {STEPS} steps, {counts}, conserved to {worst:.1e}, {grown} tensors, {more} bytes more"
            )
    assert worst < TOLERANCE[torch.float64]
    assert abs(grown) <= 40 and (more < 2**20 or STEPS == 60)  # a short run is still importing


ROUNDS_STEPS = STEPS if STEPS > 60 else 120
ROUNDS_FAULTS = [
    "not finite",
    "lost its mind",
    "absent",
    "failure",
    "saved and loaded",
    "rank lost",
    "rank replaced",
    "ended",
]
ROUNDS = next(case for case in FORMS if case.form == "rounds")


class Rounds(Soak):
    """Random events of a run in which ranks step on their own."""

    def not_finite(self, step: int) -> None:
        optimizer = self.optimizers[step % len(self.optimizers)]
        everywhere(optimizer)[0].grad.view(-1)[-1] = float("nan")

    def lost_its_mind(self, step: int) -> None:
        """One rank's parameters are not finite; where it is the only one, nobody could help it."""
        if len(self.optimizers) > 1:
            everywhere(self.optimizers[step % len(self.optimizers)])[0].data.view(-1)[0] = float("inf")

    def rank_lost(self, step: int) -> None:
        """Two stay: what one that is left alone has nobody can join without a checkpoint."""
        if len(self.optimizers) > 2:
            super().rank_lost(step)

    def failure(self, step: int) -> None:
        for world in filter(None, (self.world, self.world.beside)):
            world.failing_everywhere.add(world.comms[0].started)

    def saved_and_loaded(self, step: int) -> None:
        """Each rank from its own, on a machine that was restarted."""
        self.world = World(len(self.optimizers))
        self.optimizers = [self.resumed(o, c) for o, c in zip(self.optimizers, self.world.comms, strict=True)]
        self.backward(step)

    def rank_replaced(self, step: int) -> None:
        """A new rank that knows nothing takes the place of another, and more of them those of the lost."""
        self.optimizers.pop(step % len(self.optimizers))
        self.optimizers.append(self.make(World(1).comms[0]))
        while len(self.optimizers) < 4:
            self.optimizers.append(self.make(World(1).comms[0]))
        self.join(self.optimizers)
        self.backward(step)

    def ended(self, step: int) -> None:
        for attempt in range(3):  # a failure may be waiting for it, and one beside
            try:
                self.world.run([optimizer.end_round for optimizer in self.optimizers])
                break
            except compopt.CommunicationError:
                assert attempt < 2
        self.assert_equal_replicas(step)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"every": 6, "fragments": 2, "delay": 2}], ids=["plain", "streamed"])
def test_soak_of_rounds(options, capsys):
    dice = random.Random(0)
    groups = [{"shapes": [(12, 16), (20, 8)], "compress": True}, {"shapes": [(12,)], "compress": None}]
    run = Rounds(Example(ROUNDS, torch.float64, 4, groups, options, [], seed=0, repeat=False))
    counts: dict[str, int] = {}
    held, failed = (0, 0), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(ROUNDS_STEPS):
            event = dice.choice(ROUNDS_FAULTS) if dice.random() < 0.15 else "nothing"
            counts[event] = counts.get(event, 0) + 1
            run.backward(step, {0, 1} if event == "absent" else set())
            getattr(run, event.replace(" ", "_"))(step)
            try:
                run.world.step(run.optimizers)
            except compopt.CommunicationError:
                failed += 1
            at_rest = all(optimizer.stats.steps_into_round == 0 for optimizer in run.optimizers)
            if at_rest and run.optimizers[0].stats.phase == "exchanged" and not options:
                run.assert_equal_replicas(step)
            if step == ROUNDS_STEPS // 2:
                held = tensors(run), memory()
        run.ended(ROUNDS_STEPS)
    grown, more = tensors(run) - held[0], memory() - held[1]
    with capsys.disabled():
        if ROUNDS_STEPS > 120:
            print(f"\nrounds: {ROUNDS_STEPS} steps, {counts}, {failed} failed, {grown} tensors, {more} bytes more")
    assert failed and run.optimizers[0].stats.round > ROUNDS_STEPS // 8
    assert abs(grown) <= 60 and (more < 8 * 2**20 or ROUNDS_STEPS == 120)


IS_SOAK = "COMPOPT_SOAK" in os.environ  # else a few
OPTIMIZERS = 200 if IS_SOAK else 4  # of each class
REBINDS = 25 if IS_SOAK else 4
CHOSEN = {case.name: case for case in ([*CASES, *FORMS] if IS_SOAK else [*CASES, ROUNDS])}
QUICK = "ScapeAdamS", "SeparateAdam", "LocalSteps", ROUNDS.name


def count_what_lives() -> dict[str, int]:
    """Threads, open files, process groups and tensors of this process, once nothing is in flight any more."""
    gc.collect()  # what is dropped may be in a cycle, and then has yet to give its group up
    for _ in range(1000):
        if not (in_flight._unowned or in_flight._abandoned):
            break
        gc.collect()
        time.sleep(0.01)
    time.sleep(in_flight.FREED_WITHIN)
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_map) + len(in_flight._abandoned),
        "tensors": sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()),
        "in flight": len(in_flight._in_flight),
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for t in range(steps):
        model.zero_grad()
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * t + rank))
        model(x).square().mean().backward()
        optimizer.step()


def made_and_dropped(rank: int, name: str) -> list[dict[str, int]]:
    model, seen = nn.Linear(64, 80), []
    delayed = {"delay": 1} if name == ROUNDS.name else {}  # in a group made for it
    for number in range(OPTIMIZERS + 1):
        torch.manual_seed(0)
        model.reset_parameters()  # a round that is dropped leaves unequal ones
        optimizer = CHOSEN[name].make(model.named_parameters(), **delayed)
        train(model, optimizer, rank, 3)
        del optimizer
        if number in (0, OPTIMIZERS):
            dist.barrier()
            seen.append(count_what_lives())
    return seen


@pytest.mark.parametrize("name", slow_but(lambda name: name in QUICK, CHOSEN))
def test_optimizers_that_are_dropped_leave_nothing(name):
    for first, last in run_ranks(made_and_dropped, 2, name):
        assert last == first


def rebound(rank: int, folder: str) -> list[dict[str, int]]:
    """Each time over a group made anew, with a delayed exchange in flight."""
    torch.manual_seed(0)
    model, seen = nn.Linear(64, 80), []
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = compopt.LocalSteps(adamw, every=4, delay=1, fragments=2, growth_steps=0)
    for number in range(REBINDS + 2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", f"file://{folder}/{number}", rank=rank, world_size=2, timeout=FOREVER)
        optimizer.rebind()
        train(model, optimizer, rank, 4)  # rounds begin with the first step after a rebind
        assert optimizer._sync.running is not None
        if number in (1, REBINDS + 1):
            seen.append(count_what_lives())
    return seen


def test_rebinds_with_an_exchange_in_flight_leave_nothing(tmp_path):
    for first, last in run_ranks(rebound, 2, str(tmp_path)):
        for kind in ("threads", "files", "groups"):
            assert last[kind] <= first[kind], kind  # the running exchange has one
        assert last["tensors"] <= first["tensors"] + 20  # and tensors
