"""An accelerator without memory: tensors of torch's "meta" device, and kernels that are counted and not run.

A step of 355 M parameters takes milliseconds there. Every operator that is dispatched is seen (``Counts``), and every
launch of a Triton kernel, with the bytes that it would move. Numbers that a step waits for are made up: the decision is
that all ranks apply it. Without ``Counts`` what is left is the host's time.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import compopt_kernels as kernels
import torch
import triton
from torch import Tensor
from torch.optim import optimizer as torchs
from torch.utils import _foreach_utils as foreach
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from device_calls import COPIES, aten, bytes_of, launches, moves, place, waits

import compopt._engine.decision as decision
import compopt._engine.optimizer as base
import compopt._engine.step as step
import compopt._ops.backends as backends
from compopt._engine.exchange import BucketExchange, CollectiveGenerator
from compopt._ops.triton import tables as triton_tables
from compopt._wire.collectives import Communicator

DEVICE = torch.device("meta")

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
        self.collectives, self.moved = 0, 0
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

    def launch(self, name: str, moved: int) -> None:
        self.launches += 1
        self.moved += moved
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
                self.launch(str(packet), moves(function, args, kwargs, result, lambda x: x.device == DEVICE))
        return result


def run_kernel(kernel: triton.JITFunction, *args: Any, **options: Any) -> None:
    """In place of a launch."""
    if Counts.running is not None:
        Counts.running.launch(kernel.fn.__name__, 0)


def size(x: Tensor | None) -> int:
    return 0 if x is None else bytes_of(x)


# Of a table that is kept from step to step: what a launch with it reads and writes.
by_table: weakref.WeakKeyDictionary[kernels.Table, int] = weakref.WeakKeyDictionary()


def cell(x: Tensor | int | None, n: int, dtype: torch.dtype) -> int:
    """The bytes of a field of n elements: a tensor, or an address."""
    return n * dtype.itemsize if isinstance(x, int) and x else size(None if isinstance(x, int) else x)


def _adamw(blocks, starts, rows, types=None, **_) -> int:
    types = types or kernels.AdamWTypes.of(rows)
    once = {"bits": torch.uint8, "values": types.values, "grad": types.grad, "public": types.public}
    twice = ("w", "m", "v", "residual")
    return sum(
        sum(cell(getattr(r, name), r.n, dtype) for name, dtype in once.items())
        + 2 * sum(cell(getattr(r, name), r.n, types.w) for name in twice)
        for r in rows
    )


def _scape(blocks, starts, held_starts, rows, **_) -> int:
    once = ("bits", "held", "old", "values", "m", "grad", "public", "rounding_errors")
    twice = ("w", "residual")
    return sum(sum(size(getattr(r, n)) for n in once) + 2 * sum(size(getattr(r, n)) for n in twice) for r in rows)


def _moment(blocks, held_starts, rows, **_) -> int:
    """Of the elements that this rank selects among."""
    total = 0
    for r in rows:
        share = (r.end - r.begin) / r.n if r.n else 0
        total += int(share * (size(r.held) + size(r.old) + size(r.residual) + size(r.grad))) + size(r.x)
    return total


def _compact(blocks, bits, grads, parts, header, add) -> int:
    rows = zip(bits, grads, parts, add, strict=True)
    return sum(size(b) + size(g) + size(p) + (0 if a is None else len(p) * a.element_size()) for b, g, p, a in rows)


def _top_k(rows) -> int:
    """Three looks, the bits, and candidates, which are as large, written once and looked at three times."""
    return sum(3 * size(r.x) + 5 * size(r.bits) for r in rows)


def _count(blocks, bits) -> int:
    return sum(size(b) for b in bits) + 16 * blocks.count  # written and read by block, and the sums of those before


def _positions(blocks, bits, starts, sizes) -> int:
    return sum(size(b) for b in bits) + 4 * sum(sizes)


def _encode(rows, *_) -> int:
    return 2 * sum(size(r.bits) for r in rows)


def _decode(rows, *_) -> int:
    return 2 * sum(size(r.message) for r in rows)


def _quantize(cut, body, dropped, noise, place, messages, *_) -> int:
    """The numbers u stay in the device's cache. Of 4 bits each code is written, read, and written packed."""
    return size(body) + size(dropped) + size(messages) + (2 * len(body) if _[-1] == 4 else 0)


def _mean(cut, rank, received, dropped, noise, place, message, *_) -> int:
    share = len(dropped) // len(received)
    return size(received) + 2 * 4 * share + size(message) + (2 * share if _[-1] == 4 else 0)


def _dequantize(cut, gathered, body, *_) -> int:
    return size(gathered) + size(body)


def _factored(rows, types, device) -> int:
    """Tiles read factors over again, from the device's cache."""
    total = 0
    for r in rows:
        n = r.rows * r.columns
        total += cell(r.grad, n, types.grad) + cell(r.public, n, types.public) + 8 * n * types.w.itemsize
        total += 4 * r.r * (r.rows + 2 * r.columns)
    return total


def _project(rows, tiles, types, *_) -> int:
    """Partial products are written and read."""
    n = sum(r.rows * r.columns for r in rows)
    given = sum(r.rows * r.columns for r in rows if r.g)
    narrow = sum(r.r * (r.rows + r.columns) for r in rows)
    return given * types.g.itemsize + 4 * n + 4 * narrow + 8 * tiles.partial_size


def _orthonormalize(stacks, results) -> int:
    """Three looks at the columns, and the result."""
    return sum(3 * size(x) + size(q) for x, q in zip(stacks, results, strict=True))


# Bytes of what a kernel reads and writes, by what it is called with; of a sector only the values that are selected.
MOVED: dict[str, Callable[..., int]] = {
    "adamw": _adamw,
    "scape": _scape,
    "compact": lambda blocks, bits, starts, grads, parts, header, add, *_: _compact(
        blocks, bits, grads, parts, header, add
    ),
    "moment": _moment,
    "top_k": lambda blocks, rows: _top_k(rows),
    "block_offsets": _count,
    "positions": _positions,
    "encode_masks": lambda blocks, rows, words: _encode(rows) + size(words),
    "decode_masks": lambda blocks, rows, words: _decode(rows) + size(words),
    "quantize": _quantize,
    "mean_of_codes": _mean,
    "dequantize": _dequantize,
}


BY_TABLE = ["compact_with_table", "factored", "project", "orthonormalize"]
TABLES: dict[str, Callable[..., int]] = {
    "adamw_table": lambda blocks, rows, *types: _adamw(blocks, None, rows, *types),
    "scape_table": lambda blocks, rows: _scape(blocks, None, None, rows),
    "moment_table": lambda blocks, rows: _moment(blocks, None, rows),
    "compact_table": _compact,
    "block_offsets_table": _count,
    "top_k_table": _top_k,
    "encode_table": _encode,
    "decode_table": _decode,
    "factored_table": _factored,
    "project_table": _project,
    "prepare_orthonormalize": _orthonormalize,
}


def _weighed(name: str) -> Callable[..., Any]:
    function = getattr(kernels, name)

    def weighed(*args: Any, **options: Any) -> Any:
        if Counts.running is not None:
            tables = [x for x in (getattr(x, "table", x) for x in args) if isinstance(x, kernels.Table)]
            Counts.running.moved += by_table[tables[0]] if tables else MOVED[name](*args, **options)
            Counts.running.moved += size(options.get("squares"))
            if tables and name in ("encode_masks", "decode_masks"):
                Counts.running.moved += size(args[-1])
        return function(*args, **options)

    return weighed


def _weighed_table(name: str) -> Callable[..., kernels.Table]:
    function = getattr(kernels, name)

    def weighed(*args: Any) -> kernels.Table:
        table = function(*args)
        if Counts.running is not None:
            by_table[getattr(table, "table", table)] = TABLES[name](*args)
        return table

    return weighed


read_numbers = decision.read_numbers


def _read_numbers(exchanges: list[BucketExchange], replica_sum: Tensor | None) -> Tensor:
    """The numbers that decide, as they would be: every rank has every gradient, all is as it should be."""
    norms = (exchange.agreement.squared_norm for exchange in exchanges)
    report = [1.0] * sum(1 if norm is None else norm.numel() for norm in norms)
    for exchange in exchanges:
        report.extend([*[1.0] * len(exchange.agreement.payload.header), *exchange.control.numbers])
    assert len(read_numbers(exchanges, replica_sum)) == len(report) + (replica_sum is not None)
    return torch.tensor(report + [0.0] * (replica_sum is not None), dtype=torch.float64, device="cpu")


def _greet(optimizer: object, comm: object, has_problem: bool) -> CollectiveGenerator[bool]:
    """In place of the handshake, which compares numbers that are not there."""
    return True
    yield


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
def counting_device(backend: str, addresses: bool = True) -> Iterator[None]:
    """While it is entered, the meta device is an accelerator with this back end.

    Without ``addresses``, which are found slowly here, every tensor lies at 0.
    """
    with contextlib.ExitStack() as stack:
        for target, name, new in [
            (torch, "get_device_module", lambda device=None: Module),
            (Communicator, "get_backend", lambda comm, device: "nccl"),
            (Tensor, "pin_memory", _pin),
            (Tensor, "tolist", _to_list),
            (Tensor, "__float__", _number),
            (Tensor, "cpu", _cpu),
            (Tensor, "data_ptr", _data_ptr if addresses else data_ptr),
            (torchs, "_get_fused_kernels_supported_devices", lambda: [DEVICE.type]),
            (foreach, "_get_foreach_kernels_supported_devices", lambda: [DEVICE.type]),
            (torchs, "_get_foreach_kernels_supported_devices", lambda: [DEVICE.type]),
            (base, "check_tensors", lambda group: None),  # which refuses tensors without memory
            (step, "verify_peers", _greet),
            (decision, "read_numbers", _read_numbers),
            (triton.JITFunction, "run", run_kernel),
            (backends, "has_triton_driver", lambda: True),
            (triton_tables, "triton_device", lambda: DEVICE.type),
            *[(kernels, name, _weighed(name)) for name in (*MOVED, *BY_TABLE)],
            *[(kernels, name, _weighed_table(name)) for name in TABLES],
        ]:
            stack.enter_context(mock.patch.object(target, name, new))
        stack.enter_context(mock.patch.dict("os.environ", COMPOPT_BACKEND=backend))
        yield
