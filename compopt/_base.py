"""What every optimizer here shares with torch.optim: groups, closure, hooks, state, checkpoints; and its step.

A class says which state it keeps (``state_specs``), how one bucket steps (``algorithm``), and checks its options
(``check_group``). The rest is here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import _checkpoint, _recovery
from ._alike import Alike, sample
from ._backends import choose, give_way
from ._buckets import Bucket, StateSpec, is_compressed, make_buckets
from ._comm import Comm, Pending, connect, copies_of, has_met_others, shard_comms
from ._handshake import describe, device_of, explain_mismatch, handshake
from ._offload import Offload
from ._requests import CommunicationError, Request
from ._runtime import Runtime, Verdict
from ._saving import Saving
from ._settings import bits_of, settings_of, structure_of
from ._shards import Shards
from ._stats import Stats
from ._weakly import weakly
from ._when import OPTIONS, trial

constructed: list[Callable[[CompressedOptimizer], None]] = []  # told of every new optimizer (integrations.ddp listens)


class CompressedOptimizer(Saving, Optimizer):
    """Base of the optimizers that average their own gradients, compressed.

    A step is all or nothing: when any rank has a non-finite gradient all ranks skip it, and when a collective fails
    :class:`CommunicationError` is raised; parameters, state and step counts are then as they were.
    """

    averaged_state: tuple[str, ...] = ()  # per-rank state of which only the mean over ranks ever matters
    sharded = False  # each rank keeps state of its own shard only, and parameters are gathered in the step
    offload: str | None = None  # what of the state lives in host memory: "residual", "all" (masters too), or nothing
    whole_masters = False  # though state is sharded: every rank updates all of them
    chosen_state: tuple[str, ...] = ()  # masks that the next step chooses anew where they are lost (all zero)

    _found = ""  # by a trial of when="auto"
    _warned = False
    _skipped_in_a_row = 0
    _scaled = False  # a GradScaler drives the steps
    _alone = False  # another optimizer wraps this one and averages for it

    def __init__(self, params: Iterable, defaults: dict[str, Any], process_group: object = None):
        self._group = process_group
        defaults = {**defaults, **(OPTIONS if "when" in defaults else {}), "compress": None, "step": 0}
        self._check_defaults(defaults)
        super().__init__(params, defaults)
        self._build()
        for tell in constructed:
            tell(self)

    def _check_defaults(self, defaults: dict[str, Any]) -> None:
        """Bad options are told before bad parameters, as torch does."""
        self.check_group({**defaults, "params": []})

    # What a class supplies

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        raise NotImplementedError

    def algorithm(self, bucket: Bucket) -> Generator[Request, object, None]:
        raise NotImplementedError

    def check_group(self, group: dict) -> None:
        raise NotImplementedError

    def is_compressed(self, p: Tensor, group: dict, name: str) -> bool:
        """Whether ``p`` is compressed: what its group says, else matrices and larger of at least 4096 elements."""
        return is_compressed(p, group)

    def restore(self, bucket: Bucket) -> None:
        """Rebuild what ``bucket.cache`` derives from state, after it was set from outside."""

    def tidy(self, bucket: Bucket) -> None:
        """Bring state that is kept in a cheaper form during training to what it means, before it is read."""

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
        """The groups that hold the options of this class: ``param_groups``, unless it wraps another optimizer's."""
        return self.param_groups

    @property
    def _known_options(self) -> set[str]:
        """The names of these options. Whatever else a group holds is the user's, and nothing here looks at it."""
        return set(self.defaults)

    # Stepping

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over ranks, compressed, and update the parameters. All ranks must call it.

        Raises CommunicationError when a collective failed, ValueError when ranks differ in settings, RuntimeError when
        the gradients were averaged before; in each case nothing was applied.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for _ in self.step_in_turns():
            pass
        return loss

    def step_in_turns(self) -> Generator[Pending, None, None]:
        """The step as a generator that yields each collective it is about to wait for (the simulator's turns)."""
        if self._retired:
            raise RuntimeError(
                f"this {type(self).__name__} was replaced: an optimizer made later holds its parameters and has their "
                "gradients now. Step that one, or call compopt.attach(ddp_model, optimizer) to have this one back."
            )
        comm = self.comm  # first: state may have to be cut anew
        self._check_gradients()
        self._unscale()
        self.before_exchange()
        before = self._option_groups[0]["step"] if self._option_groups else 0
        try:
            yield from self._step_over(comm, before)
        except CommunicationError as error:
            self._acquainted = False  # ranks may be a step apart now: the next one, if any, begins with a handshake
            raise CommunicationError(f"step {before + 1} was not applied on rank {comm.rank}: {error}") from error

    def _step_over(self, comm: Comm, before: int) -> Generator[Pending, None, None]:
        yield from self._runtime.settle_in_turns()
        yield from self._runtime.confirm(comm, device_of(self))
        for bucket in self._buckets:
            bucket.gathered = {}
        if self._runtime.lost or self._agreed != structure_of(self):
            self._acquainted = self._runtime.lost = False
            self._runtime.drop_early()
        if not self._acquainted:
            self._offload.finish()
            for bucket in self._buckets:
                bucket.renew_masters()
            yield from handshake(self, comm)
            self._acquainted = True
        if not self._buckets:
            return
        settings = self._settings()
        if self.check_replicas_every and (before + 1) % self.check_replicas_every == 0:
            settings += describe(self)
        words = {"settings": bits_of(settings)}
        if comm.size > 1:
            words["alike"] = sample(self._buckets[-1].grads(), self._buckets[-1].device)
        verdict = yield from self._runtime.step(self._buckets, comm, words, self._shards)
        if verdict.changed and not self._warned:
            self._warned = True
            warnings.warn(
                "gradients were changed between backward and step() (a clip or an unscale?), so what was sent during "
                "backward had to be sent again. From now on nothing is sent before step(): clip with max_grad_norm= "
                "instead to keep communication behind backward.",
                stacklevel=3,
            )
        if verdict.mismatch:
            yield from explain_mismatch(self, comm)
        if comm.size > 1 and self._alike.note(verdict.agreed["alike"]):
            self._acquainted = False
        if verdict.applied:
            self._handed_over = False
            self.committed()
            for group in self._option_groups:
                group["step"] += 1
            if self._trial is not None and self._trial.found:
                self._trial.keep()
                self._found, self._trial = self._trial.found, None
        self._agreed = structure_of(self)
        self._report(verdict, comm)
        if self._trial is not None and self._trial.watch(verdict.phase_of, verdict.applied, device_of(self)):
            self._acquainted = False  # with the next step's handshake all ranks compare their times
        self._watch_skips(verdict)

    def _report(self, verdict: Verdict, comm: Comm) -> None:
        sent, self._counted = comm.bytes_sent - self._counted, comm.bytes_sent
        phase = "+".join(sorted(set(verdict.phase_of.values()))) or "dense"
        self.stats = Stats(
            step=self._option_groups[0]["step"],
            phase=phase if verdict.applied else "skipped",
            bytes_sent=sent,
            bytes_dense=sum(bucket.dense_bytes for bucket in self._buckets),
            parameter_bytes=sum(bucket.parameter_bytes for bucket in self._buckets) if verdict.applied else 0,
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

    _step_supports_amp_scaling = True  # GradScaler then leaves unscaling and skipping to step(): all ranks agree

    def _unscale(self) -> None:
        """Divide by the GradScaler's scale, which may differ between ranks, what it left scaled.

        With a scaler no bucket starts in backward: the gradients are not yet what will be sent.
        """
        self._scaled = hasattr(self, "found_inf")
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            grads = [g for bucket in self._buckets for g in bucket.grads() if g is not None]
            torch._foreach_mul_(grads, float(scale.double().reciprocal()))

    # What the integrations say, and starting in backward (on autograd's thread)

    _retired = False  # another optimizer has its parameters
    _handed_over = False  # DDP has left the gradients of this step as they are

    def take_over(self) -> None:
        """From now on the gradients of a DDP come here as they are."""
        self._retired = False

    def retire(self) -> None:
        """Another optimizer has these parameters now: nothing more is sent from here, and ``step()`` says so."""
        self._retired = True
        self._runtime.drop_early()
        self._runtime.settle()

    def handed_over(self) -> None:
        """DDP has given back gradients of this backward, not averaged."""
        self._handed_over = True

    def gradients_ready(self, params: Iterable[Tensor]) -> None:
        """Backward has finished these parameters: start the buckets that are now complete, but the last.

        In the order of their index, whatever the order in which they get ready: collectives start alike on all ranks.
        """
        if not self._acquainted or self._scaled or self.comm.size == 1:
            return
        if not self._ready and self._agreed != structure_of(self):
            return
        for p in params:
            if p in self._bucket_of:
                self._ready.setdefault(self._bucket_of[p].index, set()).add(p)
        before = self._begun
        for bucket in self._buckets[self._begun : -1]:
            if len(self._ready.get(bucket.index, ())) < len(bucket.params):
                break
            self._begun += 1
            with torch.no_grad():
                self._runtime.begin(bucket, self.comm)
        if self._begun > before:
            with torch.no_grad():
                self._runtime.proceed(bucket.index for bucket in self._buckets[:before])

    def backward_done(self) -> None:
        """The backward that started buckets has ended: from here on a changed gradient makes its payload stale."""
        self._ready.clear()
        self._begun = 0
        self._runtime.note_versions()

    # Faults

    max_skipped = 100  # steps skipped in a row after which step() raises; set it on the optimizer to change it
    check_replicas_every = 0  # every so many steps a checksum of the parameters rides in the payload; 0: never

    def rebind(self, process_group: object = None) -> None:
        """Go on over another group, from memory: after ranks were lost, or the group was made anew.

        All ranks of the new group call it. What was on its way is given up: masks on the wire are chosen again by the
        next step. Ranks on which the step that failed was not applied, while it was on others, take it over from those:
        afterwards ``param_groups[0]["step"]`` is the same everywhere. The residuals of ranks that are gone are lost,
        those here stay; a warning says so.

        Raises ValueError when ranks are more than one step apart, or sharded state would have to go to more ranks;
        CommunicationError when ranks fail again.
        """
        for _ in self.rebind_in_turns(process_group):
            pass

    @torch.no_grad()
    def rebind_in_turns(self, process_group: object = None) -> Generator[Pending, None, None]:
        yield from _recovery.rebind(self, process_group)

    _before: list[Bucket] | None = None  # buckets of before a rebind, while their shards are not yet cut again

    def _watch_skips(self, verdict: Verdict) -> None:
        self._skipped_in_a_row = 0 if verdict.applied else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= self.max_skipped:
            raise FloatingPointError(
                f"{self._skipped_in_a_row} steps in a row were skipped, the last because of {self.stats.reason}: "
                "lower the learning rate or look for what makes the loss overflow (max_skipped is the limit)."
            )

    # Layout

    @property
    def comm(self) -> Comm:
        """The ranks this optimizer averages over; connected when first needed.

        Without a process group it is this process alone, until there is one: torch.distributed may be initialised
        after a checkpoint was loaded.
        """
        if self._comm is not None and self._group is None and not self._alone and has_met_others(self._comm):
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
        """Ranks have chosen different back ends: go on with PyTorch's operators, as all of them do."""
        for bucket in self._buckets:
            self.tidy(bucket)
        self.ops = give_way()
        for bucket in self._buckets:
            self.restore(bucket)

    def _build(self) -> None:
        """Lay out buckets and state for the current groups; state that is there already is copied in."""
        self.ops = choose({p.device.type for g in self._option_groups for p in g["params"]})
        self.stats = Stats(residual_norm=weakly(self._residual_norm))
        self._comm: Comm | None = None
        self._counted = 0
        self._acquainted = False
        self._agreed = ""  # the structure all ranks had in the last step
        self._alike = Alike()
        self._ready: dict[int, set[Tensor]] = {}  # what the running backward has finished, a bucket
        self._begun = 0  # and how many buckets it has started
        self._runtime = Runtime(weakly(self.algorithm))
        self._buckets = make_buckets(self._option_groups, self.is_compressed)
        self._trial = trial(self._option_groups, self._buckets)
        self._offload = Offload({"residual": ("residual",), "all": ("residual", "master")}.get(self.offload, ()))
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.params}
        self._shards = shard_comms(p for bucket in self._buckets for p in bucket.params)
        for bucket in self._buckets:
            bucket.copies = copies_of(bucket.params[0], self._shards)
            bucket.offload = self._offload if self._offload.names else None
            if self.sharded:
                bucket.shards = Shards(bucket.lengths, bucket.compressed, self.comm.rank, self.comm.size)
            _checkpoint.fill(bucket, self._specs(bucket), self.state)
            self.restore(bucket)

    def _specs(self, bucket: Bucket) -> dict[str, StateSpec]:
        low = bucket.dtype.itemsize < 4
        specs = self.state_specs(torch.float32 if low else bucket.dtype)
        return (
            {**specs, "master": StateSpec(torch.float32, sharded=self.sharded and not self.whole_masters)}
            if low
            else specs
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options are checked, its state created. All ranks must do so at the same step."""
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
                    f"params holds a complex tensor of shape {tuple(p.shape)} ({p.dtype}): use torch.view_as_real."
                )
            if p.is_meta:
                raise ValueError(
                    f"params holds a tensor of shape {tuple(p.shape)} on the meta device: call model.to_empty and "
                    "initialise it before the optimizer is made."
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
            for p, name in zip(bucket.params, bucket.names, strict=True):
                if p.grad is not None and p.grad.is_sparse:
                    raise TypeError(
                        f"{type(self).__name__} got a sparse gradient for {name}: use dense gradients (sparse=False)."
                    )
