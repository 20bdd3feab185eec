"""What every optimizer here shares with torch.optim: groups, closure, hooks, state, checkpoints;
and its step.

A class says which state it keeps (``state_specs``), how one bucket steps (``algorithm``), and
checks its options (``check_group``). The rest is here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._ops.backends import choose, give_way
from .._state.buckets import Bucket, is_compressed, local, make_buckets
from .._state.layouts import Dense, Layout, Sharded
from .._state.offload import Offload
from .._state.shards import Shards
from .._wire.comm import Comm, Pending, connect, copies_of, has_met_others, shard_comms
from .._wire.requests import Request
from . import checkpoint, frozen, recovery
from .alike import Alike
from .runtime import Runtime, Verdict
from .saving import Saving
from .settings import settings_of
from .stats import Stats
from .stepping import Stepping
from .weakly import weakly
from .when import OPTIONS, trial

constructed: list[
    Callable[[CompressedOptimizer], None]
] = []  # told of every new optimizer (integrations.ddp listens)


class CompressedOptimizer(Stepping, Saving, Optimizer):
    """Base of the optimizers that average their own gradients, compressed.

    A step is all or nothing: when any rank has a non-finite gradient all ranks skip it, and when a
    collective fails :class:`CommunicationError` is raised; parameters, state and step counts are
    then as they were."""

    averaged_state: tuple[
        str, ...
    ] = ()  # per-rank state of which only the mean over ranks ever matters
    # each rank keeps state of its own shard only, and parameters are gathered in the step
    sharded = False
    offload: str | None = (
        None  # what of the state lives in host memory: "residual", "all" (masters too), or nothing
    )
    whole_masters = False  # though state is sharded: every rank updates all of them
    chosen_state: tuple[
        str, ...
    ] = ()  # masks that the next step chooses anew where they are lost (all zero)

    _found = ""  # by a trial of when="auto"
    _skipped_in_a_row = 0
    _alone = False  # another optimizer wraps this one and averages for it
    _met: frozenset[Tensor] = frozenset()  # the parameters of all groups
    _trained: frozenset[Tensor] = frozenset()  # those that are laid out

    def __init__(self, params: Iterable, defaults: dict[str, Any], process_group: object = None):
        self._group = process_group
        defaults = {
            **defaults,
            **(OPTIONS if "when" in defaults else {}),
            "compress": None,
            "step": 0,
        }
        self._check_defaults(defaults)
        super().__init__(params, defaults)
        self._build()
        for tell in constructed:
            tell(self)

    def _check_defaults(self, defaults: dict[str, Any]) -> None:
        """Bad options are told before bad parameters, as torch does."""
        self.check_group({**defaults, "params": []})

    # What a class supplies

    def state_specs(self, dtype: torch.dtype) -> dict[str, Layout]:
        raise NotImplementedError

    def algorithm(self, bucket: Bucket) -> Generator[Request, object, None]:
        raise NotImplementedError

    def check_group(self, group: dict) -> None:
        raise NotImplementedError

    def is_compressed(self, p: Tensor, group: dict, name: str) -> bool:
        """Whether ``p`` is compressed: what its group says, else matrices and larger of at least
        4096 elements.
        """
        return is_compressed(p, group)

    def restore(self, bucket: Bucket) -> None:
        """Rebuild what ``bucket.cache`` derives from state, after it was set from outside."""

    def tidy(self, bucket: Bucket) -> None:
        """Bring state that is kept in a cheaper form during training to what it means, before it is
        read.
        """

    def forget_chosen(self) -> None:
        """Choose masks anew in the next step, on all ranks alike."""
        for bucket in self._buckets:
            self.tidy(bucket)
            for name in self.chosen_state:
                bucket.flat[name].zero_()
                bucket.cache.pop("index", None)

    def before_exchange(self) -> None:
        """Called at the start of a step, when the gradients are what will be sent."""

    def committed(self) -> None:
        """Called when all buckets have committed a step, before it is counted."""

    @property
    def _option_groups(self) -> list[dict[str, Any]]:
        """The groups that hold the options of this class: ``param_groups``, unless it wraps another
        optimizer's.
        """
        return self.param_groups

    @property
    def _known_options(self) -> set[str]:
        """The names of these options.

        Whatever else a group holds is the user's, and nothing here looks at it.
        """
        return set(self.defaults)

    # Stepping

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over ranks, compressed, and update the parameters. All ranks must
        call it.

        Raises CommunicationError when a collective failed, ValueError when ranks differ in
        settings, RuntimeError when the gradients were averaged before; in each case nothing was
        applied."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for _ in self.step_in_turns():
            pass
        for tell in tuple(self.told_of_steps):
            tell()
        return loss

    def _report(self, verdict: Verdict, comm: Comm) -> None:
        sent, self._counted = comm.bytes_sent - self._counted, comm.bytes_sent
        phase = "+".join(sorted(set(verdict.phase_of.values()))) or "dense"
        self.stats = Stats(
            step=self._option_groups[0]["step"],
            phase=phase if verdict.applied else "skipped",
            bytes_sent=sent,
            bytes_dense=sum(bucket.dense_bytes for bucket in self._buckets),
            parameter_bytes=sum(bucket.parameter_bytes for bucket in self._buckets)
            if verdict.applied
            else 0,
            grad_norm=verdict.norm,
            early_buckets=verdict.early,
            buckets=len(self._buckets),
            resent=verdict.resent,
            skipped=self.stats.skipped + (not verdict.applied),
            reason="" if verdict.applied else "non-finite gradient: " + ", ".join(verdict.bad[:3]),
            residual_norm=weakly(self._residual_norm),
            when=self._found,
        )

    def _residual_norm(self) -> float:
        self._settle()
        flats = [b.flat["residual"] for b in self._buckets if "residual" in b.flat]
        return sum(float(torch.linalg.vector_norm(f)) ** 2 for f in flats) ** 0.5

    # Faults

    # steps skipped in a row after which step() raises; set it on the optimizer to change it
    max_skipped = 100
    check_replicas_every = (
        0  # every so many steps a checksum of the parameters rides in the payload; 0: never
    )

    def rebind(self, process_group: object = None) -> None:
        """Go on over another group, from memory: after ranks were lost, or the group was made anew.

        All ranks of the new group call it. What was on its way is given up: masks on the wire are
        chosen again by the next step. Ranks on which the step that failed was not applied, while it
        was on others, take it over from those: afterwards ``param_groups[0]["step"]`` is the same
        everywhere. The residuals of ranks that are gone are lost, those here stay; a warning says
        so.

        Raises ValueError when ranks are more than one step apart, or sharded state would have to go
        to more ranks; CommunicationError when ranks fail again."""
        for _ in self.rebind_in_turns(process_group):
            pass

    @torch.no_grad()
    def rebind_in_turns(self, process_group: object = None) -> Generator[Pending, None, None]:
        yield from recovery.rebind(self, process_group)

    _before: list[Bucket] | None = (
        None  # buckets of before a rebind, while their shards are not yet cut again
    )

    def _watch_skips(self, verdict: Verdict) -> None:
        self._skipped_in_a_row = 0 if verdict.applied else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= self.max_skipped:
            raise FloatingPointError(
                f"{self._skipped_in_a_row} steps in a row were skipped, the last because of "
                f"{self.stats.reason}: lower the learning rate or look for what makes the loss "
                "overflow (max_skipped is the limit)."
            )

    # Layout

    @property
    def comm(self) -> Comm:
        """The ranks this optimizer averages over; connected when first needed.

        Without a process group it is this process alone, until there is one: torch.distributed may
        be initialised after a checkpoint was loaded."""
        if (
            self._comm is not None
            and self._group is None
            and not self._alone
            and has_met_others(self._comm)
        ):
            self._settle()
            self._runtime.drop_early()
            self._build()  # without a communicator: state is cut for the ranks there are now
        if self._comm is None:
            self._comm = Comm(alone=True) if self._alone else connect(self._group)
        return self._comm

    @property
    def backend(self) -> str:
        """The kernels in use, chosen once at construction."""
        return self.ops.name

    @property
    def backend_reason(self) -> str:
        """Why these, in words."""
        return self.ops.reason

    def give_way(self) -> None:
        """Ranks have chosen different back ends: all go on with PyTorch's operators."""
        for bucket in self._buckets:
            self.tidy(bucket)
        self.ops = give_way()
        for bucket in self._buckets:
            self.restore(bucket)

    def _build(self) -> None:
        """Lay out buckets and state for the current groups; state that is there already is copied
        in.
        """
        self.ops = choose({p.device.type for g in self._option_groups for p in g["params"]})
        self.stats = Stats(residual_norm=weakly(self._residual_norm))
        self._comm: Comm | None = None
        self._counted = 0
        self._acquainted = False
        self._agreed = ""  # the structure all ranks had in the last step
        self._alike = Alike()
        self.told_of_steps: list[Callable[[], None]] = getattr(
            self, "told_of_steps", []
        )  # integrations that wait
        self._ready: dict[int, set[Tensor]] = {}  # what the running backward has finished, a bucket
        self._runtime = Runtime(weakly(self.algorithm))
        frozen.meet(self)
        others = self._met - self._trained
        self._buckets = make_buckets(self._option_groups, self.is_compressed, self._trained)
        self._shelf = make_buckets(
            self._option_groups, self.is_compressed, others
        )  # without memory, never exchanged
        self._trial = trial(self._option_groups, self._buckets)
        self._offload = Offload(
            {"residual": ("residual",), "all": ("residual", "master")}.get(self.offload, ())
        )
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.params}
        self._shards = shard_comms(p for bucket in self._buckets for p in bucket.params)
        for bucket in self._buckets:
            bucket.copies = copies_of(bucket.params[0], self._shards)
            bucket.offload = self._offload if self._offload.names else None
            if self.sharded:
                bucket.shards = Shards(
                    bucket.lengths, bucket.compressed, self.comm.rank, self.comm.size
                )
            checkpoint.fill(bucket, self._specs(bucket), self.state)
            self.restore(bucket)

    def _specs(self, bucket: Bucket) -> dict[str, Layout]:
        low = bucket.dtype.itemsize < 4
        specs = self.state_specs(torch.float32 if low else bucket.dtype)
        if not low:
            return specs
        layout = Sharded if self.sharded and not self.whole_masters else Dense
        return {**specs, "master": layout(torch.float32)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options are checked, its state created.

        All ranks must do so at the same step.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._admit(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if hasattr(self, "_runtime"):
            group["step"] = self._option_groups[0]["step"]
            self._rebuild()

    def _admit(self, group: dict) -> None:
        """Raise where a group cannot be taken as it is."""
        for p in group["params"]:
            if p.is_complex():
                raise TypeError(
                    f"params holds a complex tensor of shape {tuple(p.shape)} ({p.dtype}): use "
                    "torch.view_as_real."
                )
            if p.is_meta:
                raise ValueError(
                    f"params holds a tensor of shape {tuple(p.shape)} on the meta device: call "
                    "model.to_empty and initialise it before the optimizer is made."
                )
        self.check_group(group)

    def _rebuild(self) -> None:
        self._settle()
        self._runtime.drop_early()
        comm = self._comm
        self._build()
        self._comm, self._counted = comm, comm.bytes_sent if comm else 0

    def _settings(self) -> list:
        """What must be the same on all ranks, step for step; more of it where a class has more."""
        return settings_of(self)

    def _check_gradients(self) -> None:
        for bucket in self._buckets:
            for p, n, name in zip(bucket.params, bucket.lengths, bucket.names, strict=True):
                if p.dtype != bucket.dtype or p.device != bucket.device or local(p).numel() != n:
                    raise TypeError(
                        f"{name} has {local(p).numel()} elements of {p.dtype} on {p.device} here, "
                        f"and had {n} of {bucket.dtype} on {bucket.device} when the optimizer was "
                        "made: make the optimizer after the model is converted, moved or resized."
                    )
                if p.grad is not None and p.grad.is_sparse:
                    raise TypeError(
                        f"{type(self).__name__} got a sparse gradient for {name}: use dense "
                        "gradients (sparse=False)."
                    )
