"""The exchanges of a step: one for each bucket, started in an order that all ranks share.

An exchange drives a bucket's generator up to ``Agree``. Ranks must start their collectives in the
same order, so the order depends on the buckets' numbers alone: not on the order in which backward
finishes gradients, and not on how many exchanges start in backward (see ``ExchangeSchedule``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from .._state.bucket import Bucket
from .._wire.collectives import Communicator
from .._wire.in_flight import PendingCollective, profiler_range
from .._wire.payload import ControlFields, FieldValues, Payload, encode_stamp
from .._wire.requests import (
    Agree,
    AllGather,
    AllReduceMean,
    Answer,
    Broadcast,
    Collective,
    CommunicationError,
    EncodeError,
    ReadToHost,
    Request,
    RequestGenerator,
    RunBatched,
)

Algorithm = Callable[[Bucket], RequestGenerator[None]]


class StalenessCheck:
    """Sums of a bucket's gradients, which tell whether these are the same, to the bit, when the
    step begins.

    Version counters cannot tell: they miss changes through ``p.grad.data``, and they count the
    Trainer's multiplication by 1, which changes nothing. Each gradient has two sums: of the bits,
    which any single change alters; and of the values, for changes that cancel modulo 2^32 (doubling
    512 floats adds 512 * 2^23 = 2^32 to the sum of bits, that is 0). The host does not wait.
    """

    def __init__(self, bucket: Bucket):
        self.bucket = bucket
        self.has_grad, self.sums = self._sum_gradients()

    def accept_zeros_of_ddp(self) -> None:
        """Accept the zeros that DDP writes at the end of backward, as the gradient of a tensor that
        only other ranks use.
        """
        self.has_grad = [
            now or before for now, before in zip(self._list_with_grad(), self.has_grad, strict=True)
        ]

    def measure(self) -> Tensor:
        """Return 1 if a gradient has changed, else 0, on the bucket's device."""
        has_grad, sums = self._sum_gradients()
        if has_grad != self.has_grad:
            return torch.ones(1, dtype=torch.float32, device=self.bucket.device)
        return (sums != self.sums).any().view(1).float()

    def _list_with_grad(self) -> list[bool]:
        return [p.grad is not None for p in self.bucket.params]

    def _sum_gradients(self) -> tuple[list[bool], Tensor]:
        bit_sums = [torch.zeros((), dtype=torch.int64, device=self.bucket.device)]
        value_sums = [torch.zeros((), dtype=torch.float64, device=self.bucket.device)]
        for g in self.bucket.grads():
            flat = (
                bit_sums[0].view(1)
                if g is None or not g.numel()
                else g.detach().contiguous().view(-1)
            )
            value_sums.append(
                flat.sum(dtype=torch.promote_types(flat.dtype, torch.float32)).double()
            )
            # the bits as integers of the elements' width, at least 32
            size = flat.itemsize
            if size < 4 and (len(flat) * size % 4 or flat.storage_offset() * size % 4):
                flat = torch.nn.functional.pad(flat, (0, -len(flat) % (4 // size))).clone()
            dtype = torch.int64 if size == 8 else torch.int32
            bit_sums.append(flat.view(dtype).sum(dtype=dtype).long())
        return self._list_with_grad(), torch.stack(
            [torch.stack(bit_sums), torch.stack(value_sums).view(torch.int64)]
        )


@dataclass
class ExchangeInputs:
    """The values that exchanges start with."""

    algorithm: Algorithm
    comm: Communicator
    in_backward: bool = False
    # control fields that only the last bucket's payload has; not when payloads are sent again
    last_fields: dict[str, FieldValues] = field(default_factory=dict)
    # why this rank cannot send its gradients
    problem: Exception | None = None


class BucketExchange:
    """One bucket's generator, and the collective that it waits for.

    Up to ``Agree`` the schedule calls ``complete_stage`` after each collective, and
    ``resume_before_agree`` with numbers of the device. Then ``resume_and_start_next`` gives the
    generator the norm, and ``resume_post_commit`` the answer to a post-commit request.

    If the generator raises before ``Agree``, this rank takes part as if it had no gradients, and
    the control field "failed" tells the others. Otherwise they would wait until their timeout.
    ``error`` is what was raised.
    """

    in_flight: PendingCollective  # the collective that the generator waits for, if it does
    agreement: Agree  # of a generator that has reached it
    control: ControlFields
    _generator: RequestGenerator[None] | None = None

    def __init__(self, bucket: Bucket, inputs: ExchangeInputs, is_last: bool):
        self.bucket, self.algorithm, self.comm = bucket, inputs.algorithm, inputs.comm
        self.in_backward = inputs.in_backward
        # not ``inputs`` itself, whose problem has a traceback that refers to this object
        self._last_fields = inputs.last_fields if is_last else {}
        self.is_in_flight = self.has_reached_agree = False
        self.request: Request | None = None
        self.error: Exception | None = None
        self.staleness: StalenessCheck | None = None
        self._answers: list[Answer] = []  # all answers that the generator has had
        if inputs.problem is None:
            self._advance([], is_new=True)
        else:
            self._take_part_without_gradients(inputs.problem)

    @property
    def has_next_stage(self) -> bool:
        """True if another collective, which need not wait for ``step()``, follows the one in
        flight.
        """
        return self.is_in_flight and self.in_flight.has_next

    def complete_stage(self) -> None:
        """Wait for the collective in flight; start its second stage, or resume the generator."""
        answer = self.in_flight.wait()
        if isinstance(answer, PendingCollective):
            self.in_flight = answer
        else:
            self.resume_before_agree(answer)

    def resume_before_agree(self, answer: Answer) -> None:
        """Resume the generator with what it has requested before ``Agree``."""
        self._answers.append(answer)
        self._advance([answer])

    def resume_and_start_next(self, answer: Answer) -> None:
        """Resume the generator up to its next request, and start that."""
        self.is_in_flight = False
        request = self._resume_generator(answer)
        if isinstance(request, Collective):
            self.in_flight, self.is_in_flight = self.comm.start(request), True

    def resume_post_commit(self, answer: Answer) -> None:
        """Resume the generator with the answer to its post-commit request, to its end or to a
        ``RunBatched``.
        """
        self.request = None
        try:
            self._resume_generator(answer)
        except StopIteration:
            return

    def measure_staleness(self) -> Tensor:
        """Return 1 if the gradients differ from those read in backward, else 0."""
        if self.staleness is None:
            return torch.ones(1, dtype=torch.float32, device=self.bucket.device)
        return self.staleness.measure()

    def abandon(self, waits: bool = True) -> None:
        """Close the generator. Wait for the collective in flight, because its memory is reused; if
        ``waits`` is false, give that memory up instead.
        """
        if self.is_in_flight and waits:
            self.in_flight.drain()
        elif self.is_in_flight:
            self.bucket.release_memory()
        self.close()
        # drop the exception: its traceback refers to this object (a reference cycle)
        self.error = None

    def forget(self) -> None:
        """Close the generator; what is in flight will never arrive, because its group is gone."""
        if self.is_in_flight:
            self.in_flight.untrack()
        self.close()

    def close(self) -> None:
        """Close the generator, and drop the state that it has not committed."""
        if self._generator is not None:
            self._generator.close()
            self._generator, self.bucket.next = None, {}

    # A generator that raises before ``Agree`` is closed. A new one, which sees no gradients, is
    # brought to the same request by the answers so far.

    def _advance(self, answers: list[Answer], is_new: bool = False) -> None:
        """Give the generator, or a new one, these answers, and start what it requests next. If it
        raises, take part without gradients.
        """
        self.bucket.withholds_gradients = self.error is not None
        try:
            request = self._replay(answers) if is_new else self._resume_generator(*answers)
        except Exception as error:
            self._take_part_without_gradients(error)
            return
        finally:
            self.bucket.withholds_gradients = False
        self.is_in_flight = False
        if isinstance(request, Agree):
            self.agreement, self.has_reached_agree = request, True
            return
        if not isinstance(request, Collective):
            assert isinstance(request, ReadToHost), f"{request} precedes Agree"
            return
        try:
            self.in_flight, self.is_in_flight = self.comm.start(request), True
        except EncodeError as error:
            cause = error.__cause__
            self._take_part_without_gradients(cause if isinstance(cause, Exception) else error)

    def _take_part_without_gradients(self, error: Exception) -> None:
        """Repeat the requests so far without gradients, and send what comes next."""
        if self.error is not None:  # without gradients it failed too: there is nothing to send
            raise self.error from error
        self.error = error
        answers = [
            answer.clone() if isinstance(answer, Tensor) else answer for answer in self._answers
        ]
        self._advance(answers, is_new=True)

    def _replay(self, answers: list[Answer]) -> Request:
        """Start a new generator, give it these answers, and return its next request."""
        self.close()
        request = self._resume_generator(None)
        for answer in answers:
            if isinstance(answer, Payload):
                assert isinstance(request, AllReduceMean)
                answer = request.message
            request = self._resume_generator(answer)
        return request

    def _resume_generator(self, answer: Answer) -> Request:
        if self._generator is None:
            self._write_control()
        is_encoding = not self.has_reached_agree
        with profiler_range("compopt::encode") if is_encoding else nullcontext():
            if self._generator is None:
                self._generator = self.algorithm(self.bucket)
            self.request = request = self._generator.send(answer)
        return request

    def _write_control(self) -> None:
        """Set the control fields of the bucket's payload."""
        bucket = self.bucket
        if self.in_backward and self.error is None:
            self.staleness = StalenessCheck(bucket)
        self.control = bucket.control = ControlFields(
            failed=[float(self.error is not None)],
            stamp=encode_stamp(bucket.index, bucket.group["step"] + 1),
            **self._last_fields,
        )


class ExchangeSchedule:
    """The exchanges of one step, and how far they have come.

    Bucket after bucket starts. After each one, the exchanges before it that have a next stage
    complete one stage, in order. When all have started, the rest follows in turns; numbers of the
    device are read when every bucket has reached that point. All ranks share this order.

    Backward runs as much of the schedule as its gradients allow, but never starts the last bucket;
    ``step()`` runs the rest. So ranks still agree when one of them has come further in backward.
    """

    def __init__(self, buckets: list[Bucket], algorithm: Algorithm, comm: Communicator):
        self.buckets = buckets
        self.exchanges: list[BucketExchange] = []
        self.inputs = ExchangeInputs(algorithm, comm)
        self.error: CommunicationError | None = None  # raised in backward; the step raises it
        # exchanges that may have a stage to complete before the next bucket starts
        self._behind: deque[BucketExchange] = deque()

    def run_in_backward(self, is_ready: Callable[[Bucket], bool]) -> None:
        """Run as far as gradients are ready, waiting for collectives that have started; the step
        raises what fails.

        In the simulator ranks take turns, so none may wait for another here.
        """
        self.inputs.in_backward = True
        while self.error is None and len(self.exchanges) < len(self.buckets) - 1:
            if self._skip_complete():
                if self._behind[0].in_flight.is_lockstep:
                    break
            elif not is_ready(self.buckets[len(self.exchanges)]):
                break
            try:
                self._run_next()
            except CommunicationError as error:
                self.error = error
        self.inputs.in_backward = False

    def run(self) -> None:
        """Run the rest, until every exchange has reached its ``Agree``."""
        if self.error is not None:
            # drop the exception: its traceback refers to this object (a reference cycle)
            error, self.error = self.error, None
            raise error
        while self._skip_complete() or len(self.exchanges) < len(self.buckets):
            self._run_next()
        while waiting := [one for one in self.exchanges if not one.has_reached_agree]:
            reading = [one for one in waiting if isinstance(one.request, ReadToHost)]
            if reading and not any(one.has_next_stage for one in waiting):
                _read_together(reading)
            for exchange in waiting:
                if exchange.is_in_flight:
                    exchange.complete_stage()

    def abandon(self, waits: bool = True) -> None:
        """Give up what has started; by default wait for what is in flight."""
        self.error = None
        for exchange in self.exchanges:
            exchange.abandon(waits)

    def _skip_complete(self) -> bool:
        """Return True if an exchange has a stage to complete before the next bucket starts."""
        while self._behind and not self._behind[0].has_next_stage:
            self._behind.popleft()
        return bool(self._behind)

    def _run_next(self) -> None:
        """Complete the next stage that is due, or start the next bucket."""
        if self._skip_complete():
            self._behind.popleft().complete_stage()
            return
        bucket, self._behind = self.buckets[len(self.exchanges)], deque(self.exchanges)
        self.exchanges.append(BucketExchange(bucket, self.inputs, bucket is self.buckets[-1]))


def _read_together(exchanges: list[BucketExchange]) -> None:
    """Resume the exchanges, which wait for numbers of a device, in one host wait."""
    by_device: dict[torch.device, list[tuple[BucketExchange, Tensor]]] = {}
    for exchange in exchanges:
        assert isinstance(exchange.request, ReadToHost)
        scalars = exchange.request.tensor
        by_device.setdefault(scalars.device, []).append((exchange, scalars))
    for pairs in by_device.values():
        values = iter(torch.cat([scalars for _, scalars in pairs]).tolist())
        for exchange, scalars in pairs:
            exchange.resume_before_agree(list(islice(values, len(scalars))))


# After the decision


def run_batched_requests(
    exchanges: Sequence[BucketExchange], resume: Callable[[BucketExchange, Answer], None]
) -> None:
    """Run what buckets have requested, all of one function in one launch, until none requests more;
    ``resume`` passes answers on.
    """
    while pairs := [(e, e.request) for e in exchanges if isinstance(e.request, RunBatched)]:
        first = pairs[0][1]
        waiting = [(e, request) for e, request in pairs if request.fused is first.fused]
        answers = first.fused.run(first.ops, [request.call for _, request in waiting])
        for (exchange, _), answer in zip(waiting, answers, strict=True):
            exchange.request = None
            resume(exchange, answer)


# Other collectives


def exchange_one(comm: Communicator, request: AllGather | AllReduceMean | Broadcast) -> Tensor:
    """Start one request, and return its answer."""
    answer = comm.start(request).wait()
    assert isinstance(answer, Tensor)
    return answer


def tell_failure(
    comms: Sequence[Communicator], count: int, place: int, device: torch.device
) -> None:
    """Take part in the sum of ``count`` numbers by which other shards decide, with 1 at ``place``,
    where it says that a rank has failed: without it they would wait for this rank.
    """
    numbers = [0.0] * count
    numbers[place] = 1.0
    with suppress(CommunicationError):
        sum_over_groups(comms, numbers, device)


def sum_over_groups(
    comms: Sequence[Communicator], numbers: Sequence[float], device: torch.device
) -> list[float]:
    """Return the sums over the ranks of all communicators, which are dimensions of a mesh."""
    if not comms:
        return [*numbers]
    message = torch.tensor(numbers, dtype=torch.float64, device=device)
    for comm in comms:
        mean = exchange_one(comm, AllReduceMean(message))
        message = mean * comm.size
    summed: list[float] = message.tolist()
    return summed
