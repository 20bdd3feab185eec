"""The ranks' first words: same class, same settings, same parameters in the same order, gradients
neither averaged yet nor of the same data.

Runs in the first step, and in the step after a checkpoint was loaded, a group added, an option
changed that decides what is sent, or a collective failed. Other differences in settings show in
every step's payload and end here too, in ``explain_mismatch``. What crosses is numbers and JSON,
never pickles.

It is a collective of another kind than the payload's. Where only some ranks come here, nobody's
payload meets one of another length, on which gloo ends the process: both wait until the group's
timeout, and raise.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from .._state.buckets import local
from .._wire.comm import Comm
from .._wire.requests import AllGather, CommunicationError
from .._wire.warning import warn
from .turns import Turns, ask

if TYPE_CHECKING:
    from .engine import Engine


@dataclass
class Acquaintance:
    """What is known of the other ranks."""

    acquainted: bool = False  # a handshake has shown that they agree, and it still holds
    structure: str = ""  # the options that decide what is sent, which all had in the last step


def describe(engine: Engine) -> list[str]:
    """Everything that must be equal on all ranks, a line each."""
    face = engine.face
    name, *groups = face._settings()
    lines = [f"class: {name}", f"check_replicas_every: {face.check_replicas_every}"]
    for number, group in enumerate(groups):
        lines += [f"group {number}, {key}: {value!r}" for key, value in sorted(group.items())]
    of = {}
    for bucket in [*engine.buckets, *engine.shelf]:
        for p, name, compressed in zip(bucket.params, bucket.names, bucket.compressed, strict=True):
            checksum = _checksum(local(p.detach())) if face.has_equal_replicas else 0
            values = f"values of checksum {checksum:x}"
            trained = f"requires_grad={p.requires_grad}"
            of[p] = (
                f"{name}: shape {tuple(p.shape)}, {p.dtype}, {trained}, compress={compressed}, "
                f"{values}"
            )
    groups_back = reversed(engine.option_groups)
    return lines + [of[p] for group in groups_back for p in reversed(group["params"])]


def handshake(engine: Engine, comm: Comm) -> Turns[bool]:
    """Raise ValueError when ranks differ, RuntimeError when something else averaged the gradients
    already.

    Returns whether there were gradients to compare on any rank.
    """
    code = zlib.crc32("\n".join(describe(engine)).encode())
    backend = [zlib.crc32(engine.ops.name.encode()), engine.ops.automatic]
    words = torch.tensor(
        [code, _fingerprint(engine), _chosen(engine), *backend, *_times(engine)],
        dtype=torch.int64,
    )
    rows = (yield from gather(words.to(engine.device), comm)).tolist()
    if any(row[3] != rows[0][3] for row in rows) and all(row[4] for row in rows):
        engine.give_way()
        return (yield from handshake(engine, comm))
    if any(row[0] != code for row in rows):
        yield from explain_mismatch(engine, comm)
    if any(row[2] != rows[0][2] for row in rows):  # masks were lost on some ranks
        engine.forget_chosen()
    if engine.trial is not None and all(map(all, (row[5:] for row in rows))):
        engine.trial.compare([row[5:] for row in rows])
    checksums = {row[1] for row in rows}
    if comm.size > 1 and len(checksums) == 1 and checksums != {0}:
        _report_equal_gradients(engine, comm)
    return comm.size == 1 or checksums != {0}


def _report_equal_gradients(engine: Engine, comm: Comm) -> None:
    """Warn once that ranks train on the same data, where DDP handed their own gradients over; else
    raise RuntimeError.
    """
    if not engine.handed_over:
        raise RuntimeError(
            "all ranks hold bit-identical gradients: something averaged them before step(), or "
            "all ranks train on the same data. If DistributedDataParallel wraps the model, call "
            "compopt.attach(ddp_model, optimizer) before the first backward; if FSDP reduces over "
            "this group, pass process_group= the group it does not reduce over; if the data is "
            "the same, give each rank its own. On CPUs Accelerate and the Trainer give all ranks "
            "the same data unless told Accelerator(cpu=True) or use_cpu=True."
        )
    if not engine.warned_of_same_data:
        engine.warned_of_same_data = True
        warn(
            f"all {comm.size} ranks hold bit-identical gradients: they train on the same data, and "
            "learn no more than one rank would. Likely causes: no DistributedSampler, or the same "
            "random seed on all ranks. Give each rank its own data, by DataLoader(dataset, "
            "sampler=DistributedSampler(dataset)) or by a seed that the rank is part of.",
            comm.rank,
        )


def explain_mismatch(engine: Engine, comm: Comm) -> Turns[NoReturn]:
    """Exchange the descriptions and raise a ValueError that names the first difference."""
    theirs = yield from _tell(describe(engine), engine.device, comm)
    for rank, lines in enumerate(theirs):
        for a, b in zip(theirs[0] + [""] * len(lines), lines + [""] * len(theirs[0]), strict=False):
            if a != b:
                raise ValueError(
                    f"ranks differ, and nothing was applied. Rank 0 has {a or 'nothing'!r}, "
                    f"rank {rank} has {b or 'nothing'!r}: make them equal."
                )
    raise ValueError(
        "ranks differed in an option of their parameter groups at this step, and nothing was "
        "applied. They are equal by now: change options on all ranks before the same step."
    )


def tell_failure(engine: Engine, comm: Comm, mine: Exception | None) -> Turns[NoReturn]:
    """Raise CommunicationError that says which ranks could not send their gradients.

    ``mine``: why this one cannot.
    """
    said = [] if mine is None else [f"{type(mine).__name__}: {mine}"]
    del mine  # its frames hold this one
    theirs = yield from _tell(said, engine.device, comm)
    who = [f"rank {rank} ({lines[0]})" for rank, lines in enumerate(theirs) if lines]
    raise CommunicationError(
        f"the gradients of {', '.join(who) or 'another shard'} could not be sent, and nothing was "
        "applied: mend what is said of that rank there, and call step() again on all ranks."
    )


def _tell(lines: list[str], device: torch.device, comm: Comm) -> Turns[list[list[str]]]:
    """What every rank has to say."""
    text = torch.frombuffer(bytearray(json.dumps(lines).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([text.numel()], dtype=torch.int64, device=device)
    sizes = (yield from gather(size, comm)).view(-1).tolist()
    padded = torch.cat([text, text.new_zeros(max(sizes) - text.numel())])
    rows = yield from gather(padded, comm)
    return [
        json.loads(bytes(row[:size].tolist())) for row, size in zip(rows.cpu(), sizes, strict=True)
    ]


def gather(tensor: Tensor, comm: Comm) -> Turns[Tensor]:
    """A row of every rank."""
    return (yield from ask(comm, AllGather(tensor)))


def _chosen(engine: Engine) -> int:
    """The same on all ranks that hold the same masks."""
    names = engine.face.chosen_state
    flats = (bucket.flat[name] for bucket in engine.buckets for name in names)
    return zlib.crc32(repr([_checksum(flat) for flat in flats]).encode())


def _times(engine: Engine) -> list[int]:
    """What a trial has timed, a dense and a compressed step; zeros where there is none, or it goes
    on.
    """
    return (engine.trial.words() if engine.trial else []) or [0, 0]


def _checksum(tensor: Tensor) -> int:
    """The same for tensors that are the same to the bit."""
    # Strides of one element or none may be anything.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    raw = flat.view(torch.uint8)
    return int((raw.view(torch.int16) if raw.numel() % 2 == 0 else raw).sum(dtype=torch.int64))


def _fingerprint(engine: Engine) -> int:
    """A number that two ranks share when their gradients are the same to the bit; 0 when there is
    nothing to compare.

    Zeros, gradients that are not finite and pseudo-gradients are nothing: those may well be alike
    on ranks of different data.
    """
    if engine.has_pseudo_gradients:
        return 0
    sums = []
    for bucket in engine.buckets:
        for p in bucket.params:
            g = None if p.grad is None else local(p.grad)
            telling = g is not None and bool(g.any()) and bool(g.isfinite().all())
            sums.append(_checksum(g) or 1 if telling and g is not None else 0)
    return zlib.crc32(repr(sums).encode()) + 1 if any(sums) else 0
