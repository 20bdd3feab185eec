"""The engine of an optimizer: buckets and their state, the ranks it averages with, the back end,
and what is on its way to the other ranks.

``CompressedOptimizer`` is torch's face of it, and holds one. The engine knows the optimizer as a
``Face`` and does not keep it alive: there is no cycle, and both go when the optimizer is deleted.
``build`` lays everything out for the groups there are; it runs anew when groups, ranks or a
checkpoint come. What outlives that is set in ``__init__``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .._ops.backends import choose_backend, fall_back_to_torch
from .._ops.pytorch import Ops
from .._state.buckets import Bucket, make_buckets
from .._state.layouts import Layout
from .._state.offload import Offload
from .._state.shards import Shards
from .._wire.comm import Comm, ProcessGroup, connect, has_met_others
from .._wire.meshes import copies_of, shard_comms
from .._wire.warning import warn
from . import checkpoint, frozen
from .face import Face, Group
from .missing_ranks import Note
from .peers import Peers, warn_of_missing_group
from .runtime import Runtime
from .settings import structure_of
from .stats import Stats
from .weakly import weakly
from .when import Trial, trial

OFFLOADED = {"residual": ("residual",), "all": ("residual", "master")}


class Engine:
    """What drives one optimizer."""

    def __init__(
        self,
        face: Face,
        group: ProcessGroup | Comm | None,
        met: frozenset[Tensor] = frozenset(),
        trained: frozenset[Tensor] = frozenset(),
    ):
        self._face = weakref.ref(face)
        self.group = group
        self.met = met  # the parameters of all groups
        self.trained = trained  # those that are laid out
        self.built = False
        self.told = False  # the user, of what is compressed
        self.dense = False  # there are no other ranks: steps are the base's
        self.alone = False  # another optimizer wraps this one and averages for it
        self.retired = False  # another optimizer has its parameters
        self.handed_over = False  # DDP has left the gradients of this step as they are
        self.scaled = False  # a GradScaler drives the steps
        self.warned: set[str] = set()  # of what the user was told, by keys
        self.half_step = ""  # why parameters and state no longer belong together
        self.note: Note | None = None  # that this rank has left for the others
        self.skipped_in_a_row = 0
        self.found = ""  # by a trial of when="auto"
        # the step at which residuals became their mean over ranks
        self.consolidated: int | None = None
        # buckets of before a rebind, while their shards are not yet cut again
        self.before: list[Bucket] | None = None
        # of local steps: they may well be alike on all ranks
        self.has_pseudo_gradients = False
        # integrations that wait for a step
        self.told_of_steps: list[Callable[[], None]] = []

    @property
    def face(self) -> Face:
        """The optimizer."""
        face = self._face()
        if face is None:
            raise ReferenceError("this engine's optimizer was deleted: use it while that lives.")
        return face

    @property
    def name(self) -> str:
        """The optimizer's class."""
        return type(self.face).__name__

    @property
    def option_groups(self) -> list[Group]:
        """The groups that hold the options of the class."""
        return self.face._option_groups

    @property
    def steps(self) -> int:
        """Steps applied so far."""
        groups = self.option_groups
        return int(groups[0]["step"]) if groups else 0

    @property
    def device(self) -> torch.device:
        """Where words for other ranks are."""
        return self.buckets[0].device if self.buckets else torch.device("cpu")

    def is_first(self, key: str) -> bool:
        """Whether ``key`` comes here for the first time."""
        is_first = key not in self.warned
        self.warned.add(key)
        return is_first

    def warn_once(self, key: str, message: str, rank: int) -> None:
        """Warn, where this was not done for ``key`` before; on ``rank`` 0 only."""
        if self.is_first(key):
            warn(message, rank)

    # Layout

    def build(self) -> None:
        """Lay out buckets and state for the current groups.

        State that is there already is copied in.
        """
        face = self.face
        face.before_layout()
        groups = self.option_groups
        self.ops: Ops = choose_backend({p.device.type for group in groups for p in group["params"]})
        self.stats = Stats(residual_norm=weakly(self.residual_norm))
        self.connection: Comm | None = None
        self.counted = 0  # bytes that were sent before the running step
        self.peers = Peers()
        self.runtime = Runtime(weakly(face.algorithm))
        self.built = True
        frozen.meet(self)
        self.buckets = make_buckets(groups, face.is_compressed, self.trained)
        # without memory, never exchanged
        self.shelf = make_buckets(groups, face.is_compressed, self.met - self.trained)
        self.trial: Trial | None = trial(groups, self.buckets)
        self.offload = Offload(OFFLOADED.get(face.offload or "", ()))
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        parted = () if face.reduces_inside else self.buckets  # else its ranks hold the other parts
        self.shards = shard_comms(p for bucket in parted for p in bucket.params)
        for bucket in self.buckets:
            self._fill(bucket)
        face.after_layout()

    def _fill(self, bucket: Bucket) -> None:
        face = self.face
        bucket.alone = self.dense
        bucket.copies = copies_of(bucket.params[0], self.shards)
        bucket.offload = self.offload if self.offload.names else None
        if face.sharded:
            comm = self.comm
            bucket.shards = Shards(bucket.lengths, bucket.compressed, comm.rank, comm.size)
        bucket.job = self.ops.quantized_mean(bucket)
        checkpoint.fill(bucket, self.specs(bucket), face.state)
        face.restore(bucket)

    def rebuild(self) -> None:
        """Lay out anew, over the same ranks."""
        self.settle()
        self.runtime.overlap.discard()
        connection = self.connection
        self.build()
        self.connection = connection
        self.counted = connection.bytes_sent if connection else 0

    def specs(self, bucket: Bucket) -> dict[str, Layout]:
        """The state of a bucket's tensors, by name."""
        return self.face._specs(bucket)

    # The ranks

    @property
    def comm(self) -> Comm:
        """The ranks to average over; connected when first needed.

        Without a process group it is this process alone, until there is one: torch.distributed may
        be initialised after a checkpoint was loaded.
        """
        if self._others_came():
            self.settle()
            self.runtime.overlap.discard()
            self.build()  # without a communicator: state is cut for the ranks there are now
        if self.connection is None:
            self.connection = Comm(alone=True) if self.alone else connect(self.group)
        return self.connection

    def look_around(self) -> Comm:
        """The ranks that the coming step is taken with; every bucket hears whether there are any
        others.
        """
        comm = self.comm
        self.dense = comm.size == 1 and not self.face.simulate
        warn_of_missing_group(self, comm)
        for bucket in self.buckets:
            if bucket.alone != self.dense:
                bucket.alone = self.dense
                bucket.cache.pop("owes", None)  # what rounding took off is owed too
        return comm

    def _others_came(self) -> bool:
        if self.connection is None or self.group is not None or self.alone:
            return False
        return has_met_others(self.connection)

    def connect_to(self, group: ProcessGroup | Comm | None) -> None:
        """Average over another group from now on."""
        self.group = group
        self.build()

    def stand_alone(self) -> None:
        """Another optimizer wraps this one, and averages for it."""
        self.alone, self.connection = True, None

    def give_way(self) -> None:
        """Ranks have chosen different back ends: all go on with PyTorch's operators."""
        face = self.face
        for bucket in self.buckets:
            face.tidy(bucket)
        self.ops = fall_back_to_torch(self.comm.rank)
        for bucket in self.buckets:
            bucket.job = self.ops.quantized_mean(bucket)
            face.restore(bucket)
        face.gave_way()

    def forget_chosen(self) -> None:
        """Choose masks anew in the next step, on all ranks alike."""
        face = self.face
        for bucket in self.buckets:
            face.tidy(bucket)
            for name in face.chosen_state:
                bucket.flat[name].zero_()
                bucket.cache.pop(name, None)

    # Between steps

    def settle(self) -> None:
        """Wait for what was sent behind the last commit, and make the state readable."""
        self.runtime.post_commit.finish()
        tidy = self.face.tidy
        for bucket in self.buckets:
            tidy(bucket)
        self.offload.finish()

    def residual_norm(self) -> float:
        """The L2 norm of everything that this rank owes."""
        self.settle()
        flats = [b.flat["residual"] for b in self.buckets if "residual" in b.flat]
        return float(sum(float(torch.linalg.vector_norm(flat)) ** 2 for flat in flats) ** 0.5)

    def refuse_half_step(self) -> None:
        """Raise where a step was applied in part."""
        if self.half_step:
            raise RuntimeError(
                f"{self.half_step}: parameters and state no longer belong together. Load a "
                "checkpoint, of the model and with load_state_dict() of this optimizer, on all "
                "ranks."
            )

    # What the integrations say (on autograd's thread, in backward)

    def retire(self) -> None:
        """Another optimizer has these parameters now: nothing more is sent from here."""
        self.retired = True
        self.runtime.overlap.discard()
        self.runtime.post_commit.finish()

    @torch.no_grad()
    def gradients_ready(self, params: Iterable[Tensor]) -> None:
        """Backward has finished these parameters: start the buckets that are now complete, but the
        last.

        In the order of their index, whatever the order in which they get ready: collectives start
        alike on all ranks.
        """
        waits = not self.peers.verified or self.scaled or bool(self.half_step)
        if waits or self.comm.size == 1:
            return
        overlap = self.runtime.overlap
        if overlap.is_idle and not self._as_agreed():
            return
        for p in params:
            if p in self.bucket_of:
                overlap.note_finished(p, self.bucket_of[p])
        self.runtime.begin(self.buckets, self.comm)

    def _as_agreed(self) -> bool:
        """Whether nothing has changed that decides what is sent."""
        return self.peers.structure == structure_of(self) and not frozen.changed(self)
