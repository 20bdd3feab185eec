"""Steps and runs of data-parallel training, predicted: seconds, bytes and memory of every method.

A row of the table is a method in the layout that holds it: a copy of the model on every rank, cut
over the ranks of a machine by FSDP2, or cut over several machines, where parameters and gradients
cross the slow link in every step.

``advice`` and ``diagnosis`` call it for every method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ..separate.projection_options import DEFAULT_RANK
from .hardware import (
    Machine,
    all_gather_seconds,
    all_reduce_seconds,
    message_seconds,
    ring_bytes,
)
from .losses import TOKENS_PER_PARAMETER, Measurement, nearest_measurement
from .methods import FLOAT, METHODS, WEIGHTS, Cost, Method
from .workload import Workload

BASELINE = "AdamW+DDP"
# Share of the gradient that is ready only when backward ends: its exchange is not hidden.
LAST_BUCKET = 0.1
# Share of a step that is backward: two of its three passes over the layers.
BACKWARD = 2 / 3
# Share of a device's memory for parameters, gradients and state; the rest is for activations. And
# the share for these and messages at the worst moment of a step, when activations are gone.
ROOM, PEAK_ROOM = 0.6, 0.9
# Gathers of the parameters, forward and backward, and reduce-scatters of the gradients, in FSDP2.
SHARD_EXCHANGES = 3
# Bytes of a bucket: DDP's, and the package's on accelerators.
DDP_BUCKET = 25 * 2**20
DEVICE_BUCKET, CPU_BUCKET = 128 * 2**20, 8 * 2**20
# Bytes a second of offloaded state, to, from and in host memory.
HOST_BYTES_PER_S = 10e9
# Steps of a run, where they are not given.
STEPS = 10_000


@dataclass(frozen=True)
class Step:
    """Seconds of one step: computation, the method's own work, communication it waits for."""

    compute: float
    local: float
    exchange: float

    @property
    def total(self) -> float:
        return self.compute + self.local + self.exchange


def sent_bytes(machine: Machine, cost: Cost) -> float:
    """Return the bytes that a rank sends in a step."""
    return ring_bytes(machine.ranks, cost.as_all_reduced)


def exchange_seconds(machine: Machine, cost: Cost) -> float:
    """Return the seconds per step, without latency, for which traffic that computation can hide
    occupies the link.
    """
    still = replace(machine, latency_s=0.0)
    return (
        all_reduce_seconds(still, cost.reduced)
        + machine.ranks_per_node * all_reduce_seconds(still, cost.quantized)
        + all_gather_seconds(still, cost.gathered)
    )


def step_seconds(
    machine: Machine,
    cost: Cost,
    compute_s: float,
    overlap_s: float = 0.0,
    buckets: int = 1,
    shared_link_s: float = 0.0,
) -> Step:
    """Predict one step.

    Args:
        machine: see `Machine`.
        cost: a row of `METHODS`.
        compute_s: seconds of a dense step with no communication (forward, backward and AdamW). No
            prediction is below: a method with fewer passes over memory than AdamW is not credited
            for them.
        overlap_s: seconds of the backward pass during which gradients may already travel, but for
            the last bucket; what goes out at the end of a round does not.
        buckets: messages into which the gradients are divided. The latency of the last one is
            always waited for.
        shared_link_s: seconds that other traffic occupies the same link, which forward and backward
            hide like the gradients'.

    Raises:
        ValueError: `compute_s` is not positive, or `overlap_s` is not within it.
    """
    if not 0 < compute_s < math.inf or not 0 <= overlap_s <= compute_s:
        raise ValueError(
            "compute_s must be positive and finite, and overlap_s between 0 and compute_s; "
            f"got {compute_s} and {overlap_s}."
        )
    local = max(0.0, cost.traffic) / machine.memory_bytes_per_s + cost.flops / machine.flops_per_s
    local += cost.calls + cost.host / HOST_BYTES_PER_S
    waited = 0.0
    if machine.ranks > 1:
        # However well an exchange is hidden, the slowest rank is waited for, and copying and adding
        # bytes takes time from computation.
        waited = machine.wait_share * compute_s / (cost.every or 1)
        waited += machine.lost_s_per_byte * sent_bytes(machine, cost)
    nbytes_s = exchange_seconds(machine, cost)
    latency_s = cost.exchanges * message_seconds(machine) if nbytes_s else 0.0
    if cost.every is not None:
        # A mean over a round: the part of its exchange that the steps of its delay do not hide.
        round_s = cost.every * nbytes_s + buckets * latency_s
        waited += max(0.0, round_s - cost.delay * compute_s) / cost.every
        waited += exposed_seconds(shared_link_s, 0.0, 0.0, compute_s)
        return Step(compute_s, local, waited)
    if shared_link_s:
        overlap_s = min(compute_s, overlap_s + (1 - LAST_BUCKET) * (1 - BACKWARD) * compute_s)
    others_s = (buckets - 1) * latency_s
    waited += exposed_seconds(nbytes_s + shared_link_s, latency_s, others_s, overlap_s)
    # Masks travel during the next forward and backward.
    waited += max(0.0, all_gather_seconds(machine, cost.hidden) - compute_s)
    return Step(compute_s, local, waited + all_gather_seconds(machine, cost.after_commit))


def exposed_seconds(nbytes_s: float, last_s: float, others_s: float, overlap_s: float) -> float:
    """Seconds that a step waits for: at least the last bucket, with its latency.

    Args:
        nbytes_s: seconds that all bytes occupy the link.
        last_s, others_s: latency of the last bucket's messages, and of the other buckets'.
        overlap_s: seconds that hide all but the last bucket.
    """
    return max(LAST_BUCKET * nbytes_s + last_s, nbytes_s + last_s + others_s - overlap_s)


@dataclass(frozen=True)
class Situation:
    """A model, the ranks that train it, and known quantities of both.

    Args:
        work: the model.
        machine: all ranks.
        compute_s, overlap_s: see `step_seconds`.
        shard: ranks that hold one copy of the model together; None: as few as memory asks for.
        memory_bytes: of one rank's device; None: unlimited.
        loss_budget: share by which a method's loss may exceed AdamW's.
        sources: for each number by its name, whether it was given, measured or assumed.
        steps: of the run.
        tokens_per_parameter: of the run.
        save_every: steps between two calls of ``consolidate_state()``; None: there are none.
        inside_bytes_per_s: rate at which one rank sends to the others of its machine.
        bucket_bytes: of the package's messages.
    """

    work: Workload
    machine: Machine
    compute_s: float
    overlap_s: float
    shard: int | None
    memory_bytes: float | None
    loss_budget: float
    sources: dict[str, str] = field(default_factory=dict)
    steps: int = STEPS
    tokens_per_parameter: float = TOKENS_PER_PARAMETER
    save_every: int | None = None
    inside_bytes_per_s: float = 100e9
    bucket_bytes: float = DEVICE_BUCKET

    @property
    def room_bytes(self) -> float:
        """Memory of a rank for parameters, gradients and optimizer state."""
        return math.inf if self.memory_bytes is None else ROOM * self.memory_bytes

    @property
    def peak_room_bytes(self) -> float:
        """Memory of a rank for these and messages, at the worst moment of a step."""
        return math.inf if self.memory_bytes is None else PEAK_ROOM * self.memory_bytes

    def replicas(self, shard: int) -> Machine:
        """The ranks that average a part of the model, where copies are cut over ``shard`` ranks."""
        machine, ranks = self.machine, self.machine.ranks // shard
        if machine.nodes == 1:
            inside = self.inside_bytes_per_s
            return replace(machine, ranks=ranks, ranks_per_node=1, link_bytes_per_s=inside)
        return replace(machine, ranks=ranks, ranks_per_node=max(1, machine.ranks_per_node // shard))


@dataclass(frozen=True)
class Row:
    """Prediction of one method: bytes, memory, the parts of its step, and its run.

    Args:
        method: its name in `METHODS`.
        ours: whether it is a class of this package.
        shard: ranks that hold one copy of the model.
        sent: bytes that leave a rank in a compressed step, of ring collectives, with those of a
            copy that is cut over machines; of local steps the mean over a round.
        step: seconds of such a step: computation, own work, exposed communication.
        run_s: seconds of the whole run, with its dense start, or with its rounds while they grow,
            and with its saves.
        run_sent: bytes of the whole run.
        saves_sent: of these, what ``consolidate_state()`` sends before saves.
        state: bytes of optimizer state a rank.
        peak_bytes: bytes of parameters, gradients, state and messages a rank, at the worst moment
            of a step.
        fits: whether there is room for these, between steps and at that moment.
        measurement: of the loss, the nearest one.
        shard_s: seconds that parameters and gradients of a cut copy occupy the slow link in a step.
        baseline: AdamW's row; None in that row itself.
    """

    method: str
    ours: bool
    shard: int
    sent: float
    step: Step
    run_s: float
    run_sent: float
    saves_sent: float
    state: float
    peak_bytes: float
    fits: bool
    measurement: Measurement | None
    shard_s: float
    baseline: Row | None = field(default=None, repr=False)

    @property
    def losses_key(self) -> str:
        """Key of its losses in `losses.LOSSES`."""
        return METHODS[self.method].losses or self.method

    @property
    def loss(self) -> float | None:
        """Final loss over AdamW's as it was measured; None where it was not."""
        if self.measurement:
            return self.measurement.ratio
        return 1.0 if self.baseline is None else None

    @property
    def speedup(self) -> float:
        """Speed-up of a compressed step over AdamW's."""
        return (self.baseline or self).step.total / self.step.total

    @property
    def run(self) -> float:
        """Speed-up of the whole run."""
        return (self.baseline or self).run_s / self.run_s

    @property
    def run_bytes(self) -> float:
        """Share of AdamW's bytes that the whole run sends."""
        dense = (self.baseline or self).run_sent
        return self.run_sent / dense if dense else 1.0

    @property
    def is_bound_by_shards(self) -> bool:
        """True if sending shards of one copy over the slow link takes longer than computing."""
        return self.shard_s > self.step.compute


def count_bytes(situation: Situation, method: Method, shard: int) -> tuple[float, float]:
    """Return the bytes on each rank of parameters, gradients and state, and those with messages at
    the worst moment of a step.
    """
    part = situation.work.shard(shard)
    cost = method(part, situation.replicas(shard).ranks)
    held = WEIGHTS * part.parameters + part.frozen_bytes + cost.state
    return held, held + cost.peak


def has_room(situation: Situation, method: Method, shard: int) -> bool:
    held, peak = count_bytes(situation, method, shard)
    return held <= situation.room_bytes and peak <= situation.peak_room_bytes


@lru_cache
def list_divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def choose_shard(situation: Situation, method: Method) -> int:
    """Ranks over which a copy is cut: none if it fits on one, else a machine's, else as few
    machines as hold it; 1 where nothing does. Methods of this package cut it over a machine's ranks
    at least, where there are several machines.
    """
    if situation.shard is not None:
        return situation.shard
    node = situation.machine.ranks_per_node
    layouts = [1, *(node * n for n in list_divisors(situation.machine.ranks // node))]
    if method.ours and 1 < node < situation.machine.ranks:
        # Ranks that share a link send a part each, not the same message each.
        layouts = layouts[1:]
    if method.instead_of:
        layouts = [1]
    return next((n for n in layouts if has_room(situation, method, n)), 1)


def shard_seconds(situation: Situation, shard: int) -> tuple[float, float]:
    """Seconds a step that a cut copy occupies the links inside the machines, and between them."""
    work = situation.work
    nbytes = SHARD_EXCHANGES * FLOAT * work.parameters + (SHARD_EXCHANGES - 1) * work.frozen_bytes
    machine, inside = situation.machine, min(shard, situation.machine.ranks_per_node)
    inside_s = nbytes * (inside - 1) / inside / situation.inside_bytes_per_s
    nodes = shard // inside
    between_s = nbytes * (nodes - 1) / nodes / (inside * machine.link_bytes_per_s)
    return inside_s, between_s


def predict_rows(situation: Situation) -> list[Row]:
    """Predict every method in this situation. It is also offloaded where it does not fit without
    crossing the link, but not where copies are to be cut: an offloaded method takes whole ones.
    Where all matrices are too narrow to be projected, the row of the default rank stands for all.
    """
    is_cut = situation.shard not in (None, 1)
    baseline = predict_row(situation, BASELINE, None)
    rows = {BASELINE: baseline}
    for name, method in METHODS.items():
        plain = rows.get(method.instead_of)
        is_needless = plain is not None and (is_cut or (plain.fits and not plain.shard_s))
        if "rank" in method.options:
            at_default_rank = method(situation.work, situation.machine.ranks, rank=DEFAULT_RANK)
            is_needless = method(situation.work, situation.machine.ranks) == at_default_rank
        if name != BASELINE and not is_needless:
            rows[name] = predict_row(situation, name, baseline)
    return list(rows.values())


def predict_row(situation: Situation, name: str, baseline: Row | None) -> Row:
    method = METHODS[name]
    shard = choose_shard(situation, method)
    part, replicas = situation.work.shard(shard), situation.replicas(shard)
    inside_s, between_s = shard_seconds(situation, shard)
    bucket = DDP_BUCKET if method.ddp_buckets else situation.bucket_bytes
    buckets = max(1, math.ceil(FLOAT * part.parameters / bucket))
    compute = situation.compute_s
    # Inside a machine all of forward and backward hide the shards' traffic, but for the last unit.
    exposed = exposed_seconds(inside_s, 0.0, 0.0, (1 - LAST_BUCKET) * compute)
    shard_bytes = between_s * replicas.link_bytes_per_s

    def predict_step(cost: Cost) -> tuple[Step, float]:
        """The step, and the bytes that a rank sends in it."""
        step = step_seconds(replicas, cost, compute, situation.overlap_s, buckets, between_s)
        sent = sent_bytes(replicas, cost) + shard_bytes
        return replace(step, exchange=step.exchange + exposed), sent

    run_s = run_sent = 0.0
    for number, cost in method.phases(part, replicas.ranks, situation.steps):
        step, sent = predict_step(cost)
        run_s, run_sent = run_s + number * step.total, run_sent + number * sent
    cost = method(part, replicas.ranks)
    step, sent = predict_step(cost)
    saves = situation.steps // situation.save_every if situation.save_every else 0
    saves_sent = saves * ring_bytes(replicas.ranks, cost.save)
    run_s += saves * all_reduce_seconds(replicas, cost.save)
    key, size = method.losses or name, situation.work.parameters
    measurement = nearest_measurement(key, size, replicas.ranks, situation.tokens_per_parameter)
    return Row(
        method=name,
        ours=method.ours,
        shard=shard,
        sent=sent,
        step=step,
        run_s=run_s,
        run_sent=run_sent + saves_sent,
        saves_sent=saves_sent,
        state=cost.state,
        peak_bytes=count_bytes(situation, method, shard)[1],
        fits=has_room(situation, method, shard),
        measurement=measurement,
        shard_s=between_s,
        baseline=baseline,
    )
