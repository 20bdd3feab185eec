"""A long run on four simulated ranks with faults at random: replicas equal, gradients conserved, memory flat.

Sixty steps of each class here; ``make soak`` takes 20,000 over all classes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from conservation import TOLERANCE, Ledger, everywhere
from sim import World
from table import CASES
from test_properties import Example, Run

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
                next(self.optimizers[0].rebind_as_generator(World(4).comms[0]))
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
        self.world.run([optimizer.rebind_as_generator(comm) for optimizer, comm in pairs])


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
