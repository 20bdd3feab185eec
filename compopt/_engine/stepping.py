"""The step of ``CompressedOptimizer``: what comes before the exchange and after it, and what
becomes of errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from .._state.buckets import Bucket, local
from .._wire.comm import Comm, Pending
from .._wire.requests import CommunicationError
from . import frozen
from .alike import sample
from .handshake import describe, device_of, explain_mismatch, handshake, tell_failure
from .runtime import Verdict
from .settings import bits_of, structure_of
from .signals import held_back


class Stepping:
    """What an optimizer does in ``step()`` and in the backward before it, beside the algorithm."""

    _scaled = False  # a GradScaler drives the steps
    _warned = False
    _problem: Exception | None = None  # why this rank cannot send its gradients in the running step
    _over = (
        False  # what the step had to agree on is done: what is raised now leaves the ranks level
    )
    _half_step = ""  # why parameters and state no longer belong together

    def step_in_turns(self) -> Generator[Pending, None, None]:
        """The step as a generator that yields each collective it is about to wait for (the
        simulator's turns).
        """
        if self._retired:
            raise RuntimeError(
                f"this {type(self).__name__} was replaced: an optimizer made later holds its "
                "parameters and has their gradients now. Step that one, or call "
                "compopt.attach(ddp_model, optimizer) to have this one back."
            )
        self._refuse_half_step()
        comm = self.comm  # first: state may have to be cut anew
        number = self._option_groups[0]["step"] + 1 if self._option_groups else 1
        self._over, self._unscaled_by = False, None
        try:
            yield from self._step_over(comm, number)
        except GeneratorExit:
            raise
        except BaseException as error:
            if not self._over:
                self._scale_back()
            if not self._over or isinstance(error, CommunicationError):
                self._acquainted = (
                    False  # ranks may be a step apart now: the next one begins with a handshake
                )
            if not isinstance(error, CommunicationError):
                raise
            if self._over:
                raise CommunicationError(
                    f"step {number} was applied, what followed it failed: {error}"
                ) from error
            raise CommunicationError(
                f"step {number} was not applied on rank {comm.rank}: {error}"
            ) from error
        finally:
            self._problem = None

    def _step_over(self, comm: Comm, number: int) -> Generator[Pending, None, None]:
        if frozen.reset_from_outside(self):
            self._rebuild()
        self._problem = self._prepare()
        yield from self._runtime.settle_in_turns()
        yield from self._runtime.confirm(comm, device_of(self))
        for bucket in self._buckets:
            bucket.gathered = {}
        alone = not self._buckets and frozen.changed(self)  # nothing is sent that could say so
        if self._runtime.lost or alone or self._agreed != structure_of(self):
            self._acquainted = self._runtime.lost = False
        if not self._acquainted:
            if self._problem is not None:
                raise self._problem
            yield from self._get_acquainted(comm)
        if not self._buckets:
            return
        verdict = yield from self._agree(comm, number)
        if (
            verdict.agreed["unfrozen"][0] > 0
        ):  # on some rank other parameters require a gradient now
            yield from self._get_acquainted(comm)
            if not self._buckets:
                return
            verdict = yield from self._agree(comm, number)
        self._tell_of_changes(verdict)
        yield from self._refuse(verdict, comm)
        if comm.size > 1 and self._alike.note(verdict.agreed["alike"]):
            self._acquainted = False
        self._apply(verdict, number)
        self._report(verdict, comm)
        if self._trial is not None and self._trial.watch(
            verdict.phase_of, verdict.applied, device_of(self)
        ):
            self._acquainted = False  # with the next step's handshake all ranks compare their times
        self._watch_skips(verdict)

    def _agree(self, comm: Comm, number: int) -> Generator[Pending, None, Verdict]:
        settings = self._settings()
        if self.check_replicas_every and number % self.check_replicas_every == 0:
            settings += describe(self)
        words = {"settings": bits_of(settings)}
        if comm.size > 1:
            words["alike"] = self._sample()
        unfrozen = frozen.changed(self)
        words["unfrozen"] = [float(unfrozen)]
        # All ranks hear of a problem, and nothing is applied.
        problem = (
            RuntimeError("other parameters require a gradient than before")
            if unfrozen
            else self._problem
        )
        return (yield from self._runtime.agree(self._buckets, comm, words, self._shards, problem))

    def _prepare(self) -> Exception | None:
        """Make gradients what will be sent.

        What goes wrong here is told by all ranks, when they agree.
        """
        try:
            self._check_gradients()
            self._unscale()
            self.before_exchange()
            for bucket in self._buckets:
                bucket.renew_masters()
        except Exception as error:
            return error

    def _sample(self) -> Tensor:
        """A code of some gradients, which tells whether somebody else averages them."""
        last = self._buckets[-1]
        try:
            return sample([None] if self._problem is not None else last.grads(), last.device)
        except Exception as error:
            self._problem = error
            return sample([None], last.device)

    def _get_acquainted(self, comm: Comm) -> Generator[Pending, None, None]:
        self._runtime.drop_early()
        yield from handshake(self, comm)
        if frozen.changed(self):  # and on all ranks alike
            yield from frozen.follow(self, comm)
            self.before_exchange()
        self._acquainted = True

    def _tell_of_changes(self, verdict: Verdict) -> None:
        if verdict.resent and not self._warned:
            self._warned = True
            warnings.warn(
                "gradients were changed between backward and step() (a clip, an unscale, another "
                "backward?), so what was sent during backward had to be sent again. From now on "
                "nothing is sent before step(): clip with max_grad_norm= instead to keep "
                "communication behind backward.",
                stacklevel=7,
            )

    def _refuse(self, verdict: Verdict, comm: Comm) -> Generator[Pending, None, None]:
        """Raise where ranks found that they cannot go on as they are; all of them do."""
        if verdict.misplaced:
            where = ", ".join(
                f"bucket {i}" if i >= 0 else "another shard" for i in verdict.misplaced
            )
            raise CommunicationError(
                f"payloads of different buckets or steps met ({where}): ranks start their "
                "collectives in different order, or are steps apart. Run backward and step() "
                "equally often on all ranks."
            )
        if verdict.failed:
            self._problem = verdict.take_error(self._problem)
            try:
                yield from tell_failure(self, comm, self._problem)
            except Exception:
                if self._problem is None:
                    raise
                raise self._problem from None
        if verdict.mismatch:
            yield from explain_mismatch(self, comm)

    def _apply(self, verdict: Verdict, number: int) -> None:
        """Commit a step that is to be applied, and count it: as a whole, whatever signals come
        meanwhile.
        """
        with held_back():
            if verdict.applied:
                self._handed_over = False
                try:
                    self._half_step = f"step {number} was interrupted"
                    self._runtime.commit(verdict)
                    self.committed()
                    for group in self._option_groups:
                        group["step"] += 1
                    if self._trial is not None and self._trial.found:
                        self._trial.keep()
                        self._found, self._trial = self._trial.found, None
                except BaseException as error:
                    self._half_step = _half(number, self._runtime.committing, error)
                    for bucket in self._buckets:
                        bucket.cache.clear()  # it follows from state, and may be wrong
                    raise
                self._half_step = ""
            self._agreed = structure_of(self)
            self._over = True

    def _refuse_half_step(self) -> None:
        if self._half_step:
            raise RuntimeError(
                f"{self._half_step}: parameters and state no longer belong together. Load a "
                "checkpoint, of the model and with load_state_dict() of this optimizer, on all "
                "ranks."
            )

    # GradScaler

    _step_supports_amp_scaling = (
        True  # GradScaler then leaves unscaling and skipping to step(): all ranks agree
    )
    _unscaled_by: float | None = None  # the scale that this step has taken off

    def _unscale(self) -> None:
        """Divide by the GradScaler's scale, which may differ between ranks, what it left scaled.

        With a scaler no bucket starts in backward: the gradients are not yet what will be sent.
        """
        self._scaled = hasattr(self, "found_inf")
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            self._scale_by(float(scale.double().reciprocal()))
            self._unscaled_by = float(scale)

    def _scale_back(self) -> None:
        """Leave gradients and scale as they were for whoever tries the step again.

        A GradScaler takes its attributes back only where the step succeeds, and multiplies what it
        then finds."""
        if self._unscaled_by is not None:
            self._scale_by(self._unscaled_by)
            del self.grad_scale, self.found_inf

    def _scale_by(self, factor: float) -> None:
        trained = [p for p in frozen.parameters(self) if p.requires_grad and p.grad is not None]
        torch._foreach_mul_([local(p.grad) for p in trained], factor)

    # What the integrations say, and starting in backward (on autograd's thread)

    _retired = False  # another optimizer has its parameters
    _handed_over = False  # DDP has left the gradients of this step as they are

    def take_over(self) -> None:
        """From now on the gradients of a DDP come here as they are."""
        self._retired = False

    def retire(self) -> None:
        """Another optimizer has these parameters now: nothing more is sent from here, and
        ``step()`` says so.
        """
        self._retired = True
        self._runtime.drop_early()
        self._runtime.settle()

    def handed_over(self) -> None:
        """DDP has given back gradients of this backward, not averaged."""
        self._handed_over = True

    @torch.no_grad()
    def gradients_ready(self, params: Iterable[Tensor]) -> None:
        """Backward has finished these parameters: start the buckets that are now complete, but the
        last.

        In the order of their index, whatever the order in which they get ready: collectives start
        alike on all ranks."""
        if not self._acquainted or self._scaled or self._half_step or self.comm.size == 1:
            return
        if not self._ready and (self._agreed != structure_of(self) or frozen.changed(self)):
            return
        for p in params:
            if p in self._bucket_of:
                self._ready.setdefault(self._bucket_of[p].index, set()).add(p)
        self._runtime.begin(self._buckets, self.comm, self._is_ready)

    def _is_ready(self, bucket: Bucket) -> bool:
        return len(self._ready.get(bucket.index, ())) == len(bucket.params)

    def backward_done(self) -> None:
        """The backward that started buckets has ended: another one that completes them all replaces
        what they sent.
        """
        self._ready.clear()
        self._runtime.backward_done()


def _half(number: int, bucket: Bucket | None, error: BaseException) -> str:
    where = (
        "after its buckets"
        if bucket is None
        else f"in bucket {bucket.index} ({bucket.names[0]}, ...)"
    )
    return f"step {number} was applied in part: {type(error).__name__} was raised {where} ({error})"
