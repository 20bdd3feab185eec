"""Steps and runs of data-parallel training, predicted: seconds, bytes and memory of every method.

A row of the table is a method in the layout that holds it: a copy of the model on every rank, cut
over the ranks of a machine by FSDP2, or cut over several machines, where parameters and gradients
cross the slow link in every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from .hardware import Machine, all_gather_seconds, all_reduce_seconds, message_seconds
from .losses import TOKENS_PER_PARAMETER, Measurement, nearest_measurement
from .methods import FLOAT, METHODS, WEIGHTS, Cost, Method, Workload

BASELINE = "AdamW+DDP"
# Share of the gradient that is ready only when backward ends: its exchange is not hidden.
LAST_BUCKET = 0.1
# Share of a step that is backward: two of its three passes over the layers.
BACKWARD = 2 / 3
# Share of a device's memory for parameters, gradients and state; the rest is for activations.
ROOM = 0.6
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
    """Return the bytes that a rank sends in a step: 2 (N-1)/N of all-reduced bytes, (N-1)/N of
    gathered ones.
    """
    twice, once = cost.reduced + cost.quantized, cost.gathered + cost.after_commit + cost.hidden
    return (machine.ranks - 1) / machine.ranks * (2 * twice + once)


def exchange_seconds(machine: Machine, cost: Cost) -> float:
    """Seconds that what computation may hide occupies the link in a step, without latency."""
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
    waited = _interference_seconds(machine, cost, compute_s)
    if cost.every is not None:
        waited += _round_seconds(machine, cost, compute_s, buckets)
        waited += _exposed(shared_link_s, 0.0, 0.0, compute_s)
        return Step(compute_s, local, waited)
    nbytes_s = exchange_seconds(machine, cost)
    latency_s = cost.exchanges * message_seconds(machine) if nbytes_s else 0.0
    if shared_link_s:
        overlap_s = min(compute_s, overlap_s + (1 - LAST_BUCKET) * (1 - BACKWARD) * compute_s)
    waited += _exposed(nbytes_s + shared_link_s, latency_s, (buckets - 1) * latency_s, overlap_s)
    # Masks travel during the next forward and backward.
    waited += max(0.0, all_gather_seconds(machine, cost.hidden) - compute_s)
    return Step(compute_s, local, waited + all_gather_seconds(machine, cost.after_commit))


def _exposed(nbytes_s: float, last_s: float, others_s: float, overlap_s: float) -> float:
    """Seconds that a step waits for: at least the last bucket, with its latency.

    Args:
        nbytes_s: seconds that all bytes occupy the link.
        last_s, others_s: latency of the last bucket's messages, and of the other buckets'.
        overlap_s: seconds that hide all but the last bucket.
    """
    return max(LAST_BUCKET * nbytes_s + last_s, nbytes_s + last_s + others_s - overlap_s)


def _interference_seconds(machine: Machine, cost: Cost, compute_s: float) -> float:
    """Seconds that an exchange costs a step however well it is hidden: the slowest rank is waited
    for, and copying and adding bytes takes time from computation.
    """
    if machine.ranks == 1:
        return 0.0
    waited = machine.wait_share * compute_s / (cost.every or 1)
    return waited + machine.lost_s_per_byte * sent_bytes(machine, cost)


def _round_seconds(machine: Machine, cost: Cost, compute_s: float, buckets: int) -> float:
    """Seconds a step, as a mean over a round: the part of its exchange that the steps of its delay
    do not hide.
    """
    every = cost.every or 1
    nbytes_s = every * exchange_seconds(machine, cost)
    latency_s = buckets * cost.exchanges * message_seconds(machine) if nbytes_s else 0.0
    return max(0.0, nbytes_s + latency_s - cost.delay * compute_s) / every


def training_speedup(dense: float, compressed: float, warmup_share: float = 0.0) -> float:
    """Speed-up of a whole training whose first `warmup_share` of steps stay dense."""
    if not 0 <= warmup_share <= 1:
        raise ValueError(f"warmup_share must be between 0 and 1; got {warmup_share}.")
    return dense / (warmup_share * dense + (1 - warmup_share) * compressed)


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
    inside_bytes_per_s: float = 100e9
    bucket_bytes: float = DEVICE_BUCKET

    @property
    def room_bytes(self) -> float:
        """Memory of a rank for parameters, gradients and optimizer state."""
        return math.inf if self.memory_bytes is None else ROOM * self.memory_bytes

    def replicas(self, shard: int) -> Machine:
        """The ranks that average a part of the model, where copies are cut over ``shard`` ranks."""
        machine, ranks = self.machine, self.machine.ranks // shard
        if machine.nodes == 1:
            inside = self.inside_bytes_per_s
            return replace(machine, ranks=ranks, ranks_per_node=1, link_bytes_per_s=inside)
        return replace(machine, ranks=ranks, ranks_per_node=max(1, machine.ranks_per_node // shard))


@dataclass(frozen=True)
class Row:
    """Prediction of one method: bytes, state, the parts of its step, and its run.

    Args:
        method: its name in `METHODS`.
        sent: bytes that leave a rank in a compressed step, of ring collectives, with those of a
            copy that is cut over machines; of local steps the mean over a round.
        step: seconds of such a step: computation, own work, exposed communication.
        speedup: of such a step over AdamW's.
        run: speed-up of the whole run, with its dense start, or with its rounds while they grow.
        run_bytes: share of AdamW's bytes that the whole run sends.
        state: bytes of optimizer state a rank.
        loss: final loss over AdamW's in the nearest measurement, else None.
        ours: whether it is a class of this package.
        fits: whether parameters, gradients and state fit into the memory that is left for them.
        run_s: seconds of the whole run.
        shard: ranks that hold one copy of the model.
        held_bytes: bytes of parameters, gradients and state a rank.
        measurement: where ``loss`` is from.
        expected_loss: ``loss``, with an allowance for the distance of that measurement.
        shard_s: seconds that parameters and gradients of a cut copy occupy the slow link in a step.
    """

    method: str
    sent: float
    step: Step
    speedup: float
    run: float
    run_bytes: float
    state: float
    loss: float | None
    ours: bool
    fits: bool
    run_s: float = 0.0
    shard: int = 1
    held_bytes: float = 0.0
    measurement: Measurement | None = None
    expected_loss: float | None = None
    shard_s: float = 0.0

    @property
    def is_bound_by_shards(self) -> bool:
        """True if sending shards of one copy over the slow link takes longer than computing."""
        return self.shard_s > self.step.compute


def count_held_bytes(situation: Situation, method: Method, shard: int) -> tuple[float, float]:
    """Return the bytes on each rank of parameters, gradients and state, and of state only."""
    part = situation.work.shard(shard)
    state = method(part, situation.replicas(shard).ranks).state
    return WEIGHTS * part.parameters + state, state


def choose_shard(situation: Situation, method: Method) -> int:
    """Ranks over which a copy is cut: none if it fits on one, else a machine's, else as few
    machines as hold it; 1 where nothing does.
    """
    if situation.shard is not None:
        return situation.shard
    ranks, node = situation.machine.ranks, situation.machine.ranks_per_node
    layouts = [1, *(n for n in range(node, ranks + 1, node) if ranks % n == 0)]
    if method.instead_of:
        layouts = [1]
    return next(
        (n for n in layouts if count_held_bytes(situation, method, n)[0] <= situation.room_bytes), 1
    )


def shard_seconds(situation: Situation, shard: int) -> tuple[float, float]:
    """Seconds a step that a cut copy occupies the links inside the machines, and between them."""
    nbytes = SHARD_EXCHANGES * FLOAT * situation.work.parameters
    machine, inside = situation.machine, min(shard, situation.machine.ranks_per_node)
    inside_s = nbytes * (inside - 1) / inside / situation.inside_bytes_per_s
    nodes = shard // inside
    between_s = nbytes * (nodes - 1) / nodes / (inside * machine.link_bytes_per_s)
    return inside_s, between_s


def predict_rows(situation: Situation) -> list[Row]:
    """Every method in this situation; offloaded where it does not fit without crossing the link."""
    baseline = _predict(situation, BASELINE, None)
    rows = {BASELINE: _relative(baseline, baseline)}
    for name, method in METHODS.items():
        plain = rows.get(method.instead_of)
        if name == BASELINE or (plain and plain.fits and not plain.shard_s):
            continue
        rows[name] = _relative(_predict(situation, name, baseline), baseline)
    return list(rows.values())


@dataclass(frozen=True)
class _Prediction:
    row: Row
    run_bytes: float


def _predict(situation: Situation, name: str, baseline: _Prediction | None) -> _Prediction:
    """A row, its speed-ups not yet known, and the bytes of the run."""
    method = METHODS[name]
    shard = choose_shard(situation, method)
    held, state = count_held_bytes(situation, method, shard)
    part, replicas = situation.work.shard(shard), situation.replicas(shard)
    inside_s, between_s = shard_seconds(situation, shard)
    bucket = DDP_BUCKET if method.ddp_buckets else situation.bucket_bytes
    buckets = max(1, math.ceil(FLOAT * part.parameters / bucket))
    compute = situation.compute_s
    # Inside a machine all of forward and backward hide the shards' traffic, but for the last unit.
    exposed = _exposed(inside_s, 0.0, 0.0, (1 - LAST_BUCKET) * compute)

    def step_of(cost: Cost) -> Step:
        step = step_seconds(replicas, cost, compute, situation.overlap_s, buckets, between_s)
        return replace(step, exchange=step.exchange + exposed)

    phases = method.phases(part, replicas.ranks, situation.steps)
    cost = method(part, replicas.ranks)
    shard_bytes = between_s * replicas.link_bytes_per_s
    key, size = method.losses or name, situation.work.parameters
    measurement = nearest_measurement(key, size, replicas.ranks, situation.tokens_per_parameter)
    loss = expected_loss = 1.0 if name == BASELINE else None
    if measurement:
        loss, expected_loss = measurement.ratio, measurement.allow_for_size(size)
    row = Row(
        name,
        sent_bytes(replicas, cost) + shard_bytes,
        step_of(cost),
        1.0,
        1.0,
        1.0,
        state,
        loss,
        method.ours,
        held <= situation.room_bytes,
        sum(n * step_of(phase).total for n, phase in phases),
        shard,
        held,
        measurement,
        expected_loss,
        between_s,
    )
    run_bytes = sum(n * (sent_bytes(replicas, phase) + shard_bytes) for n, phase in phases)
    return _Prediction(row, run_bytes)


def _relative(one: _Prediction, baseline: _Prediction) -> Row:
    row, dense = one.row, baseline.row
    return replace(
        row,
        speedup=dense.step.total / row.step.total,
        run=dense.run_s / row.run_s,
        run_bytes=one.run_bytes / baseline.run_bytes if baseline.run_bytes else 1.0,
    )
