"""Tensors of one group, dtype and device, and what is kept of them: flat storage, a view a tensor.

Each kind of state is one flat tensor; ``optimizer.state[p]`` shows views of it. Where parameters
are below float32 one kind of state is their master, which a step updates in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._wire.payload import block_size
from .layouts import Layout, Member, Sharded
from .offload import Offload
from .shards import ShardLayout
from .tensors import CompressionRule, get_grad_dtype, is_compressed, pin, to_local

# elements: a few vectors of them stay in a core's own cache between one pass and the next
BLOCK = 131072

Entry = dict[str, Tensor]  # what the optimizer's state holds of one tensor


class Kept:
    """Tensors of one group, dtype and device, with their state."""

    def __init__(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        names: list[str],
        chosen: CompressionRule | None = None,
    ):
        self.group, self.params, self.names = group, params, names
        self.origins = params  # whose gradients theirs are: others' inside FSDP
        chosen = chosen or is_compressed
        self.compressed = [chosen(p, group, name) for p, name in zip(params, names, strict=True)]
        self.lengths = [to_local(p).numel() for p in params]
        self.dtype, self.device = params[0].dtype, params[0].device
        # whether they are DTensors: all are, or none is
        self.distributed = any(hasattr(p, "to_local") for p in params)
        self.grad_dtype = get_grad_dtype(params[0])
        # of what is computed with gradients and state
        self.wide = torch.promote_types(self.dtype, torch.float32)
        # no other rank to exchange with: nothing is compressed, and nothing rounded
        self.alone = False
        # ranks that hold the same shards, among those that hold the other shards of the model
        self.copies = 1
        self._shards: ShardLayout | None = None
        self.offload: Offload | None = None  # what of the state is in host memory
        self.layouts: dict[str, Layout] = {}
        self.made = 0  # how often storage was made: where it lies follows from that
        self.flat: dict[str, Tensor] = {}
        # name -> a view for each tensor; None, which the type leaves out, where a tensor has no
        # such state: of some kinds only compressed tensors have any
        self.state: dict[str, list[Tensor]] = {}
        self.sizes: dict[str, list[int]] = {}  # of these views
        # how many steps each tensor has taken: what ``state["step"]`` shows, as a vector
        self.counts: Tensor | None = None
        # the optimizer's state of each tensor, which shows the views
        self.entries: list[Entry] = []
        # sharded state, whole: from consolidate_state to the next step
        self.gathered: dict[str, list[Tensor | None]] = {}
        # derived from state, rebuilt when absent, never saved
        self.cache: dict[str, Any] = {}

    @property
    def numel(self) -> int:
        return sum(self.lengths)

    @property
    def compressed_lengths(self) -> tuple[int, ...]:
        """The elements of each compressed tensor, 0 for the others."""
        pairs = zip(self.lengths, self.compressed, strict=True)
        return tuple(n if compressed else 0 for n, compressed in pairs)

    @property
    def cut(self) -> bool:
        """Whether state is sharded: each rank owns a part of each tensor."""
        return self._shards is not None

    @property
    def shards(self) -> ShardLayout:
        """Which part of each tensor this rank owns."""
        if self._shards is None:
            raise RuntimeError("this bucket is not cut into shards: set `shards` first.")
        return self._shards

    @shards.setter
    def shards(self, shards: ShardLayout) -> None:
        self._shards = shards

    @property
    def sharded(self) -> list[str]:
        """The names of sharded state."""
        return [name for name, layout in self.layouts.items() if isinstance(layout, Sharded)]

    def member(self, i: int) -> Member:
        own = self.shards.own[i] if self.cut else None
        return Member(self.params[i], self.compressed[i], own)

    def allocate(self, name: str, layout: Layout, held: Sequence[Mapping[str, Tensor]]) -> None:
        """Flat zeros for one kind of state, and a view of it for every tensor that has it.

        ``held`` is what is kept so far of every tensor.
        """
        self.layouts[name] = layout
        self.made += 1
        members = [self.member(i) for i in range(len(self.params))]
        has = [member.compressed or not layout.compressed_only for member in members]
        sizes = [
            layout.numel(member, old.get(name)) if here else 0
            for member, here, old in zip(members, has, held, strict=True)
        ]
        self.sizes[name] = sizes
        self.flat[name] = self._zeros(name, sum(sizes), layout.dtype)
        views: list[Any] = list(torch.split(self.flat[name], sizes))
        for i, (member, here) in enumerate(zip(members, has, strict=True)):
            views[i] = views[i].view(layout.shape(member)) if here else None
        self.state[name] = views

    def _zeros(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        if self.offload is None or name not in self.offload.names:
            return torch.zeros(size, dtype=dtype, device=self.device)
        flat = torch.zeros(size, dtype=dtype, device="cpu")
        return pin(flat, self.device)

    def resize(self, name: str, sizes: list[int]) -> list[Tensor]:
        """Storage of these sizes for state that lives on a mask, contents undefined.

        The old views stay readable.
        """
        old, layout = self.state[name], self.layouts[name]
        if self.sizes[name] == sizes:
            return old
        self.made += 1
        self.sizes[name] = sizes
        self.flat[name] = self.flat[name].new_empty(sum(sizes))
        views = torch.split(self.flat[name], sizes)
        members = [self.member(i) for i in range(len(self.params))]
        self.state[name] = [
            view.view(layout.shape(member)) for view, member in zip(views, members, strict=True)
        ]
        for entry, view, member in zip(self.entries, self.state[name], members, strict=False):
            entry[name] = layout.view_for_user(view, member)
        return self.state[name]

    def each(self, name: str, write: bool = False) -> Iterator[Tensor]:
        """One kind of state, a tensor at a time, on the bucket's device.

        What is offloaded is there until the next is asked for, and with ``write`` then stored. All
        others are the state itself.
        """
        if self.offload is None or name not in self.offload.names:
            return iter(self.state[name])
        return self.offload.each(name, self.state[name], self.device, write)

    def fetch(self, name: str, i: int, at: Tensor | slice) -> Tensor:
        """A copy, on the bucket's device, of some elements of a state of tensor i."""
        self.wait_for_host()
        x = self.state[name][i].reshape(-1)
        return x[at if isinstance(at, slice) else at.to(x.device)].to(self.device, copy=True)

    def wait_for_host(self) -> None:
        """Wait until host memory holds what it should."""
        if self.offload is not None:
            self.offload.finish()

    @property
    def owes(self) -> bool:
        """Whether a dense step has to send what compressed ones before it held back."""
        if "has_residual" not in self.cache:
            self.wait_for_host()
            residual = self.flat.get("residual")
            self.cache["has_residual"] = residual is not None and bool(residual.any())
        return bool(self.cache["has_residual"])

    def count(self, counts: Tensor) -> None:
        """From now on these are the numbers of steps that tensors have taken."""
        self.made += 1
        self.counts, self.state["step"] = counts, list(counts.unbind())

    # What a step updates: parameters, or their float32 masters where they are below float32

    @property
    def locals(self) -> list[Tensor]:
        """This rank's parts of parameters."""
        return [to_local(p) for p in self.params] if self.distributed else self.params

    def own_part(self, i: int) -> Tensor:
        """What this rank owns of parameter i, flat; a copy of what is not contiguous."""
        p = to_local(self.params[i].detach()).reshape(-1)
        if not self.cut:
            return p
        start, stop = self.shards.own[i]
        return p[start:stop]

    @property
    def weights(self) -> list[Tensor]:
        """What a step updates of all tensors."""
        if "master" in self.state:
            return self.state["master"]
        if self.cut or self.distributed:
            return [self.weight(i) for i in range(len(self.params))]
        return [p.detach() for p in self.params]

    def weight(self, i: int) -> Tensor:
        """What a step updates of tensor i."""
        if "master" in self.state:
            return self.state["master"][i]
        return self.own_part(i) if self.cut else to_local(self.params[i].detach())

    def each_weight(self) -> Iterator[Tensor]:
        """What a step updates, whole, a tensor at a time."""
        if "master" in self.state:
            return self.each("master", write=True)
        return (to_local(p.detach()) for p in self.params)

    def fetch_weight(self, i: int, at: Tensor | slice) -> Tensor:
        """A copy of some elements of what a step updates of tensor i, whole."""
        if "master" in self.state:
            return self.fetch("master", i, at)
        return to_local(self.params[i].detach()).reshape(-1)[at].clone()

    def publish(self, i: int, master: Tensor | None = None) -> None:
        """Bring an updated master to its parameter.

        ``master`` is where it is while it is offloaded.
        """
        if "master" in self.state:
            to_local(self.params[i].detach()).copy_(self.weight(i) if master is None else master)

    def update_masters(self) -> None:
        """Masters follow parameters that were set from outside: loaded, clamped, pruned, broadcast.

        A parameter is its master, rounded. Where it is not, element by element, the master takes
        its value.
        """
        if "master" not in self.state:
            return
        self.wait_for_host()
        for i, master in enumerate(self.state["master"]):
            p = self.layouts["master"].part(to_local(self.params[i].detach()), self.member(i))
            shown_, block = p.reshape(-1), block_size(BLOCK, p.reshape(-1))
            for own, shown in zip(master.view(-1).split(block), shown_.split(block), strict=True):
                take_over(own, shown.to(own.device))


def take_over(master: Tensor, p: Tensor) -> None:
    """``p`` into ``master`` where that, rounded, is something else."""
    rounded = master.to(p.dtype)
    # on a device looking costs more than writing
    if master.device.type == "cpu" and torch.equal(rounded, p):
        return
    master.copy_(torch.where(rounded == p, master, p))
