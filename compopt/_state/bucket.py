"""A bucket: parameters whose gradients travel in one payload, with their state and their masters.

A bucket holds parameters of one group, dtype and device. Tensors of one shape are neighbours, a
*stack*: each kind of state is one flat tensor with a view for each parameter, which
``optimizer.state[p]`` shows, and the state of a stack of k tensors is one tensor of k times the
shape. If parameters have less precision than float32, one kind of state is their float32 master,
which a step updates in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._wire.codec import PAYLOAD_CODECS
from .._wire.payload import (
    CACHE_ELEMENTS,
    Codec,
    ControlFields,
    Payload,
    PayloadDtype,
    Scratch,
    choose_block_size,
)
from .blocks import BlockCodec
from .layouts import Int8Blocks, Layout, Sharded, TensorInfo
from .offload import Offload
from .shards import ShardLayout
from .tensors import (
    CompressionRule,
    get_grad_dtype,
    is_compressed,
    pin,
    to_local,
)

# What the optimizer's state shows of one tensor.
Entry = dict[str, Tensor]


class Bucket:
    """Tensors of one group, dtype and device, with their state.

    ``index`` is its place in the order in which buckets are exchanged.
    """

    shards: ShardLayout  # only where state is sharded

    def __init__(
        self,
        index: int,
        group: dict[str, Any],
        params: list[Tensor],
        names: list[str],
        compression_rule: CompressionRule | None = None,
        scratch: Scratch | None = None,
    ):
        self.index = index
        self.group, self.params, self.names = group, params, names
        # The model's parameters. Those of a ``ReduceScatterBucket`` (FSDP2) differ from its
        # ``params``, which are stand-ins that hold gradients only.
        self.model_params = params
        rule = compression_rule or is_compressed
        self.compressed = [rule(p, group, name) for p, name in zip(params, names, strict=True)]
        # of this rank's parts, as they were when the bucket was made
        self.shapes = [to_local(p).shape for p in params]
        self.lengths = [shape.numel() for shape in self.shapes]
        self.dtype, self.device = params[0].dtype, params[0].device
        # True if all are DTensors; otherwise none is.
        self.is_dtensor = any(hasattr(p, "to_local") for p in params)
        self.grad_dtype = get_grad_dtype(params[0])
        self.compute_dtype = torch.promote_types(self.dtype, torch.float32)
        # True without other ranks, unless ``simulate``: nothing is compressed or rounded.
        self.sends_nothing = False
        # The number of ranks of one sharded model that hold the same part of these tensors. A sum
        # over the mesh counts the part that often, so its squared norm is divided by this number
        # first.
        self.replicate_size = 1
        # True while this rank takes part in an exchange without its gradients.
        self.withholds_gradients = False
        # Factor on this rank's gradients, in a Join that averages over ranks with data.
        self.gradient_factor = 1.0

        # Storage of state: ``flat[name]``, and ``state[name]``, a view for each tensor. A tensor
        # without such state has None, which the type omits: some kinds exist for compressed
        # tensors only. ``sizes[name]`` are the elements of the views.
        self.layouts: dict[str, Layout] = {}
        # of state in blocks: the shapes of what it is decoded to
        self.decoded_shapes: dict[str, list[tuple[int, ...]]] = {}
        self.flat: dict[str, Tensor] = {}
        self.state: dict[str, list[Tensor]] = {}
        self.sizes: dict[str, list[int]] = {}
        # What ``store_state`` has replaced: memory, sizes, views, and what entries have shown.
        self._replaced: dict[str, tuple[Tensor, list[int], list[Tensor], list[Tensor]]] = {}
        # Counts allocations: a change of the version means that addresses have changed.
        self.storage_version = 0
        # Stacks of state, and the version in which they are views of it.
        self._stacks: dict[tuple[str, int, int], tuple[int, Tensor]] = {}
        # New state that the running step has not committed yet: ``NextValues``, by name.
        self.next: dict[str, list[tuple[Sequence[int], Tensor, bool]]] = {}
        # The steps each tensor has taken: ``state["step"]`` as a vector.
        self.step_counts: Tensor | None = None
        # The optimizer's state of each tensor, which shows the views.
        self.entries: list[Entry] = []
        self.offload: Offload | None = None
        # Unsharded copies of sharded state, from consolidate_state to the next step.
        self.gathered_state: dict[str, list[Tensor | None]] = {}
        # Which tensors have had a gradient on any rank since the bucket was made; empty at first.
        self.had_gradients: list[bool] = []
        # Derived from state: recomputed if absent, never saved. ``has_residual``: a residual may be
        # non-zero; ``mask_has_residual``: on Radius's ``mask``. ``momentum_mask``: the one that
        # SCAPE's momentum is on; ``next_mask``: the one that its next step sends.
        # ``union_and_leftovers``: of TAGC's last exchange. ``plan`` and ``runs``: SEPARATE's
        # projections and stacks. ``guesses``, ``pieces``, ``products``,
        # ``factors``, ``flags``, ``dense`` and ``averages``: thresholds, runs and tables of the
        # native backend.
        self.cache: dict[str, Any] = {}

        # Messages and memory of a step. All buckets of an optimizer share the scratch memory.
        self.scratch = scratch or Scratch()
        # Control fields of the next payload, set by the exchange.
        self.control = ControlFields()
        # Bytes of updated parameters that the last step gathered.
        self.parameter_bytes = 0
        # The backend's codecs of payloads, and of state in 8 bits.
        self.codecs, self.blocks = PAYLOAD_CODECS, BlockCodec()
        self._memory = Scratch()

    @property
    def numel(self) -> int:
        return sum(self.lengths)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense gradient, which DDP would all-reduce."""
        return self.numel * self.grad_dtype.itemsize

    @property
    def compressed_lengths(self) -> tuple[int, ...]:
        """The elements of each compressed tensor, 0 for the others."""
        pairs = zip(self.lengths, self.compressed, strict=True)
        return tuple(n if compressed else 0 for n, compressed in pairs)

    def grads(self) -> list[Tensor | None]:
        """Return this rank's gradients; None for a tensor without one."""
        if self.withholds_gradients:
            return [None] * len(self.params)
        grads = [p.grad for p in self.params]
        if self.is_dtensor:
            grads = [None if g is None else to_local(g) for g in grads]
        if self.gradient_factor != 1:
            return [None if g is None else g * self.gradient_factor for g in grads]
        return grads

    # State

    @property
    def is_sharded(self) -> bool:
        """True if each rank owns the state of a part of each tensor."""
        return "shards" in vars(self)

    @property
    def sharded_names(self) -> list[str]:
        """The names of sharded state."""
        return [name for name, layout in self.layouts.items() if isinstance(layout, Sharded)]

    @property
    def has_residual(self) -> bool:
        """True if residuals may be non-zero, so a dense step has to send them."""
        if "has_residual" not in self.cache:
            self.wait_for_host()
            residual = self.flat.get("residual")
            self.cache["has_residual"] = residual is not None and bool(residual.any())
        return bool(self.cache["has_residual"])

    def get_tensor_info(self, i: int) -> TensorInfo:
        """Return tensor i as layouts see it."""
        own_range = self.shards.own_ranges[i] if self.is_sharded else None
        return TensorInfo(self.params[i], self.compressed[i], own_range)

    def allocate(self, name: str, layout: Layout, entries: Sequence[Mapping[str, Tensor]]) -> None:
        """Allocate one kind of state, zeros, with a view for every tensor that has it.

        ``entries`` are the previous ones: a state on a mask keeps its size.
        """
        self.layouts[name] = layout
        self.storage_version += 1
        infos = [self.get_tensor_info(i) for i in range(len(self.params))]
        if isinstance(layout, Int8Blocks):
            self.decoded_shapes[name] = [layout.exact.stored_shape(info) for info in infos]
        has_state = [info.compressed or not layout.compressed_only for info in infos]
        sizes = [
            layout.numel(info, old.get(name)) if has else 0
            for info, has, old in zip(infos, has_state, entries, strict=True)
        ]
        self.sizes[name] = sizes
        if self.offload is not None and name in self.offload.names:
            zeros = torch.zeros(sum(sizes), dtype=layout.dtype, device="cpu")
            self.flat[name] = pin(zeros, self.device)
        else:
            self.flat[name] = torch.zeros(sum(sizes), dtype=layout.dtype, device=self.device)
        views = torch.split(self.flat[name], sizes)
        shaped: list[Any] = [
            view.view(layout.stored_shape(info, view)) if has else None
            for view, info, has in zip(views, infos, has_state, strict=True)
        ]
        self.state[name] = shaped

    def stack_state(self, name: str, indices: range) -> Tensor:
        """Return one kind of state of neighbours that have it in one shape, as one tensor: a view
        of the state, or a copy where it has been collected from other buckets.
        """
        stack = self.view_stack(name, indices)
        return torch.stack([self.state[name][i] for i in indices]) if stack is None else stack

    def view_stack(self, name: str, indices: Sequence[int]) -> Tensor | None:
        """Return a view of one kind of state of neighbours; None if they are not next to each
        other in memory.
        """
        key = name, indices[0], len(indices)
        version, stack = self._stacks.get(key, (None, None))
        if stack is not None and version == self.storage_version:
            return stack
        views = [self.state[name][i] for i in indices]
        first, size = views[0], views[0].itemsize * views[0].numel()
        distances = [b.data_ptr() - a.data_ptr() for a, b in pairwise(views)]
        if any(distance != size for distance in distances) or not first.is_contiguous():
            return None
        stack = first.as_strided((len(views), *first.shape), (first.numel(), *first.stride()))
        self._stacks[key] = self.storage_version, stack
        return stack

    def resize_state(self, name: str, sizes: list[int]) -> list[Tensor]:
        """Allocate state on a mask with other sizes, contents undefined; return its views.

        The previous views remain readable.
        """
        if self.sizes[name] == sizes:
            return self.state[name]
        self.sizes[name] = sizes
        self._use_storage(name, self.flat[name].new_empty(sum(sizes)))
        return self.state[name]

    def store_state(self, name: str, values: Tensor) -> None:
        """Set a state to ``values``, from ``get_memory``, of which nothing is read any more.

        On a CPU the two change places, which costs less than a copy.
        """
        flat = self.flat[name]
        is_plain = name in self.layouts and all(x is not None for x in self.state[name])
        if self.device.type != "cpu" or values.dtype != flat.dtype or not is_plain:
            flat.copy_(values)
            return
        sizes, before = self.sizes[name], self._replaced.get(name)
        shown = [entry[name] for entry in self.entries]
        self._replaced[name] = flat, sizes, self.state[name], shown
        if before is not None and before[0] is values and before[1] == sizes:
            self.storage_version += 1
            self.flat[name], _, self.state[name], shown = before
            for entry, view in zip(self.entries, shown, strict=True):
                entry[name] = view
        else:
            self._use_storage(name, values)
        self._memory.replace(values, flat)

    def _use_storage(self, name: str, flat: Tensor) -> None:
        """Keep a state in this memory; the previous views remain readable."""
        layout = self.layouts[name]
        self.storage_version += 1
        self.flat[name] = flat
        views = torch.split(flat, self.sizes[name])
        infos = [self.get_tensor_info(i) for i in range(len(self.params))]
        self.state[name] = [
            view.view(layout.stored_shape(info, view))
            for view, info in zip(views, infos, strict=True)
        ]
        for entry, view, info in zip(self.entries, self.state[name], infos, strict=False):
            entry[name] = layout.view_for_user(view, info)

    def set_step_counts(self, counts: Tensor) -> None:
        """Set the number of steps that each tensor has taken."""
        self.storage_version += 1
        self.step_counts, self.state["step"] = counts, list(counts.unbind())

    # Offloaded state

    def iterate_state(self, name: str, write: bool = False) -> Iterator[Tensor]:
        """Iterate over one kind of state on the bucket's device, a tensor at a time.

        An offloaded tensor is valid until the next one is requested; with ``write`` it is then
        stored.
        """
        if self.offload is None or name not in self.offload.names:
            return iter(self.state[name])
        return self.offload.iterate(name, self.state[name], self.device, write)

    def fetch_state(self, name: str, i: int, at: Tensor | slice) -> Tensor:
        """Return a copy, on the bucket's device, of some elements of a state of tensor i."""
        self.wait_for_host()
        x = self.state[name][i].reshape(-1)
        return x[at if isinstance(at, slice) else at.to(x.device)].to(self.device, copy=True)

    def wait_for_host(self) -> None:
        """Wait until copies to host memory have ended."""
        if self.offload is not None:
            self.offload.finish()

    # Weights: what a step updates, parameters or their float32 masters

    @property
    def local_params(self) -> list[Tensor]:
        """This rank's parts of the parameters."""
        return [to_local(p) for p in self.params] if self.is_dtensor else self.params

    @property
    def weights(self) -> list[Tensor]:
        """The weights of all tensors."""
        if "master" in self.state:
            return self.state["master"]
        params = self.local_params
        if not self.is_sharded:
            return params
        rows = zip(params, self.shards.own_ranges, strict=True)
        return [p.detach().reshape(-1)[start:stop] for p, (start, stop) in rows]

    def weight(self, i: int) -> Tensor:
        """Return the weights of tensor i: of the part that this rank owns, flat, if sharded; then a
        copy if the parameter is not contiguous.
        """
        if "master" in self.state:
            return self.state["master"][i]
        p = to_local(self.params[i].detach())
        if not self.is_sharded:
            return p
        start, stop = self.shards.own_ranges[i]
        return p.reshape(-1)[start:stop]

    def iterate_weights(self) -> Iterator[Tensor]:
        """Iterate over the unsharded weights, a tensor at a time."""
        if "master" in self.state:
            return self.iterate_state("master", write=True)
        return (to_local(p.detach()) for p in self.params)

    def fetch_weight(self, i: int, at: Tensor | slice) -> Tensor:
        """Return a copy of some elements of the unsharded weights of tensor i."""
        if "master" in self.state:
            return self.fetch_state("master", i, at)
        return to_local(self.params[i].detach()).reshape(-1)[at].clone()

    def publish_master(self, i: int, master: Tensor | None = None) -> None:
        """Copy an updated master, if there is one, to its parameter.

        ``master``: its copy on the device, if it is offloaded.
        """
        if "master" in self.state:
            to_local(self.params[i].detach()).copy_(self.weight(i) if master is None else master)

    def publish_masters(self, indices: list[int]) -> None:
        """Copy updated masters, if there are any, to their parameters."""
        if "master" in self.state and indices:
            params = [to_local(self.params[i].detach()) for i in indices]
            torch._foreach_copy_(params, [self.weight(i) for i in indices])

    def update_masters(self) -> None:
        """Update masters from parameters that were set from outside: loaded, clamped, broadcast.

        A parameter is its master, rounded. An element that differs from that is copied to the
        master.
        """
        if "master" not in self.state:
            return
        self.wait_for_host()
        for i, master in enumerate(self.state["master"]):
            info = self.get_tensor_info(i)
            part = self.layouts["master"].cut_shard(to_local(self.params[i].detach()), info)
            values = part.reshape(-1)
            size = choose_block_size(values, on_cpu=CACHE_ELEMENTS)
            blocks = zip(master.view(-1).split(size), values.split(size), strict=True)
            for block, new in blocks:
                value = new.to(block.device)
                rounded = block.to(value.dtype)
                # On a device the comparison would cost more than the copy.
                if block.device.type == "cpu" and torch.equal(rounded, value):
                    continue
                block.copy_(torch.where(rounded == value, block, value))

    # Messages

    @property
    def is_rounded(self) -> bool:
        """True if payloads round the values of tensors with a residual. The residual keeps the
        rounding error.
        """
        if self.sends_nothing or all(e is None for e in self.state.get("residual", ())):
            return False
        codec = self.codecs[self.group.get("payload_dtype")]
        return codec.bits is not None or self._is_narrow(codec.dtype or self.grad_dtype)

    def _is_narrow(self, dtype: torch.dtype) -> bool:
        return torch.promote_types(dtype, self.compute_dtype) != dtype

    def make_payload(
        self,
        lengths: list[int],
        dtype: PayloadDtype,
        use: int = 0,
        gradient_flags: Sequence[float] = (),
        fields: Tensor | None = None,
    ) -> Payload:
        """Make an empty payload with ``lengths[i]`` elements for tensor i, and the
        ``gradient_flags`` in its header, if any; or with the ``fields`` of another payload.

        ``dtype`` is that on the network; None is that of the gradients. On a CPU the next payload
        for this ``use`` reuses the memory.
        """
        codec, body = self._find_codec(dtype), sum(lengths)
        header_size, control_size = len(self.params), len(self.control.numbers)
        written = self.compute_dtype if codec.bits else codec.dtype or self.grad_dtype
        control = ControlFields()
        if fields is None:
            fields, control = self._pin_fields(gradient_flags, written), self.control
        size = header_size + control_size + body
        message = self.get_memory(f"message {use}", size, written)
        errors = None
        if codec.bits or self.is_rounded:
            errors = self.get_memory(f"rounding_errors {use}", body, self.compute_dtype)
        seed = (self.group["step"], self.index, use)
        sizes = header_size, control_size, lengths
        payload = Payload(message, *sizes, codec, errors, seed, self.scratch)
        payload.write_fields(fields, control)
        return payload

    def make_payloads(
        self, lengths: list[list[int]], dtype: PayloadDtype
    ) -> tuple[list[Payload], Tensor]:
        """Make an empty payload for each rank, that of rank r with ``lengths[r]`` elements.

        Returns the payloads, and the memory in which they lie one after the other. The next ones
        reuse it.
        """
        codec = self._find_codec(dtype)
        header_size, control_size = len(self.params), len(self.control.numbers)
        sent = codec.dtype or self.grad_dtype
        fields = self._pin_fields((), sent)
        bodies = [sum(row) for row in lengths]
        sizes = [header_size + control_size + body for body in bodies]
        flat = self._memory("messages", sum(sizes), sent, self.device)
        errors: Sequence[Tensor | None] = [None] * len(lengths)
        if self.is_rounded and self._is_narrow(sent):
            memory = self.get_memory("rounding_errors", sum(bodies), self.compute_dtype)
            errors = memory.split(bodies)
        rows = [
            Payload(row, header_size, control_size, parts, codec, error)
            for row, parts, error in zip(flat.split(sizes), lengths, errors, strict=True)
        ]
        rows[0].write_fields(fields, self.control)
        first, *others = [row.control for row in rows]
        if others and len(first):
            torch._foreach_copy_(others, [first] * len(others))
        return rows, flat

    def _find_codec(self, dtype: PayloadDtype) -> Codec:
        """Return the codec of a payload.

        A single process does not round: its payload has the gradients' dtype (None), or that of the
        residuals while some are left.
        """
        if self.sends_nothing:
            dtype = self.compute_dtype if self.has_residual else None
        return self.codecs[dtype]

    def _pin_fields(self, gradient_flags: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Return the flags and the control fields on the host, for ``Payload.write_fields``."""
        fields = torch.tensor([*gradient_flags, *self.control.numbers], dtype=dtype, device="cpu")
        return fields if self.device.type == "cpu" else pin(fields, self.device)

    def count_steps(self, have_gradients: list[bool]) -> None:
        """Add 1 to the step count of each tensor with a gradient on any rank."""
        indices = [i for i, has_gradient in enumerate(have_gradients) if has_gradient]
        if self.step_counts is not None and len(indices) == len(self.params):
            self.step_counts.add_(1)
        elif indices:
            torch._foreach_add_([self.state["step"][i] for i in indices], 1)

    # Memory of a step

    def get_memory(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory for one step, contents undefined.

        On a CPU the next step reuses it, because new pages cost more than copies. On a GPU the
        allocator is fast, and memory is scarce.
        """
        if self.device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=self.device)
        return self._memory.get_exact_size(name, size, dtype, self.device)

    def release_memory(self) -> None:
        """Do not reuse memory to which an abandoned collective may still write."""
        self._memory = Scratch()
