"""Work that a steady step gives an accelerator: launches, waits of the host, uploads; counted without one.

    python bench/launches.py                    # all rows, 354.8 M parameters in GPT-2 medium's shapes; under a minute
    python bench/launches.py --only "SCAPE .01"

Tensors are of torch's "meta" device, which has no memory, and kernels are not run, so this shows what is asked, not how
long it takes: bench/gpu.py times steps. ``launches`` are dispatched operators and Triton kernels; an operator counts
once, though some (topk, qr) are several kernels. ``waits`` are numbers that the host waits for; what they are is
made up: the decision is that all ranks apply the step. Ranks are 8, the others made up; TAGC's row is counted at a
256th of the size. Saves results/launches.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from _fake_ranks import fake_ranks
from _table import RESULTS, make_parser, print_rows, write_rows
from torch import Tensor
from torch.optim import optimizer as torchs
from torch.utils import _foreach_utils as foreach
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from device_calls import COPIES, aten, launches, place, waits

import compopt
import compopt._backends.choice as backends
import compopt._engine.decision as decision
import compopt._engine.handshake as handshake
import compopt._engine.optimizer as base
from compopt._backends.triton import tables as triton_tables
from compopt._engine.exchange import BucketExchange
from compopt._wire.collectives import Communicator

HERE = Path(__file__).parent
RANKS = 8
DEVICE = torch.device("meta")
Params = list[torch.nn.Parameter]


# The device

# Operators over lists that change them in place: one call on an accelerator, but on the meta device torch runs them a
# tensor at a time, in Python.
_IN_PLACE = ["add", "sub", "mul", "div", "copy", "zero", "neg", "lerp", "clamp_min", "addcmul", "addcdiv"]
_LIBRARY = torch.library.Library("aten", "IMPL")
for _name in _IN_PLACE:
    _operator = getattr(torch.ops.aten, f"_foreach_{_name}_")
    for _overload in _operator.overloads():
        _suffix = "" if _overload == "default" else f".{_overload}"
        _LIBRARY.impl(f"_foreach_{_name}_{_suffix}", lambda *_, **__: None, "Meta")


def _norms(xs: list[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.empty((), dtype=dtype or x.dtype, device=DEVICE) for x in xs]


def _joined(xs: list[Tensor], dim: int = 0) -> Tensor:
    """Of tensors that are joined without Python's look at each of them; all have the first one's dtype."""
    shape = list(xs[0].shape)
    shape[dim] = sum(x.shape[dim] for x in xs)
    return torch.empty(shape, dtype=xs[0].dtype, device=DEVICE)


def _norm(
    x: Tensor, ord: float = 2, dim: list[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    shape = [] if dim is None else [n for i, n in enumerate(x.shape) if i not in {d % x.dim() for d in dim}]
    if keepdim:
        shape = [1 if dim is None or i in {d % x.dim() for d in dim} else n for i, n in enumerate(x.shape)]
    return torch.empty(shape, dtype=dtype or x.dtype, device=DEVICE)


# So are these, of which a norm of all gradients consists: a norm of each, all as one vector, its norm. On the meta
# device torch composes them of many operators, in Python.
_LIBRARY.impl("linalg_vector_norm", _norm, "Meta")
_LIBRARY.impl("_foreach_norm.Scalar", _norms, "Meta")
_LIBRARY.impl("cat", _joined, "Meta")


class Stream:
    """And its own event, to which the device has come when somebody asks."""

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if Counts.running is not None:
            Counts.running.wait()


class Module:
    """The device's module, as ``torch.get_device_module`` returns it."""

    Stream = object

    @staticmethod
    def current_stream(device: torch.device) -> Stream:
        return Stream()

    @staticmethod
    def device(device: torch.device) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Counts(TorchDispatchMode):
    """Counts of what a step asks of the device. ``at``: by the line of compopt that asks."""

    running: Counts | None = None

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.launches, self.waits, self.uploads = 0, 0, 0
        self.collectives = 0
        self.at: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self):
        Counts.running = self
        return super().__enter__()

    def __exit__(self, *error):
        Counts.running = None
        return super().__exit__(*error)

    def wait(self) -> None:
        self.waits += 1
        self.at[f"wait: {place()}"] += 1

    def launch(self, name: str) -> None:
        self.launches += 1
        self.at[f"{place()}: {name}"] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = function.overloadpacket
        if function.namespace == "c10d":
            self.collectives += 1
            return function(*args, **kwargs)
        if packet is aten._local_scalar_dense and args[0].device == DEVICE:
            self.wait()
            return 0 if args[0].dtype not in (torch.float32, torch.float64) else 0.0
        if packet in COPIES:
            source = args[1] if packet is aten.copy_ else args[0]
            to = args[0].device if packet is aten.copy_ else kwargs.get("device") or source.device
            if source.device == DEVICE != to:
                unwaited = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
                if not (unwaited and packet is aten.copy_ and id(args[0]) in pinned):
                    self.wait()
                return torch.zeros_like(source, device=to) if packet is not aten.copy_ else args[0].zero_()
            if to == DEVICE != source.device:
                self.uploads += 1
                return function(*args, **kwargs)
        result = function(*args, **kwargs)
        given = torch.utils._pytree.tree_leaves((args, kwargs, result))
        if any(isinstance(x, Tensor) and x.device == DEVICE for x in given):
            if waits(function, args, kwargs):
                self.wait()
            if launches(function):
                self.launch(str(packet))
        return result


def run_kernel(kernel: triton.JITFunction, *args: Any, **options: Any) -> None:
    """In place of a launch."""
    if Counts.running is not None:
        Counts.running.launch(kernel.fn.__name__)


read_scalars = decision.read_scalars


def _read_numbers(
    exchanges: list[BucketExchange], replica_sum: Tensor | None
) -> tuple[list[float], list[list[float]], Tensor | None]:
    """The numbers that decide, as they would be: every rank has every gradient, all is as it should be."""
    squares, fields, total = read_scalars(exchanges, replica_sum)
    told = [[1.0] * len(one.agreement.payload.header) + [*one.control.numbers] for one in exchanges]
    assert [*map(len, fields)] == [*map(len, told)]
    return [1.0] * len(squares), told, None if total is None else torch.zeros(1, dtype=torch.float64, device="cpu")


def _greet(optimizer: object, comm: object, has_problem: bool) -> bool:
    """In place of the handshake, which compares numbers that are not there."""
    return True


def _number(x: Tensor) -> float:
    if x.device != DEVICE:
        return number(x)
    if Counts.running is not None:
        Counts.running.wait()
    return 0.0


def _cpu(x: Tensor) -> Tensor:
    """A copy on the host. ``Counts`` makes it where it runs, for it sees what is copied."""
    return cpu(x) if x.device != DEVICE or Counts.running is not None else torch.zeros_like(x, device="cpu")


def _data_ptr(x: Tensor) -> int:
    """An address as of memory: of its own for each storage, and a multiple of 16 where that begins."""
    if x.device != DEVICE:
        return data_ptr(x)
    return (x.untyped_storage()._cdata << 8) + x.storage_offset() * x.element_size()


pinned: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def _pin(x: Tensor, device: object = None) -> Tensor:
    pinned[id(x)] = x
    return x


to_list, number, cpu, data_ptr = Tensor.tolist, Tensor.__float__, Tensor.cpu, Tensor.data_ptr


def _to_list(x: Tensor) -> Any:
    if x.device != DEVICE:
        return to_list(x)
    if Counts.running is not None:
        Counts.running.wait()
    return torch.zeros_like(x, device="cpu").tolist()


@contextlib.contextmanager
def counting_device(backend: str) -> Iterator[None]:
    """While it is entered, the meta device is an accelerator with this back end."""
    with contextlib.ExitStack() as stack:
        for target, name, new in [
            (torch, "get_device_module", lambda device=None: Module),
            (Communicator, "get_backend", lambda comm, device: "nccl"),
            (Tensor, "pin_memory", _pin),
            (Tensor, "tolist", _to_list),
            (Tensor, "__float__", _number),
            (Tensor, "cpu", _cpu),
            (Tensor, "data_ptr", _data_ptr),
            (torchs, "_get_fused_kernels_supported_devices", lambda: [DEVICE.type]),
            (foreach, "_get_foreach_kernels_supported_devices", lambda: [DEVICE.type]),
            (torchs, "_get_foreach_kernels_supported_devices", lambda: [DEVICE.type]),
            (base, "check_tensors", lambda group: None),  # which refuses tensors without memory
            (handshake, "compare_optimizers", _greet),
            (decision, "read_scalars", _read_numbers),
            (triton.JITFunction, "run", run_kernel),
            (backends, "has_triton_driver", lambda: True),
            (triton_tables, "triton_device", lambda: DEVICE.type),
        ]:
            stack.enter_context(mock.patch.object(target, name, new))
        stack.enter_context(mock.patch.dict("os.environ", COMPOPT_BACKEND=backend))
        yield


# The rows


def gpt2(width: int = 1024, layers: int = 24, words: int = 50257, places: int = 1024) -> Params:
    """Parameters in GPT-2's shapes, without memory; 354.8 M of them by default, as GPT-2 medium."""
    shapes: list[tuple[int, ...]] = [(words, width), (places, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    shapes += [(width,), (width,)]
    params = [torch.nn.Parameter(torch.empty(shape, device=DEVICE)) for shape in shapes]
    for p in params:
        p.grad = torch.empty_like(p)
    return params


def adamw(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def muon(params: Params, **options: Any) -> torch.optim.Optimizer:
    """Muon on the matrices of the layers, AdamW on the embeddings and vectors."""
    groups = [
        {"params": params[2:], "use_muon": lambda name, p: p.ndim == 2},
        {"params": params[:2], "use_muon": False},
    ]
    return compopt.MuonAdamW(groups, **options)


LOCAL = dict(growth_steps=0, dense_steps=0, payload_dtype="int4")
Make = Callable[[Params], Any]
# name: back end, optimizer, steps before the one that is counted
ROWS: dict[str, tuple[str, Make, int]] = {
    "AdamS": ("triton", lambda p: compopt.AdamS(p), 2),
    "Radius .4, sparse": ("triton", lambda p: compopt.RadiusAdamW(p, density=0.4, dense_steps=1, interval=1000), 3),
    "Radius .4, int8": (
        "triton",
        lambda p: compopt.RadiusAdamW(p, density=0.4, dense_steps=1, interval=1000, payload_dtype="int8"),
        3,
    ),
    "SCAPE .01": ("triton", lambda p: compopt.ScapeAdamS(p, density=0.01, dense_steps=0, density_steps=0), 3),
    "Separate 16": (
        "triton",
        lambda p: compopt.SeparateAdam(p, projection="gaussian", ratio=16, dense_steps=0),
        2,
    ),
    "tracked 16, int8": ("triton", lambda p: compopt.SeparateAdam(p, dense_steps=0), 3),
    "Average, int8": ("triton", lambda p: compopt.Average(adamw(p), payload_dtype="int8"), 2),
    "LocalSteps, between": ("triton", lambda p: compopt.LocalSteps(adamw(p), every=100, **LOCAL), 2),
    "LocalSteps, exchange": ("triton", lambda p: compopt.LocalSteps(adamw(p), every=1, **LOCAL), 2),
    "MuonAdamW": ("triton", muon, 2),
    "MuonAdamW, rows": ("triton", lambda p: muon(p, normalize="rows"), 2),
}


def count(name: str, params: Params) -> tuple[dict[str, Any], Counts]:
    """One row of the table, without the host's time."""
    backend, make, before = ROWS[name]
    with fake_ranks(RANKS), counting_device(backend), Counts() as counts:
        optimizer = make(params)
        for _ in range(before):
            optimizer.step()
        counts.clear()
        optimizer.step()
        asked = (counts.launches, counts.waits, counts.uploads, counts.collectives)
        engine = getattr(optimizer, "_engine", None)  # MuonAdamW alone has none
        return row_of(name, 0 if engine is None else len(engine.buckets), *asked), counts


def row_of(name: str, buckets: int, launches: int, waits: int, uploads: int, collectives: int) -> dict[str, Any]:
    counted = {"buckets": buckets, "launches": launches, "waits": waits, "uploads": uploads}
    return {"row": name, **counted, "collectives": collectives}


def tagc(width: int, layers: int, words: int, bucket_bytes: int) -> dict[str, Any]:
    """TagcAdamW's row: what it asks for follows from values, so they are computed, on a device in Python.

    At a 256th of the size, in as many tensors and buckets. For a process of its own, which keeps that device.
    """
    sys.path.insert(0, str(HERE.parent / "tests/support"))
    import fake_device

    from compopt._state import buckets

    device = fake_device.register()
    buckets.DEVICE_BUCKET_BYTES = bucket_bytes
    os.environ["COMPOPT_BACKEND"] = "torch"
    with fake_device.Device(counts=True) as counts, fake_ranks(RANKS, left_by_others=0.08) as comm:
        params = [torch.nn.Parameter(torch.randn(p.shape).to(device)) for p in gpt2(width, layers, words, 64)]
        optimizer = compopt.TagcAdamW(params, process_group=comm, dense_steps=0)
        comm.follow(optimizer)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape).to(device)
            counts.accesses, counts.launches, counts.uploads = Counter(), Counter(), Counter()
            before = comm.calls
            optimizer.step()
        asked = (counts.launches.total(), counts.accesses.total(), counts.uploads.total(), comm.calls - before)
        return row_of("TAGC .0125", len(optimizer._engine.buckets), *asked)


COLUMNS = {name: (name, "5d") for name in ("buckets", "launches", "waits", "uploads", "collectives")}


def main() -> None:
    cli = make_parser(__doc__, "--only", ROWS)
    cli.add_argument("--tagc", nargs=4, type=int, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.tagc:
        print(json.dumps(tagc(*args.tagc)))
        return
    torch.set_num_threads(1)
    params, rows = gpt2(), []
    print(f"{sum(p.numel() for p in params):,} parameters")
    rows += [count(name, params)[0] for name in args.only]
    if args.only == list(ROWS):
        rows.append(apart(64, 24, 50257 // 16, 2**19))
    print_rows(rows, COLUMNS, "row", 22)
    if args.only == list(ROWS):
        write_rows(RESULTS / "launches.csv", rows)


def apart(width: int, layers: int, words: int, bucket_bytes: int) -> dict[str, Any]:
    """``tagc`` in a process of its own."""
    command = [sys.executable, __file__, "--tagc", *map(str, (width, layers, words, bucket_bytes))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
