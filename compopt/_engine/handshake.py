"""The handshake: ranks compare their optimizers before they rely on each other.

It runs in the first step, and in the step after a checkpoint was loaded, a group was added, an
option that decides what is sent was changed, or a collective failed. Ranks gather a few checksums.
If these differ, ranks gather descriptions as JSON, never pickles, and all raise the same error.
Between handshakes some bits of the settings' checksum are among the control fields of every
payload; ranks that differ there gather their descriptions, too.

The handshake is another kind of collective than a payload's, so gloo never pairs the two if only
some ranks start a handshake: they wait until the timeout of the group, and raise.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._state.tensors import to_local
from .._wire.collectives import Communicator
from .._wire.requests import AllGather, CommunicationError
from .collective_generators import CollectiveGenerator, exchange_one
from .decision import StepDecision
from .session import Session

VALUES = "checksum of its values"  # the name of a Fact


class Checksums(NamedTuple):
    """One rank's numbers, which the handshake compares."""

    description: int
    gradients: int  # 0 if there are none
    masks: int
    backend: int
    is_backend_automatic: int  # not chosen by the user
    dense_time: int  # the result of a trial (when="auto"), in nanoseconds; 0 until it ends
    compressed_time: int


class Fact(NamedTuple):
    """A line of an optimizer's description."""

    subject: str
    name: str
    value: str


# Between steps


def verify_peers(
    session: Session, comm: Communicator, has_problem: bool = False
) -> CollectiveGenerator[bool]:
    """Compare this rank's optimizer with those of all ranks.

    Returns True if any rank had gradients to compare. ``has_problem``: this rank cannot send its
    gradients; all ranks learn of it in the exchange that follows.

    Raises ValueError if ranks differ, RuntimeError if something else has averaged the gradients.
    """
    dense_time, compressed_time = (session.trial and session.trial.compute_medians()) or (0, 0)
    names = session.optimizer.mask_state
    masks = [bucket.flat[name] for bucket in session.buckets for name in names]
    local_checksums = Checksums(
        description=_checksum_text(describe_optimizer(session)),
        gradients=0 if has_problem else _checksum_gradients(session),
        masks=_checksum_text([checksum_values(flat) for flat in masks]),
        backend=_checksum_text(session.ops.name),
        is_backend_automatic=session.ops.automatic,
        dense_time=dense_time,
        compressed_time=compressed_time,
    )
    numbers = torch.tensor(local_checksums, dtype=torch.int64, device="cpu").to(session.device)
    gathered = yield from exchange_one(comm, AllGather(numbers))
    rows = [Checksums(*row) for row in gathered.tolist()]
    if _differ(row.backend for row in rows) and all(row.is_backend_automatic for row in rows):
        session.use_pytorch()
        return (yield from verify_peers(session, comm, has_problem))
    if _differ(row.description for row in rows):
        yield from raise_mismatch(session, comm)
    if _differ(row.masks for row in rows):  # some ranks lost theirs
        session.forget_masks()
    times = [[row.dense_time, row.compressed_time] for row in rows]
    if session.trial is not None and all(map(all, times)):
        session.trial.compare_medians(times)
    if comm.size > 1 and local_checksums.gradients and not _differ(row.gradients for row in rows):
        _report_equal_gradients(session, comm)
    return comm.size == 1 or any(row.gradients for row in rows)


def _differ(numbers: Iterator[int]) -> bool:
    return len(set(numbers)) > 1


def _report_equal_gradients(session: Session, comm: Communicator) -> None:
    """Warn once that ranks train on the same data, if DDP did not average their gradients; else
    raise RuntimeError.
    """
    if not session.has_local_gradients:
        raise RuntimeError(
            "all ranks hold bit-identical gradients: something averaged them before step(), or "
            "all ranks train on the same data. If DistributedDataParallel wraps the model, call "
            "compopt.attach(ddp_model, optimizer) before the first backward; if FSDP reduces over "
            "this group, pass process_group= the group it does not reduce over; if the data is "
            "the same, give each rank its own. On CPUs Accelerate and the Trainer give all ranks "
            "the same data unless told Accelerator(cpu=True) or use_cpu=True."
        )
    session.warn_once(
        "same data",
        f"all {comm.size} ranks hold bit-identical gradients: they train on the same data, and "
        "learn no more than a single one. Likely causes: no DistributedSampler, or the same "
        "random seed on all ranks. Give each rank its own data, by DataLoader(dataset, "
        "sampler=DistributedSampler(dataset)) or by a seed that depends on the rank.",
        comm.rank,
    )


def warn_if_without_gradients(session: Session, decision: StepDecision) -> None:
    """Warn once on a rank without gradients in a step in which other ranks had some."""
    reads_grad = session.optimizer.fsdp_backward is None
    if session.comm.size == 1 or not reads_grad or not session.has_data:
        return
    if any(p.grad is not None for bucket in session.buckets for p in bucket.params):
        return
    exchanges = decision.exchanges
    if any(any(one.bucket.have_gradients(one.agreement.payload)) for one in exchanges):
        warn_without_gradients(session, session.steps, "counts as zeros in the mean over ranks")


def warn_without_gradients(session: Session, step: int, consequence: str) -> None:
    """Warn once that this rank had no gradients; ``consequence`` completes "it ..."."""
    session.warn_once(
        "no gradients",
        f"rank {session.comm.rank} had no gradients in step {step}: it {consequence}. Call "
        "backward() on every rank before step().",
        0,  # warn on this rank, whatever its number
    )


# The facts and checksums that ranks compare


def describe_optimizer(session: Session) -> list[Fact]:
    """List everything that must be equal on all ranks.

    Facts that explain others come first: the class before its options, shapes before values.
    """
    facts = []
    for subject, values in session.settings:
        plain = values if isinstance(values, dict) else {"": values}
        facts += [Fact(subject, name, repr(value)) for name, value in sorted(plain.items())]
    facts.append(Fact("", "check_replicas_every", repr(session.optimizer.check_replicas_every)))
    names, layouts, checksums = [], [], []
    located = {
        p: (name, is_compressed)
        for bucket in [*session.buckets, *session.frozen_buckets]
        for p, name, is_compressed in zip(
            bucket.params, bucket.names, bucket.compressed, strict=True
        )
    }
    params = (p for group in session.option_groups for p in group["params"])
    for i, p in enumerate(params):
        name, is_compressed = located[p]
        names.append(Fact(f"parameter {i}", "", name))
        layout = dict(
            shape=tuple(p.shape),
            dtype=p.dtype,
            requires_grad=p.requires_grad,
            compress=is_compressed,
        )
        layouts += [Fact(name, what, str(value)) for what, value in layout.items()]
        if session.optimizer.has_equal_replicas:
            checksums.append(Fact(name, VALUES, str(checksum_values(to_local(p.detach())))))
    return facts + names + layouts + checksums


def _checksum_text(text: object) -> int:
    return zlib.crc32(str(text).encode())


def checksum_values(tensor: Tensor) -> int:
    """Compute a number that is equal for tensors with equal bits."""
    # the strides of a tensor of one element or none may be anything
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    raw = flat.view(torch.uint8)
    return int((raw.view(torch.int16) if raw.numel() % 2 == 0 else raw).sum(dtype=torch.int64))


def _checksum_gradients(session: Session) -> int:
    """Compute a number that is equal on ranks whose gradients have equal bits; 0 if there is
    nothing to compare.

    Gradients that are zero or not finite do not count: they may be equal on ranks with different
    data.
    """
    sums = []
    for p in chain.from_iterable(bucket.params for bucket in session.buckets):
        g = None if p.grad is None else to_local(p.grad)
        counts = g is not None and bool(g.any()) and bool(g.isfinite().all())
        sums.append(checksum_values(g) or 1 if counts and g is not None else 0)
    return _checksum_text(sums) + 1 if any(sums) else 0


# Errors that all ranks raise


def raise_mismatch(session: Session, comm: Communicator) -> CollectiveGenerator[NoReturn]:
    """Gather the descriptions, and raise a ValueError that names the first difference."""
    gathered = yield from gather_json(describe_optimizer(session), session.device, comm)
    descriptions = [[Fact(*fact) for fact in facts] for facts in gathered]
    for rank, facts in enumerate(descriptions):
        if message := _explain_difference(descriptions[0], facts, rank):
            raise ValueError(f"ranks differ, and nothing was applied. {message}")
    raise ValueError(
        "ranks differed in an option of their parameter groups at this step, and nothing was "
        "applied. They are equal by now: change options on all ranks before the same step."
    )


def _explain_difference(first: list[Fact], other: list[Fact], rank: int) -> str:
    """Name the first difference between rank 0 and ``rank``; empty if they agree."""
    values, others = ({fact[:2]: fact.value for fact in facts} for facts in (first, other))
    different = [key for key in values | others if values.get(key) != others.get(key)]
    if not different:
        return ""
    steps = [key for key in different if key[1] == "step"]
    subject, name = (steps or different)[0]
    a, b = (known.get((subject, name), "nothing") for known in (values, others))
    if steps:
        return (
            f"Rank 0 has taken {a} steps, rank {rank} has taken {b} ({subject}): call step() "
            "equally often on all ranks, and load the same checkpoint on all of them."
        )
    advice = "Make them equal."
    if name == VALUES:
        advice = (
            "Start all ranks from the same weights: load the same checkpoint, or pass the "
            "parameters of DistributedDataParallel, which broadcasts rank 0's."
        )
    elif name in ("", "shape", "dtype"):
        advice = "Build the same model and the same optimizer on all ranks."
    what = ", ".join(filter(None, [subject, name]))
    return f"{what}: rank 0 has {a}, rank {rank} has {b}. {advice}"


def raise_failure(
    session: Session, comm: Communicator, failure: str
) -> CollectiveGenerator[NoReturn]:
    """Gather why ranks could not send their gradients, and raise a CommunicationError that quotes
    all of them.

    ``failure``: the error of this rank; empty if it had none. It is text, because the frames of an
    exception and this one would refer to each other.
    """
    failures = yield from gather_json(failure, session.device, comm)
    failed = [f"rank {rank} ({text})" for rank, text in enumerate(failures) if text]
    raise CommunicationError(
        f"the gradients of {', '.join(failed) or 'another shard'} could not be sent, and nothing "
        "was applied: correct the error of that rank, and call step() again on all ranks."
    )


# Collectives


def gather_json(
    value: object, device: torch.device, comm: Communicator
) -> CollectiveGenerator[list[Any]]:
    """Gather ``value`` of every rank."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([text.numel()], dtype=torch.int64, device=device)
    sizes = (yield from exchange_one(comm, AllGather(size))).view(-1).tolist()
    padded = torch.cat([text, text.new_zeros(max(sizes) - text.numel())])
    rows = yield from exchange_one(comm, AllGather(padded))
    return [
        json.loads(bytes(row[:size].tolist())) for row, size in zip(rows.cpu(), sizes, strict=True)
    ]
