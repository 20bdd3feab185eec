"""The handshake: ranks compare their optimizers before they rely on each other.

It runs in the first step, and in the step after a checkpoint was loaded, a group was added, an
option that decides what is sent was changed, or a collective failed. Ranks gather their versions
and a few checksums, in a message of one size in every version. If checksums differ, ranks gather
descriptions as JSON, never pickles, and all raise the same error.

Between handshakes some bits of the settings' checksum are among the control fields of every
payload; ranks that differ there gather their descriptions, too.

The handshake is another kind of collective than a payload's, so gloo never pairs the two if only
some ranks start a handshake: they wait until the timeout of the group, and raise. The message of a
sync of local steps is of the same kind. Both say what they are, and have one size: where they are
paired, all ranks raise.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._state.tensors import has_gradient_hook, to_local, view_bytes
from .._wire.collectives import Communicator
from .._wire.payload import CACHE_ELEMENTS, choose_block_size
from .._wire.requests import AllGather, CallsDiffer, CommunicationError
from .decision import StepDecision
from .engine import Engine
from .exchange import exchange_one
from .settings import list_settings

VALUES = "checksum of its values"  # a name in a description
HANDSHAKE, SYNC, SAVE, CONSOLIDATION = 1, 2, 3, 4  # kinds of messages
CALLS = {SAVE: "save() of Snapshots", CONSOLIDATION: "consolidate_state()"}
# Of 8 bytes: the words of a message, and the first of them, which hold the versions of its rank.
MESSAGE, VERSION_WORDS = 16, 5

# what must be equal on all ranks, by what it is of and its name: "group 0, lr"
Description = dict[str, str]


class Checksums(NamedTuple):
    """One rank's numbers, which the handshake compares, and its rank."""

    rank: int
    description: int
    gradients: int  # 0 if there are none
    masks: int
    backend: int
    is_backend_automatic: int  # not chosen by the user
    dense_time: int  # the result of a trial (when="auto"), in nanoseconds; 0 until it ends
    compressed_time: int
    has_hooks: int  # its parameters have hooks that read gradients in backward


# Between steps


def compare_optimizers(
    engine: Engine,
    comm: Communicator,
    has_problem: bool = False,
    has_fallen_back: bool = False,
) -> bool:
    """Compare this rank's optimizer with those of all ranks.

    Returns True if any rank had gradients to compare. ``has_problem``: this rank cannot send its
    gradients; all ranks learn of it in the exchange that follows. ``has_fallen_back``: to PyTorch's
    operators, because ranks had chosen different backends.

    Raises ValueError if ranks differ, RuntimeError if something else has averaged the gradients.
    """
    dense_time, compressed_time = (engine.trial and engine.trial.compute_medians()) or (0, 0)
    names = engine.method.mask_state
    masks = [bucket.flat[name] for bucket in engine.buckets for name in names]
    local_checksums = Checksums(
        rank=comm.rank,
        description=checksum_text(describe_optimizer(engine)),
        gradients=0 if has_problem else _checksum_gradients(engine),
        masks=checksum_text([checksum_values(flat) for flat in masks]),
        backend=checksum_text(engine.ops.name),
        is_backend_automatic=engine.ops.automatic,
        dense_time=dense_time,
        compressed_time=compressed_time,
        has_hooks=any(has_gradient_hook(p) for b in engine.buckets for p in b.params),
    )
    checksums = torch.tensor(local_checksums, dtype=torch.int64, device="cpu").to(engine.device)
    gathered = exchange_one(comm, AllGather(pack_message(HANDSHAKE, checksums)))
    gathered = gathered.cpu()
    _compare_versions(gathered[:, :VERSION_WORDS].tolist())
    rows = [Checksums(*row) for row in unpack_messages(gathered, len(checksums)).tolist()]
    _check_rank_numbers([row.rank for row in rows])
    if _differ(row.backend for row in rows) and all(row.is_backend_automatic for row in rows):
        if has_fallen_back:
            raise_mismatch(engine, comm)
        engine.use_pytorch()
        return compare_optimizers(engine, comm, has_problem, has_fallen_back=True)
    if _differ(row.description for row in rows):
        raise_mismatch(engine, comm)
    if _differ(row.masks for row in rows):  # some ranks lost theirs
        engine.forget_masks(names)
    engine.waits_in_backward = any(row.has_hooks for row in rows)
    times = [[row.dense_time, row.compressed_time] for row in rows]
    if engine.trial is not None and all(map(all, times)):
        engine.trial.compare_medians(times)
    if comm.size > 1 and local_checksums.gradients and not _differ(row.gradients for row in rows):
        _report_equal_gradients(engine, comm)
    return comm.size == 1 or any(row.gradients for row in rows)


def pack_message(kind: int, numbers: Tensor) -> Tensor:
    """Return a message of this kind, whose ``numbers`` have 8 bytes each, after the versions."""
    begin = torch.tensor([*encode_versions(), kind], dtype=torch.int64, device="cpu")
    words = torch.cat([begin.to(numbers.device), numbers.view(torch.int64)])
    message = words.new_zeros(MESSAGE)
    message[: len(words)] = words
    return message


def unpack_messages(rows: Tensor, count: int) -> Tensor:
    """Return the ``count`` numbers in the message of each rank, in int64.

    Raises CommunicationError, or CallsDiffer, if ranks have sent messages of different kinds.
    """
    kinds = rows[:, VERSION_WORDS].tolist()
    if HANDSHAKE in kinds and SYNC in kinds:
        raise CallsDiffer(
            f"rank {kinds.index(HANDSHAKE)} compares its optimizer with the others' before its "
            f"next step, while rank {kinds.index(SYNC)} exchanges what it has moved in a round: it "
            "alone has loaded a state dict, added a group or changed an option. Do so on all "
            "ranks, after the same step; load the same checkpoint on all of them now"
        )
    for kind, call in CALLS.items():
        if kind in kinds and SYNC in kinds:
            raise CommunicationError(
                f"rank {kinds.index(SYNC)} ends a round, in end_round() of LocalSteps, while rank "
                f"{kinds.index(kind)} is in {call}: make both calls on all ranks in the same "
                "order, after the same round (count optimizer.stats.round where rounds end by time)"
            )
    return rows[:, VERSION_WORDS + 1 : VERSION_WORDS + 1 + count]


def encode_versions() -> tuple[int, ...]:
    """Return the versions that all ranks must have, as numbers of 8 bytes.

    Those of torch count, because ranks draw the same random numbers, and PyTorch promises equal
    ones within a release only.
    """
    from .. import __version__  # which is not there yet when this module is imported

    release = ".".join(torch.__version__.split(".")[:2])
    text = f"torch {release}, compopt {__version__}".encode()[: 8 * VERSION_WORDS]
    return struct.unpack(f"<{VERSION_WORDS}q", text.ljust(8 * VERSION_WORDS, b"\0"))


def _compare_versions(rows: list[list[int]]) -> None:
    """Raise ValueError if ranks have different versions."""
    texts = [
        struct.pack(f"<{len(row)}q", *row).rstrip(b"\0").decode("ascii", "replace") for row in rows
    ]
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise ValueError(
                f"ranks differ, and nothing was applied. Rank 0 has {texts[0]}, rank {rank} has "
                f"{text}: install the same versions on all nodes."
            )


def _check_rank_numbers(ranks: list[int]) -> None:
    """Raise ValueError if a rank calls itself another than the process group does."""
    if ranks != [*range(len(ranks))]:
        raise ValueError(
            f"the processes of the process group call themselves rank {', '.join(map(str, ranks))},"
            f" instead of 0 to {len(ranks) - 1}, and nothing was applied: give every process a rank"
            f" of its own, and make the group by torch.distributed."
        )


def _differ(checksums: Iterator[int]) -> bool:
    return len(set(checksums)) > 1


def _report_equal_gradients(engine: Engine, comm: Communicator) -> None:
    """Warn once that ranks train on the same data, if DDP did not average their gradients; else
    raise RuntimeError.
    """
    if not engine.ddp_left_gradients:
        raise RuntimeError(
            "all ranks hold bit-identical gradients: something averaged them before step(), or "
            "all ranks train on the same data. If DistributedDataParallel wraps the model, call "
            "compopt.attach(ddp_model, optimizer) before the first backward; if FSDP reduces over "
            "this group, pass process_group= the group it does not reduce over; if torch's "
            "replicate() does, use DistributedDataParallel in its place; if the data is the same, "
            "give each rank its own (on CPUs by Accelerator(cpu=True), or the Trainer's use_cpu)."
        )
    engine.warn_once_on_rank_0(
        "same data",
        f"all {comm.size} ranks hold bit-identical gradients: they train on the same data, and "
        "learn no more than a single one. Likely causes: no DistributedSampler, or the same "
        "random seed on all ranks. Give each rank its own data, by DataLoader(dataset, "
        "sampler=DistributedSampler(dataset)) or by a seed that depends on the rank.",
    )


def warn_if_without_gradients(engine: Engine, decision: StepDecision) -> None:
    """Warn once on a rank without gradients in a step in which other ranks had some."""
    for bucket in engine.buckets:
        for p in bucket.params:
            if p.grad is not None:
                return
    exchanges = decision.exchanges
    if any(any(one.agreement.payload.have_gradients) for one in exchanges):
        warn_without_gradients(engine, engine.steps, "counts as zeros in the mean over ranks")


def warn_without_gradients(engine: Engine, step: int, consequence: str) -> None:
    """Warn once that this rank had no gradients; ``consequence`` completes "it ..."."""
    engine.warn_once(
        "no gradients",
        f"rank {engine.comm.rank} had no gradients in step {step}: it {consequence}. Call "
        "backward() on every rank before step().",
    )


# The facts and checksums that ranks compare


def describe_optimizer(engine: Engine) -> Description:
    """Describe everything that must be equal on all ranks.

    What explains other differences comes first: the class before its options, shapes before values.
    """
    description: Description = {}
    for subject, values in list_settings(engine):
        plain = values if isinstance(values, dict) else {"": values}
        for name, value in sorted(plain.items()):
            description[f"{subject}, {name}" if name else subject] = repr(value)
    description["check_replicas_every"] = repr(engine.method.check_replicas_every)
    layouts: Description = {}
    checksums: Description = {}
    located = {
        p: (name, is_compressed)
        for bucket in [*engine.buckets, *engine.frozen_buckets]
        for p, name, is_compressed in zip(
            bucket.params, bucket.names, bucket.compressed, strict=True
        )
    }
    params = (p for group in engine.option_groups for p in group["params"])
    for i, p in enumerate(params):
        name, is_compressed = located[p]
        description[f"parameter {i}"] = name
        layouts[f"{name}, shape"] = str(tuple(p.shape))
        layouts[f"{name}, dtype"] = str(p.dtype)
        layouts[f"{name}, requires_grad"] = str(p.requires_grad)
        layouts[f"{name}, compress"] = str(is_compressed)
        if engine.method.has_equal_replicas:
            checksums[f"{name}, {VALUES}"] = str(checksum_values(to_local(p.detach())))
    return description | layouts | checksums


def checksum_text(text: object) -> int:
    return zlib.crc32(str(text).encode())


def checksum_values(tensor: Tensor) -> int:
    """Compute a number that is equal for tensors with equal bits."""
    raw = view_bytes(tensor)
    words = raw.view(torch.int16) if raw.numel() % 2 == 0 else raw
    # a block at a time: the sum copies what it adds to int64
    blocks = words.split(choose_block_size(words, on_cpu=CACHE_ELEMENTS))
    return int(torch.stack([block.sum(dtype=torch.int64) for block in blocks]).sum())


def _checksum_gradients(engine: Engine) -> int:
    """Compute a number that is equal on ranks whose gradients have equal bits; 0 if there is
    nothing to compare.

    Gradients that are zero or not finite do not count: they may be equal on ranks with different
    data.
    """
    sums = []
    for p in chain.from_iterable(bucket.params for bucket in engine.buckets):
        g = None if p.grad is None else to_local(p.grad)
        counts = g is not None and bool(g.any()) and bool(g.isfinite().all())
        sums.append(checksum_values(g) or 1 if counts and g is not None else 0)
    return checksum_text(sums) + 1 if any(sums) else 0


# Errors that all ranks raise


def raise_mismatch(engine: Engine, comm: Communicator, in_step: bool = False) -> NoReturn:
    """Gather the descriptions, and raise a ValueError that names the first difference.

    ``in_step``: a step has found it, so ranks were equal in an earlier one.
    """
    device = engine.device
    first, *others = gather_json(describe_optimizer(engine), device, comm)
    for rank, other in enumerate(others, start=1):
        different = [key for key in first | other if first.get(key) != other.get(key)]
        if different:
            steps = [key for key in different if key.endswith(", step")]
            what = (steps or different)[0]
            a, b = first.get(what, "nothing"), other.get(what, "nothing")
            found = _explain_difference(what, a, b, rank, in_step)
            raise ValueError(f"ranks differ, and nothing was applied. {found}")
    raise ValueError(
        "ranks differed in an option of their parameter groups, or in a parameter, or those of "
        "another shard do, and nothing was applied. These ranks are equal by now: change options "
        "and parameters on all ranks, alike and before the same step."
    )


def _explain_difference(what: str, first: str, other: str, rank: int, in_step: bool) -> str:
    """Say in what rank 0 and ``rank`` differ, and what to do."""
    subject, _, name = what.rpartition(", ")
    if name == "step":
        return (
            f"Rank 0 has taken {first} steps, rank {rank} has taken {other} ({subject}): call "
            "step() equally often on all ranks, and load the same checkpoint on all of them."
        )
    advice = "Make them equal."
    if name == VALUES and in_step:
        advice = (
            "They were equal before, so code has changed parameters on one rank, or on each by its "
            "own p.grad (PEFT's AdaLoRA: broadcast its lora_E from rank 0 after "
            "update_and_allocate()); or a base optimizer that evaluates the model again or counts "
            "on the rank's own data; or its train() and eval() on some ranks; or other hardware. "
            "Load a checkpoint on all ranks. check_replicas_every = 0 switches this check off."
        )
    elif name == VALUES:
        advice = (
            "Start all ranks from the same weights: load the same checkpoint, or pass the "
            "parameters of DistributedDataParallel, which broadcasts rank 0's."
        )
    elif not subject or name in ("shape", "dtype"):
        advice = "Build the same model and the same optimizer on all ranks."
    return f"{what}: rank 0 has {first}, rank {rank} has {other}. {advice}"


def raise_failure(
    engine: Engine, comm: Communicator, failure: str, repeats: str = "call step() again"
) -> NoReturn:
    """Gather why ranks could not send their gradients, and raise a CommunicationError that quotes
    all of them.

    ``failure``: the error of this rank; empty if it had none. It is text, because the frames of an
    exception and this one would refer to each other. ``repeats``: what the user is told to do.
    """
    failures = gather_json(failure, engine.device, comm)
    failed = [f"rank {rank} ({text})" for rank, text in enumerate(failures) if text]
    raise CommunicationError(
        f"the gradients of {', '.join(failed) or 'another shard'} could not be sent, and nothing "
        f"was applied: correct the error of that rank, and {repeats} on all ranks."
    )


# Collectives


def gather_json(value: object, device: torch.device, comm: Communicator) -> list[Any]:
    """Gather ``value`` of every rank."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([text.numel()], dtype=torch.int64, device=device)
    sizes = exchange_one(comm, AllGather(size)).view(-1).tolist()
    padded = torch.cat([text, text.new_zeros(max(sizes) - text.numel())])
    rows = exchange_one(comm, AllGather(padded))
    texts = [bytes(row[:size].tolist()) for row, size in zip(rows.cpu(), sizes, strict=True)]
    try:
        return [*map(json.loads, texts)]
    except ValueError as error:
        why = f"a rank has sent a message that cannot be read ({error}): start all ranks again"
        raise CommunicationError(why) from None


# The replica check

# Replicas that part do so without an error: code changes a parameter on one rank, or on each by its
# own gradient. So ranks compare sums of the parameters' bits, of a part of them every few steps. A
# sum is computed while a step's exchanges are underway. It reaches the host with the numbers of the
# decision, for which the host waits anyway, and the other ranks in the settings' checksum of the
# next step. No collective, no byte and no wait is added.

WORD = 8  # bytes that are added as one integer
CHECKS = 25  # at least so many in an interval, if it is long enough
# A part has at least so many bytes, and a tensor counts as at least so many: there are few parts
# where all is small, and few tensors in a part.
PART_BYTES, TENSOR_BYTES = 1 << 20, 1 << 14
CAT_BYTES = 1 << 28  # at most so many are copied to lie next to each other


def find_part(number: int, every: int) -> tuple[int, int] | None:
    """Return how often a part of the parameters was due before step ``number``, and how many parts
    there may be; None if none is due. Parts take turns: all are compared, and ranks have learned of
    it, within ``every`` steps.
    """
    if every < 1:
        return None
    stride = max(1, every // CHECKS)
    parts = max(1, (every - 1) // stride)  # ranks learn of a sum one step later
    return None if number % stride else (number // stride, parts)


def sum_part(tensors: Sequence[Tensor], turn: int, parts: int) -> Tensor:
    """Return the sum of the bits of the part of ``tensors`` whose turn it is, one of at most
    ``parts``, as the bits of one float64.

    Equal tensors have equal sums, in whatever order the words are added: integers wrap around.
    """
    sums = [_sum_words(views) for views in _cut_part(tensors, turn, parts)]
    if not sums:
        return torch.zeros(1, dtype=torch.float64, device="cpu")
    device = sums[0].device
    total = sums[0] if len(sums) == 1 else torch.stack([one.to(device) for one in sums]).sum()
    return total.view(1).view(torch.float64)


def checksum_sum(total: Tensor | None) -> int:
    """Return a checksum of what ``sum_part`` returned, which is on the host by now; 0 for None."""
    if total is None:
        return 0
    return zlib.crc32(struct.pack("<q", int(total.view(torch.int64))))


def _cut_part(tensors: Sequence[Tensor], turn: int, parts: int) -> Iterator[list[Tensor]]:
    """Yield the bytes of a part, as lists of views that are summed together."""
    sizes = [p.numel() * p.element_size() for p in tensors]
    rooms = [-(-max(size, TENSOR_BYTES) // WORD) * WORD for size in sizes]
    words = sum(rooms) // WORD
    parts = min(parts, max(1, words * WORD // PART_BYTES))
    n = turn % parts
    first, last = WORD * (words * n // parts), WORD * (words * (n + 1) // parts)
    views: list[Tensor] = []
    start = copied = 0
    for p, size, room in zip(tensors, sizes, rooms, strict=True):
        begin, end = max(first - start, 0), min(last - start, size)
        start += room
        if begin >= end:
            continue
        view = view_bytes(p)[begin:end]
        if views and (view.device != views[0].device or copied + end - begin > CAT_BYTES):
            yield views
            views, copied = [], 0
        views.append(view)
        copied += end - begin
    if views:
        yield views


def _sum_words(views: list[Tensor]) -> Tensor:
    """Return the sum of the words that ``views`` of bytes consist of, one after the other."""
    flat = views[0]
    if len(views) > 1 or flat.storage_offset() % WORD:
        flat = torch.cat(views)
    if rest := len(flat) % WORD:
        flat = torch.nn.functional.pad(flat, (0, WORD - rest))
    return flat.view(torch.int64).sum()
