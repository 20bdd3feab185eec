"""N ranks in one process, in lockstep: real optimizers over a communicator that answers when all ranks have asked.

A step of four ranks takes milliseconds instead of seconds, nothing is random, and ranks that would hang raise Deadlock.
Each rank is a greenlet, which lets the next one run where it waits for a collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from compopt._wire.codec import QuantizedMean
from compopt._wire.collectives import Communicator, count_bytes
from compopt._wire.in_flight import PendingCollective
from compopt._wire.payload import Payload
from compopt._wire.requests import (
    AllGather,
    AllReduceMean,
    BitOr,
    Broadcast,
    CommunicationError,
    ReduceScatterMean,
    Request,
    average_rows,
)


class Deadlock(AssertionError):
    """Ranks wait for collectives that the others have not started."""


class SimPending:
    """A collective that is answered once every rank has started its own."""

    is_lockstep = True  # ranks run one after the other here: none may wait for another in its backward

    def __init__(self, world: World, number: int, rank: int, has_next: bool):
        self.world, self.number, self.rank, self.has_next = world, number, rank, has_next

    @property
    def is_ready(self) -> bool:
        return self.number in self.world.answers

    def untrack(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def wait(self) -> object:
        here = getcurrent()
        if here.parent is not None:  # also where it is answered: so ranks run in the order of their numbers
            here.parent.switch(self)
            while not (self.is_ready or self.world.fails(self)):
                here.parent.switch(self)
        if (self.rank, self.number) in self.world.failing or self.number in self.world.failing_everywhere:
            raise CommunicationError(f"collective {self.number} was made to fail")
        if not self.is_ready:
            raise Deadlock(
                f"rank {self.rank} waits for collective {self.number}; "
                f"ranks that started it: {sorted(self.world.asked.get(self.number, {}))}"
            )
        return self.world.answers[self.number][self.rank]


class SimCommunicator(Communicator):
    """One rank's view of the world; what an optimizer takes as ``process_group``."""

    def __init__(self, world: World, rank: int):
        self.world, self.rank, self.size = world, rank, world.size
        self._bytes_sent = self.started = 0
        self._own_group: SimCommunicator | None = None

    def start(self, request: Request) -> SimPending:
        self._bytes_sent += count_bytes(request)
        number, self.started = self.started, self.started + 1
        message = getattr(request, "message", None)
        if isinstance(message, Payload) and message.codec.bits and self.size > 1:  # encoded when it starts, as by gloo
            mean = message.codec.make_mean(message, self.rank, self.size)
            self.world.encoded[number, self.rank] = mean, mean.encode_for_owners()
        self.world.ask(number, self.rank, request)
        return SimPending(
            self.world, number, self.rank, isinstance(request, BitOr) or getattr(request, "has_next", False)
        )

    def with_own_group(self) -> SimCommunicator:
        """On a world beside this one, whose collectives have numbers of their own."""
        self.world.beside = self.world.beside or World(self.size)
        self._own_group = self.world.beside.comms[self.rank]
        return self._own_group

    def __deepcopy__(self, memo: dict) -> SimCommunicator:
        return self


class Begun:
    """A call that has come to its first wait for other ranks, real ones; ``finish`` goes on with it."""

    def __init__(self, function: Callable[[], object]):
        self.call, wait = greenlet(function), PendingCollective.wait

        def stop(pending: PendingCollective) -> object:
            PendingCollective.wait = wait
            getcurrent().parent.switch()
            return wait(pending)

        PendingCollective.wait = stop
        try:
            self.call.switch()
        finally:
            PendingCollective.wait = wait

    def finish(self) -> None:
        if not self.call.dead:
            self.call.switch()


def noting(function: Callable[[], object], errors: list, *kinds: type[BaseException]) -> Callable[[], None]:
    """A rank's call; the error that it ends with is noted, and not raised."""

    def call() -> None:
        try:
            function()
        except Exception as error:
            if not isinstance(error, kinds or Exception):
                raise
            errors.append(error)

    return call


class World:
    """The ranks and the collectives they have started, numbered in the order of starting."""

    def __init__(self, size: int):
        self.size = size
        self.comms = [SimCommunicator(self, rank) for rank in range(size)]
        self.asked: dict[int, dict[int, Request]] = {}
        self.answers: dict[int, list[object]] = {}
        self.encoded: dict[tuple[int, int], tuple[QuantizedMean, Tensor]] = {}  # by number and rank
        self.failing: set[tuple[int, int]] = set()
        self.failing_everywhere: set[int] = set()
        self.beside: World | None = None
        self.log: list[tuple[str, list[Tensor]]] = []  # what every rank sent, when ``record`` is on
        self.record = False

    def ask(self, number: int, rank: int, request: Request) -> None:
        self.asked.setdefault(number, {})[rank] = request
        if len(self.asked[number]) == self.size:
            requests = [self.asked[number][r] for r in range(self.size)]
            del self.asked[number]
            encoded = [self.encoded.pop((number, r)) for r in range(self.size) if (number, r) in self.encoded]
            self.answers[number] = self._answer(requests, encoded)
            self.answers.pop(number - 1024, None)  # more than the buckets of any step

    def _answer(self, requests: list[Request], encoded: list[tuple[QuantizedMean, Tensor]]) -> list[object]:
        kinds = {(type(r).__name__, (*r.tensor.shape, *getattr(r, "sizes", [])), r.tensor.dtype) for r in requests}
        if len(kinds) > 1:
            raise Deadlock(f"ranks started different collectives: {sorted(map(str, kinds))}")
        if self.record:
            self.log.append((type(requests[0]).__name__, [r.tensor.clone() for r in requests]))
        message = getattr(requests[0], "message", None)
        if isinstance(message, Payload) and message.codec.bits:
            return self._quantized([r.message for r in requests], encoded)
        stacked = torch.stack([r.tensor for r in requests])
        match requests[0]:
            case AllReduceMean():
                mean = stacked.sum(0) / self.size
                for r in requests:
                    r.tensor.copy_(mean)
                return [r.message for r in requests]
            case AllGather():
                return [stacked.clone() for _ in requests]
            case Broadcast(_, source):
                for r in requests:
                    r.tensor.copy_(stacked[source])
                return [r.tensor for r in requests]
            case ReduceScatterMean(_, sizes):
                return [average_rows(rows) for rows in stacked.split(sizes, dim=1)]
            case BitOr():
                union = functools.reduce(torch.bitwise_or, stacked.unbind())
                for r in requests:
                    r.tensor.copy_(union)
                return [r.tensor for r in requests]
        raise AssertionError(f"unknown request {requests[0]}")

    def _quantized(self, payloads: list[Payload], encoded: list[tuple[QuantizedMean, Tensor]]) -> list[object]:
        """As real ranks do it, the messages handed over directly."""
        if self.size == 1:
            payloads[0].codec.make_mean(payloads[0], 0, 1).round_payload()
            return payloads
        means, sent = [mean for mean, _ in encoded], torch.stack([message for _, message in encoded])
        gathered = torch.stack([mean.average_own_chunk(sent[:, rank]) for rank, mean in enumerate(means)])
        for rank, (mean, payload) in enumerate(zip(means, payloads, strict=True)):
            payload.receive(mean, sent[:, rank], gathered)
        return payloads

    def step(self, optimizers: list, samples: Sequence[float] | None = None) -> None:
        """``optimizer.step()`` on all ranks, with ``samples`` of each. Raises what the lowest rank raised."""
        if samples is None:
            self.run([optimizer.step for optimizer in optimizers])
        else:
            pairs = zip(optimizers, samples, strict=True)
            self.run([functools.partial(optimizer.step, samples=number) for optimizer, number in pairs])

    def consolidate(self, optimizers: list) -> None:
        self.run([optimizer.consolidate_state for optimizer in optimizers])

    @torch.no_grad()
    def run(self, functions: list[Callable[[], object]]) -> list[object]:
        """Call one function a rank, in turns; return what they return. A greenlet that waits already goes on."""
        ranks = [one if isinstance(one, greenlet) else greenlet(one) for one in functions]
        try:
            return self._take_turns(ranks)
        finally:  # what is not ended here would end at any time, and leave its contexts then
            for rank in ranks:
                if not rank.dead:
                    rank.throw(GreenletExit)

    def _take_turns(self, ranks: list[greenlet]) -> list[object]:
        waiting: dict[int, SimPending | None] = dict.fromkeys(range(len(ranks)))
        results: dict[int, object] = {}
        errors: dict[int, BaseException] = {}
        while waiting:
            moved = False
            for rank, pending in list(waiting.items()):
                if pending is not None and not pending.is_ready and not self.fails(pending):
                    continue
                moved = True
                try:
                    answer = ranks[rank].switch()
                except Exception as error:
                    errors[rank] = error
                    del waiting[rank]
                    continue
                if ranks[rank].dead:
                    results[rank] = answer
                    del waiting[rank]
                else:
                    waiting[rank] = answer
            if not moved:
                raise (
                    errors[min(errors)]
                    if errors
                    else Deadlock(f"ranks {sorted(waiting)} wait for collectives nobody answers")
                )
        if errors:
            raise errors[min(errors)]
        return [results[rank] for rank in range(len(ranks))]

    def fails(self, pending: SimPending) -> bool:
        return (pending.rank, pending.number) in self.failing or pending.number in self.failing_everywhere


class Ranks:
    """A model and an optimizer a rank, trained on ``loss(model, rank, step)``."""

    def __init__(
        self,
        size: int,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[..., torch.optim.Optimizer],
        seed: int = 0,
        simulate: bool = True,
    ):
        self.world = World(size)
        self.models: list[nn.Module] = []
        for _ in range(size):
            torch.manual_seed(seed)
            self.models.append(make_model())
        self.optimizers = [
            make_optimizer(m.parameters(), process_group=c) for m, c in zip(self.models, self.world.comms, strict=True)
        ]
        for optimizer in self.optimizers if size == 1 else []:
            optimizer.simulate = simulate  # as many ranks would step
        self.steps = 0

    def shrink(self, survivors: list[int]) -> None:
        """The other ranks are gone; these go on over a world of their own."""
        self.models = [self.models[rank] for rank in survivors]
        self.optimizers = [self.optimizers[rank] for rank in survivors]
        self.world = World(len(survivors))
        pairs = zip(self.optimizers, self.world.comms, strict=True)
        self.world.run([functools.partial(optimizer.rebind, comm) for optimizer, comm in pairs])

    def __iter__(self) -> Iterator[tuple[int, nn.Module, torch.optim.Optimizer]]:
        return zip(range(self.world.size), self.models, self.optimizers, strict=True)

    def backward(self, loss: Callable[[nn.Module, int, int], Tensor]) -> list[float]:
        losses = []
        for rank, model, optimizer in self:
            optimizer.zero_grad()
            value = loss(model, rank, self.steps)
            value.backward()
            losses.append(float(value.detach()))
        return losses

    def train(self, loss: Callable[[nn.Module, int, int], Tensor], steps: int) -> list[float]:
        """``steps`` steps; the mean loss over ranks before each."""
        history = []
        for _ in range(steps):
            losses = self.backward(loss)
            self.world.step(self.optimizers)
            self.steps += 1
            history.append(sum(losses) / len(losses))
        return history

    @property
    def at_rest(self) -> bool:
        """Return True if replicas have to be equal now: always, but within a round of local steps."""
        return not any(getattr(optimizer.stats, "steps_into_round", 0) for optimizer in self.optimizers)

    def finish_round(self, loss: Callable[[nn.Module, int, int], Tensor]) -> None:
        """Train on until replicas have to be equal."""
        while not self.at_rest:
            self.train(loss, 1)

    def assert_replicas_equal(self) -> None:
        """Every rank's parameters are the same to the bit."""
        for rank, model in enumerate(self.models[1:], start=1):
            for (name, p), q in zip(self.models[0].named_parameters(), model.parameters(), strict=True):
                assert torch.equal(p, q), f"{name} differs between rank 0 and rank {rank} after step {self.steps}"
