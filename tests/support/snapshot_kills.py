"""Ranks that are killed at a random moment around ``save()``, and others that resume from what they left.

Each trial is on real ranks (gloo). One is killed by SIGKILL; the others raise, and end. What resumes on as many ranks
has to go on from the newest snapshots that are complete on all of them, to the bit: every rank ends where the same
rank of a run that nothing disturbed ends.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from conformance import Small
from ranks import _context, be_patient
from snapshot_faults import Position
from table import by_name
from torch.nn.parallel import DistributedDataParallel as DDP

from compopt.integrations._snapshot_files import is_complete, list_snapshots
from compopt.integrations.snapshots import Snapshots

STEPS, EVERY = 12, 2
LIMIT = 60  # seconds for all ranks of a run


def train(rank: int, size: int, folder: Path, name: str, kill_after: float | None) -> None:
    """Resume, and train to the last step; after ``kill_after`` seconds in a random save this process is killed."""
    be_patient()
    os.dup2(os.open(folder / f"errors {rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    warnings.simplefilter("ignore")
    os.environ["COMPOPT_QUIET"] = "1"
    file = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    model = DDP(Small(), find_unused_parameters=True)
    optimizer, position = by_name[name].make(model.parameters()), Position()
    snapshots = Snapshots(folder / f"node {rank}", model, optimizer, data=position)
    begun, states = snapshots.resume(), {}
    assert position.taken == begun
    victim = random.Random(kill_after).randrange(1, STEPS // EVERY)
    for step in range(begun, STEPS):
        if step == victim * EVERY and kill_after is not None:
            threading.Thread(target=kill_me, args=(kill_after,)).start()
        if step and step % EVERY == 0 and step > begun:
            snapshots.save()
        optimizer.zero_grad()
        model.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        position.taken = step + 1
        states[step + 1] = checksum(model)
    snapshots.close()
    (folder / f"answer {rank}").write_text(json.dumps([begun, states]))
    dist.barrier()
    os._exit(0)


def kill_me(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def loss_of(model: DDP, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(x) - x.flip(1)).square().mean()


def checksum(model: DDP) -> str:
    total = hashlib.sha256()
    for p in model.parameters():
        total.update(bytes(p.detach().contiguous().view(torch.uint8).flatten().tolist()))
    return total.hexdigest()


def run(size: int, folder: Path, name: str, kill_after: float | None = None, victim: int = 0) -> list:
    """Return what every rank tells, None where it was killed or raised."""
    for path in [folder / "rendezvous", *folder.glob("answer *")]:
        path.unlink(missing_ok=True)
    workers = [
        _context.Process(target=train, args=(rank, size, folder, name, kill_after if rank == victim else None))
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    end = time.monotonic() + LIMIT
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()
    answers = [folder / f"answer {rank}" for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else None for path in answers]


@functools.cache
def undisturbed(size: int, name: str) -> list[dict[str, str]]:
    """Return the checksum of every rank's parameters after each step."""
    with tempfile.TemporaryDirectory() as folder:
        answers = run(size, Path(folder), name)
    assert None not in answers and all(begun == 0 for begun, _ in answers), answers
    return [states for _, states in answers]


def complete_steps(node: Path) -> list[int]:
    """Return the steps of a rank's complete snapshots."""
    return sorted({s.step for s in list_snapshots(node) if is_complete(node, s)})


def kill_and_resume(size: int, name: str, rng: random.Random) -> str:
    """Return what was seen. Raises AssertionError where the resumed run is another than the undisturbed one."""
    expected = undisturbed(size, name)
    with tempfile.TemporaryDirectory() as place:
        folder, victim = Path(place), rng.randrange(size)
        kill_after = rng.choice([0.001, 0.01, 0.03, 0.1]) * rng.random()
        run(size, folder, name, kill_after, victim)
        steps = [complete_steps(folder / f"node {rank}") for rank in range(size)]
        common = set.intersection(*map(set, steps))
        at = max(common or set().union(*steps), default=0)
        resumed = run(size, folder, name)
        what = f"{name} on {size} ranks, {kill_after * 1000:.1f} ms: complete {steps}, resumed at {at}"
        errors = "".join((folder / f"errors {rank}").read_text()[-2000:] for rank in range(size))
        assert None not in resumed, f"{what}: {resumed}\n{errors}"
        for rank, (begun, states) in enumerate(resumed):
            assert begun == at, f"{what}: rank {rank} resumed at {begun}"
            if at and not common:
                continue  # the parts of a rank are lost
            differing = [step for step, state in states.items() if state != expected[rank][step]]
            assert not differing, f"{what}: rank {rank} differs after steps {differing}"
            assert begun == STEPS or str(STEPS) in states
        return what + ", ranks had different ones" * (steps != [steps[0]] * size)
