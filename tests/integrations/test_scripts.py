"""Scripts written for AdamW and DistributedDataParallel, in the shapes users have them, with one line changed.

Each runs as it stands, on two gloo processes, once with each line; what the processes' TCP sockets carried is compared.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from in_place import as_torchrun_would, example, in_place
from ranks import preload, run_ranks
from user_scripts import CHANGED

preload("transformers.trainer", "accelerate", "lightning.pytorch", "lightning.fabric")


def sent_by_connection() -> dict[str, int]:
    """Bytes that each of this process's TCP connections has sent once, by the socket's inode.

    tcpi_bytes_sent less tcpi_bytes_retrans (linux/tcp.h): a loaded machine sends segments again.
    """
    sent = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (target := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as s:
                    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total, retransmitted = struct.unpack_from("QQ", info, 200) if len(info) >= 216 else (0, 0)
                    sent[target] = total - retransmitted
    return sent


def bytes_sent_since(before: dict[str, int]) -> int:
    """Bytes sent since; a connection of an earlier run may have been closed meanwhile, and counts nothing."""
    return sum(sent - before.get(connection, 0) for connection, sent in sent_by_connection().items())


def run(source: str, rank: int, folder: str) -> dict:
    """The script, in this process, whose process group exists already."""
    names = {"RANK": rank, "FOLDER": folder, "losses": [], "__name__": "__main__"}
    before = sent_by_connection()
    with in_place():
        exec(compile(source, "train.py", "exec"), names)
    sent = bytes_sent_since(before)
    mine = torch.nn.utils.parameters_to_vector(names["model"].parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, 0)
    optimizer = names["optimizer"]
    comm = getattr(optimizer, "comm", None)
    results = {
        "sent": sent,
        "losses": names["losses"],
        "equal": torch.equal(mine, first),
        "dense": 4 * mine.numel() * len(names["losses"]),
        "counted": comm.bytes_sent if comm else None,
        "class": type(optimizer).__name__,
    }
    names.clear()
    del optimizer, comm
    gc.collect()
    dist.barrier()
    return results


def both(rank: int, folder: str) -> dict[str, list[dict]]:
    results = {}
    for name, (source, old, new) in CHANGED.items():
        if name == "run_clm":
            pytest.importorskip("transformers")
            pytest.importorskip("accelerate")
        results[name] = [run(source, rank, folder), run(source.replace(old, new), rank, folder)]
    return results


def examples(folder: str) -> dict[str, str]:
    data, out = ["--data", f"{folder}/text"], f"{folder}/hf"
    small = ["--steps", "9", "--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--out", out]
    results = {}
    with contextlib.suppress(ModuleNotFoundError):
        results["hf_trainer"] = example("hf_trainer", *data, *small)
        results["hf_trainer, resumed"] = example("hf_trainer", *data, *small, "--steps", "12", "--resume")
    with contextlib.suppress(ModuleNotFoundError):
        results["lightning_ddp"] = example("lightning_ddp", *data, "--steps", "9")
    return results


def on_two_ranks(rank: int, folder: str) -> tuple[dict[str, list[dict]], dict[str, str]]:
    """All of it on the same two processes: to import the users' stacks takes as long as the runs do."""
    as_torchrun_would(rank, 2)
    return both(rank, folder), examples(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "text").write_bytes(b"to be, or not to be, that is the question: " * 1000)
    return folder


@pytest.fixture(scope="module")
def on_two(folder):
    return run_ranks(on_two_ranks, 2, str(folder))


@pytest.fixture
def runs(on_two):
    return [of_scripts for of_scripts, _ in on_two]


@pytest.mark.parametrize("name", CHANGED)
def test_one_line_changes(name):
    source, old, new = CHANGED[name]
    lines = zip(source.splitlines(), source.replace(old, new).splitlines(), strict=True)
    assert sum(a != b for a, b in lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_it_trains_and_replicas_are_equal(runs, name):
    for rank in runs:
        adamw, ours = rank[name]
        assert ours["class"] == "RadiusAdamW" and ours["equal"]
        start, end, adamw_end = ours["losses"][0], sum(ours["losses"][-5:]) / 5, sum(adamw["losses"][-5:]) / 5
        assert end < start - 0.6 * (start - adamw_end)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_bytes_on_the_sockets_fall_as_promised(runs, name):
    """On two ranks a ring all-reduce sends each byte once, so sockets carry what the optimizer counts.

    Of both ranks together: gloo splits a bucket between the two unevenly, and differently in each run.
    """
    adamw, ours = (
        {key: sum(rank[name][i][key] or 0 for rank in runs) for key in ("sent", "dense", "counted")} for i in (0, 1)
    )
    beside = adamw["sent"] - adamw["dense"]  # DDP's broadcast of the parameters, framing
    assert 0 < beside < 0.05 * adamw["dense"]
    assert abs(ours["sent"] - beside - ours["counted"]) < 0.03 * ours["counted"]
    assert ours["sent"] < 0.4 * adamw["sent"]


def on_four_ranks(rank: int, folder: str) -> list[str]:
    as_torchrun_would(rank, 4)
    small = ["--steps", "20", "--layers", "1", "--width", "32", "--heads", "2", "--context", "16"]
    files = ["--data", f"{folder}/text", "--checkpoint", f"{folder}/hsdp"]
    return [example("hsdp", *small, *files) for _ in range(2)]


@pytest.mark.slow
def test_examples_in_the_users_stack_run(folder, on_two):
    _, printed = on_two[0]
    for name in ("hf_trainer", "hf_trainer, resumed"):
        assert "validation loss" in printed.get(name, "validation loss"), name
    assert "sent_MB" in printed.get("lightning_ddp", "sent_MB")
    assert (folder / "hf" / "checkpoint-12").is_dir() or "hf_trainer" not in printed


@pytest.mark.slow
def test_a_sharded_example_goes_on_from_its_checkpoint(folder):
    (first, second), *_ = run_ranks(on_four_ranks, 4, str(folder))
    assert first.startswith("step 20 loss") and "sparse" in first
    assert second.startswith("step 40 loss"), "not continued from its checkpoint"
