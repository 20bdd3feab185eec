"""Buckets: the parameters whose gradients travel in one payload, and flat storage for their state.

A bucket holds parameters of one group, dtype and device, in reverse order of registration (the
order in which backward finishes them). Each kind of state is one flat tensor a bucket;
``optimizer.state[p]`` holds views of it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._wire.control import Control
from .._wire.requests import Payload
from .._wire.scratch import Scratch
from .offload import Offload
from .shards import Shards

BUCKET_BYTES = (
    8 * 2**20
)  # of gradients: large enough for the link's bandwidth, small enough to overlap with backward
# elements: a few vectors of them stay in a core's own cache between one pass and the next
BLOCK = 131072
COMPRESS_FROM = 4096  # elements; smaller tensors, norm scales and biases are averaged dense


Chosen = Callable[[Tensor, dict, str], bool]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One kind of state: its dtype, and how many elements it has for a parameter of n."""

    dtype: torch.dtype
    packed: bool = False  # one bit an element, whole bytes a tensor
    compressed_only: bool = False
    scalar: bool = False  # one element a tensor
    on: str | None = (
        # of a compressed tensor only the elements on this mask, which is another, packed state
        None
    )
    optional: bool = False  # 0 where a checkpoint lacks it
    sharded: bool = False  # of each tensor only the elements in this rank's shard, as a vector
    of: Callable[[Tensor], int] | None = None  # elements for a parameter, fewer than n; flat

    def numel(self, n: int) -> int:
        return 1 if self.scalar else (n + 7) // 8 if self.packed else n


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def upload(numbers: list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device. Nobody waits: a pinned copy is read when the device comes to it."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def grad_dtype(p: Tensor) -> torch.dtype:
    """Of the gradients of ``p``: its own, unless PyTorch (2.10) was told of another.

    A setting, alike on all ranks.
    """
    return getattr(p, "grad_dtype", None) or p.dtype


def take_over(master: Tensor, p: Tensor) -> None:
    """``p`` into ``master`` where that, rounded, is something else."""
    rounded = master.to(p.dtype)
    if master.device.type == "cpu":  # elsewhere looking costs more than writing
        if not torch.equal(rounded, p):
            master.copy_(torch.where(rounded == p, master, p))
    else:
        master.copy_(torch.where(rounded == p, master, p))


def laid_out_as(p: Tensor, view: Tensor) -> Tensor:
    """This rank's part of a state as a DTensor with the mesh and placements of ``p``; as it is
    where p is none.
    """
    if not hasattr(p, "to_local"):
        return view
    return type(p).from_local(
        view, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def is_compressed(p: Tensor, group: dict, name: str = "") -> bool:
    """Whether ``p`` is compressed: what its group says, else matrices and larger of at least 4096
    elements.
    """
    said = group.get("compress")
    return p.dim() >= 2 and p.numel() >= COMPRESS_FROM if said is None else bool(said)


class Bucket:
    """Tensors of one group, dtype and device.

    ``index`` is its place in the order in which buckets are exchanged.
    """

    def __init__(
        self,
        index: int,
        group: dict,
        params: list[Tensor],
        names: list[str],
        chosen: Chosen | None = None,
        scratch: Scratch | None = None,
    ):
        self.index, self.group, self.params, self.names = index, group, params, names
        self.scratch = scratch or Scratch()  # all buckets of an optimizer share it
        self.compressed = [
            (chosen or is_compressed)(p, group, name) for p, name in zip(params, names, strict=True)
        ]
        self.lengths = [local(p).numel() for p in params]
        self.dtype, self.device = params[0].dtype, params[0].device
        self.grad_dtype = grad_dtype(params[0])
        self.wide = torch.promote_types(
            self.dtype, torch.float32
        )  # of what is computed with gradients and state
        # ranks that hold the same shards, among those that hold the other shards of the model
        self.copies = 1
        self.shards: Shards | None = (
            None  # which part of each tensor this rank owns, where state is sharded
        )
        self.parameter_bytes = 0  # handed over in the last step to gather updated parameters
        self.sharded: list[str] = []  # the names of sharded state
        self.gathered: dict[
            str, list[Tensor]
        ] = {}  # sharded state, whole: from consolidate_state to the next step
        self.offload: Offload | None = None  # what of the state is in host memory
        self.control = Control()  # what its payloads carry beside the header; set by the runtime
        self.state: dict[
            str, list[Tensor | None]
        ] = {}  # name -> a view for each tensor, None where it has no such state
        self.flat: dict[str, Tensor] = {}
        self.entries: list[
            dict[str, Tensor]
        ] = []  # the optimizer's state of each tensor, which shows the views
        self.cache: dict[
            str, list[Tensor]
        ] = {}  # derived from state, rebuilt when absent, never saved
        self.withheld = False  # this rank takes part in an exchange without its gradients
        self._held: dict[str, Tensor] = {}

    @property
    def numel(self) -> int:
        return sum(self.lengths)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the bucket's gradient uncompressed: what DDP would hand to its all-reduce."""
        return self.numel * self.grad_dtype.itemsize

    @property
    def rounds(self) -> bool:
        """Whether what is sent of compressed tensors is rounded; they owe again what that takes
        off.
        """
        if not any(self.compressed) or "residual" not in self.state:
            return False
        sent = self.group.get("payload_dtype") or self.grad_dtype
        return sent == torch.int8 or torch.promote_types(sent, self.wide) != sent

    def allocate(self, name: str, spec: StateSpec, held: list[dict[str, Tensor]]) -> None:
        """Flat zeros for one kind of state, and a view of it for every tensor that has it.

        State that lives on a mask gets the size of what is ``held`` of it.
        """
        self.sharded += [name] if spec.sharded else []
        has = [c or not spec.compressed_only for c in self.compressed]
        lengths = self.shards.sizes(self.shards.rank) if spec.sharded else self.lengths
        sizes = [spec.numel(n) if h else 0 for n, h in zip(lengths, has, strict=True)]
        if spec.of:
            sizes = [spec.of(p) if h else 0 for p, h in zip(self.params, has, strict=True)]
        elif spec.on:
            sizes = [
                old[name].numel() if name in old else n for n, old in zip(sizes, held, strict=True)
            ]
        host = self.offload is not None and name in self.offload.names
        self.flat[name] = torch.zeros(
            sum(sizes), dtype=spec.dtype, device="cpu" if host else self.device
        )
        if host and self.device.type == "cuda":
            self.flat[name] = self.flat[name].pin_memory()
        views = self.flat[name].split(sizes)
        self.state[name] = [
            self._shaped(v, i, spec) if h else None
            for i, (v, h) in enumerate(zip(views, has, strict=True))
        ]

    def resize(self, name: str, sizes: list[int]) -> list[Tensor]:
        """Storage of these sizes for state that lives on a mask, contents undefined; the old views
        stay readable.
        """
        old = self.state[name]
        if [view.numel() for view in old] != sizes:
            self.flat[name] = self.flat[name].new_empty(sum(sizes))
            views = self.flat[name].split(sizes)
            self.state[name] = [
                v if c else v.view_as(o)
                for v, o, c in zip(views, old, self.compressed, strict=True)
            ]
            for i, entry in enumerate(self.entries):
                entry[name] = self.shown(i, self.state[name][i], not self.compressed[i])
        return self.state[name]

    def _shaped(self, view: Tensor, i: int, spec: StateSpec) -> Tensor:
        if spec.scalar:
            return view.view(())
        flat = spec.packed or spec.sharded or spec.of or (spec.on and self.compressed[i])
        return view if flat else view.view(local(self.params[i]).shape)

    def shown(self, i: int, view: Tensor, whole: bool) -> Tensor:
        """How the optimizer's state shows ``view``: laid out as the parameter where it has the
        parameter's shape.
        """
        return laid_out_as(self.params[i].detach(), view) if whole else view

    def each(self, name: str, write: bool = False) -> Iterator[Tensor | None]:
        """One kind of state, a tensor at a time, on the bucket's device.

        What is offloaded is there until the next is asked for, and with ``write`` then stored. All
        others are the state itself."""
        if self.offload is None or name not in self.offload.names:
            return iter(self.state[name])
        return self.offload.each(name, self.state[name], self.device, write)

    def each_weight(self) -> Iterator[Tensor]:
        """What a step updates, whole, a tensor at a time: parameters, or their float32 masters."""
        if "master" in self.state:
            return self.each("master", write=True)
        return (local(p.detach()) for p in self.params)

    def fetch(self, name: str, i: int, at: Tensor | slice) -> Tensor:
        """A copy, on the bucket's device, of some elements of a state of tensor i."""
        if self.offload is not None:
            self.offload.finish()
        x = self.state[name][i].reshape(-1)
        return x[at if isinstance(at, slice) else at.to(x.device)].to(self.device, copy=True)

    def renew_masters(self) -> None:
        """Masters follow parameters that were set from outside: loaded, clamped, pruned, broadcast.

        A parameter is its master, rounded. Where it is not, element by element, the master takes
        its value."""
        if "master" not in self.state:
            return
        if self.offload is not None:
            self.offload.finish()
        for i, master in enumerate(self.state["master"]):
            p = self.own_part(i) if "master" in self.sharded else local(self.params[i].detach())
            for own, shown in zip(
                master.view(-1).split(BLOCK), p.reshape(-1).split(BLOCK), strict=True
            ):
                take_over(own, shown.to(own.device))

    def own_part(self, i: int) -> Tensor:
        """What this rank owns of parameter i, flat; a copy of what is not contiguous."""
        start, stop = self.shards.own[i]
        return local(self.params[i].detach()).reshape(-1)[start:stop]

    @property
    def weights(self) -> list[Tensor]:
        """What a step updates: the parameters, or their float32 masters where they are below
        float32.
        """
        return [self.weight(i) for i in range(len(self.params))]

    def weight(self, i: int) -> Tensor:
        if "master" in self.state:
            return self.state["master"][i]
        return local(self.params[i].detach()) if self.shards is None else self.own_part(i)

    def fetch_weight(self, i: int, at: Tensor | slice) -> Tensor:
        """A copy of some elements of parameter i, or of its master where that is whole on every
        rank.
        """
        if "master" in self.state:
            return self.fetch("master", i, at)
        return local(self.params[i].detach()).reshape(-1)[at].clone()

    def publish(self, i: int, master: Tensor | None = None) -> None:
        """Bring an updated master to its parameter; ``master`` is where it is while it is
        offloaded.
        """
        if "master" in self.state:
            local(self.params[i].detach()).copy_(self.weight(i) if master is None else master)

    @property
    def owes(self) -> bool:
        """Whether a dense step has to send what compressed ones before it held back."""
        if "owes" not in self.cache:
            if self.offload is not None:
                self.offload.finish()
            self.cache["owes"] = (
                bool(self.flat["residual"].any()) if "residual" in self.flat else False
            )
        return self.cache["owes"]

    def grads(self) -> list[Tensor | None]:
        """This rank's gradients; None where backward left none."""
        return [None if self.withheld or p.grad is None else local(p.grad) for p in self.params]

    def payload(self, lengths: list[int], dtype: torch.dtype | None, use: int = 0) -> Payload:
        """An empty payload with ``lengths[i]`` elements for tensor i. The next one for this ``use``
        has its memory.

        ``dtype``: on the wire; the gradients' where it is None. int8 is for the wire only, see
        ``int8_mean``."""
        size = len(self.params) + len(self.control) + sum(lengths)
        seed = (self.group["step"], self.index, use) if dtype == torch.int8 else None
        dtype = self.wide if seed else dtype or self.grad_dtype
        message = self._memory(f"message {use}", size, dtype)
        dropped = (
            self._memory(f"dropped {use}", sum(lengths), self.wide) if seed or self.rounds else None
        )
        payload = Payload(
            message, len(self.params), len(self.control), lengths, seed, dropped, self.scratch
        )
        self._write_control(payload)
        return payload

    def payloads(
        self, lengths: list[list[int]], dtype: torch.dtype | None
    ) -> tuple[list[Payload], Tensor]:
        """Empty payloads, one for each rank, with ``lengths[r]`` elements for rank r; and the
        memory they lie in.
        """
        fixed, dtype = len(self.params) + len(self.control), dtype or self.grad_dtype
        sizes, bodies = [fixed + sum(row) for row in lengths], [sum(row) for row in lengths]
        flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        dropped: list[Tensor] | list[None] = [None] * len(lengths)
        if self.rounds and torch.promote_types(dtype, self.wide) != dtype:
            dropped = list(self.memory("dropped", sum(bodies), self.wide).split(bodies))
        rows = [
            Payload(row, len(self.params), len(self.control), parts, dropped=rest)
            for row, parts, rest in zip(flat.split(sizes), lengths, dropped, strict=True)
        ]
        for row in rows:
            self._write_control(row)
        return rows, flat

    def _write_control(self, payload: Payload) -> None:
        if self.control:
            payload.control.copy_(upload(self.control.numbers, payload.flat.dtype, self.device))
        for at, words in self.control.on_device:
            payload.control[at].copy_(words)

    def memory(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory for one step, contents undefined. A CPU keeps it for the next: new pages cost more
        than copies.

        On a GPU nothing is kept: its allocator is quick, and memory is dear.
        """
        if self.device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=self.device)
        return self._memory(name, size, dtype)

    def let_go(self) -> None:
        """Use memory anew: somebody else may still write to what was used so far."""
        self._held = {}

    def _memory(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory kept under ``name``, made anew where it does not fit."""
        held = self._held.get(name)
        if held is None or held.numel() != size or held.dtype != dtype:
            held = self._held[name] = torch.empty(size, dtype=dtype, device=self.device)
        return held

    def present(self, payload: Payload) -> list[bool]:
        """For each tensor, whether any rank had a gradient for it (after averaging)."""
        marks = payload.header.tolist() if payload.marks is None else payload.marks
        return [mark > 0 for mark in marks]


def make_buckets(
    groups: Iterable[dict], chosen: Chosen | None = None, wanted: Container[Tensor] | None = None
) -> list[Bucket]:
    """Deal the parameters of all groups into buckets of about 8 MiB, in reverse order of
    registration.

    ``chosen(p, group, name)`` says whether a parameter is compressed; by default
    :func:`is_compressed` does. ``wanted``: only these; by default those that require a gradient.
    """
    dealt: list[tuple[dict, list[Tensor], list[str]]] = []
    for group, params, names in reversed(list(_uniform_runs(groups, wanted))):
        size = 0
        for p, name in zip(reversed(params), reversed(names), strict=True):
            nbytes = local(p).numel() * p.element_size()
            if size == 0 or size + nbytes > BUCKET_BYTES:
                dealt.append((group, [], []))
                size = 0
            dealt[-1][1].append(p)
            dealt[-1][2].append(name)
            size += max(nbytes, 1)
    scratch = Scratch()
    return [Bucket(index, *bucket, chosen, scratch) for index, bucket in enumerate(dealt)]


def _uniform_runs(
    groups: Iterable[dict], wanted: Container[Tensor] | None
) -> Iterator[tuple[dict, list[Tensor], list[str]]]:
    """Each group cut by dtypes, device and layout, with a name for every parameter."""
    for number, group in enumerate(groups):
        given = group.get("param_names") or [
            f"parameter {i} of group {number}" for i in range(len(group["params"]))
        ]
        runs: dict[tuple, tuple[dict, list[Tensor], list[str]]] = {}
        for p, name in zip(group["params"], given, strict=True):
            if not (p.requires_grad if wanted is None else p in wanted):
                continue
            layout = (getattr(p, "device_mesh", None), getattr(p, "placements", None))
            run = runs.setdefault((p.dtype, grad_dtype(p), p.device, *layout), (group, [], []))
            run[1].append(p)
            run[2].append(name)
        yield from runs.values()
