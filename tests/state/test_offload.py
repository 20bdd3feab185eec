"""Offloaded state: no wait is missing, results do not change, the device keeps less, and nothing mixes devices."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
from conformance import Small, assert_same, loss, snapshot
from sim import Ranks
from table import by_name
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import compopt
from compopt._state.offload import DoubleBuffer, NoStreams, Offload

ORDERS = list(itertools.permutations(("in", "work", "out")))
WAITS = [("work", "in"), ("out", "work"), ("in", "out"), ("in", "work")]  # who waits for whom


class Delayed:
    """Three streams that run only when ``finish`` is called: as far as events allow, those first in ``order`` first.

    What ``forget`` names, a stream and the stream of the event, is not waited for.
    """

    def __init__(self, order: tuple[str, ...], forget: tuple[str, str] | None = None):
        self.order, self.forget = order, forget
        self.queue: dict[str, list] = {name: [] for name in order}
        self.done = dict.fromkeys(order, 0)

    def _put(self, stream: str, entry: object) -> tuple[str, int]:
        self.queue[stream].append(entry)
        return stream, len(self.queue[stream])

    def _wait(self, stream: str, event: tuple[str, int] | None) -> None:
        if event is not None and self.forget != (stream, event[0]):
            self._put(stream, event)

    def copy(self, stream, to, source, after):
        self._wait(stream, after)
        return self._put(stream, lambda: to.copy_(source))

    def work(self, function):
        return self._put("work", function)

    def record_work(self):
        return "work", len(self.queue["work"])

    def delay_work(self, event):
        self._wait("work", event)

    def finish(self) -> None:
        while any(self._advance(stream) for stream in self.order):
            pass
        assert all(self.done[name] == len(queue) for name, queue in self.queue.items()), "streams wait for each other"

    def _advance(self, stream: str) -> bool:
        """One step of a stream, if it can take one."""
        at = self.done[stream]
        if at == len(self.queue[stream]):
            return False
        entry = self.queue[stream][at]
        if isinstance(entry, tuple):
            if self.done[entry[0]] < entry[1]:
                return False
        else:
            entry()
        self.done[stream] += 1
        return True


def passes(streams: Delayed) -> bool:
    """Return True if tensors are what they should be after work on them, a look at them, and more work."""
    random = torch.Generator().manual_seed(0)
    host = [torch.randn(n, generator=random) if n else None for n in (5, 0, 9, 7, 3, 8, 1)]
    wanted = [None if t is None else t.clone() for t in host]
    buffer, records = DoubleBuffer(streams, torch.float32, torch.device("cpu")), []
    for number, (write, scale) in enumerate([(True, 2.0), (True, -3.0), (False, 0.0), (True, 0.5)]):
        for i, x in enumerate(buffer.iterate(host, write)):
            if x is None:
                continue
            if write:
                streams.work(lambda x=x, scale=scale, number=number: x.mul_(scale).add_(number))
                wanted[i].mul_(scale).add_(number)
            else:
                records.append((torch.full_like(x, torch.nan), wanted[i].clone()))
                streams.work(lambda x=x, copy=records[-1][0]: copy.copy_(x))
    streams.finish()
    pairs = [pair for pair in zip(host, wanted, strict=True) if pair[0] is not None] + records
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_whichever_stream_is_ahead_tensors_pass_whole(order):
    assert passes(Delayed(order))


@pytest.mark.parametrize("wait", WAITS, ids=" for ".join)
def test_no_wait_can_be_left_out(wait):
    assert not all(passes(Delayed(order, wait)) for order in ORDERS)


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_larger_tensors_and_other_kinds_of_state_come_later(order):
    """Buffers grow when what used them has ended; two kinds pass at once, each through its own."""
    streams, cpu = Delayed(order), torch.device("cpu")
    offload = Offload(("a", "b"))
    offload.streams[cpu] = streams
    host = {name: [torch.full((n,), float(n)) for n in (3, 2)] for name in ("a", "b")}
    for _ in range(2):
        both = (offload.iterate(name, host[name], cpu, True) for name in ("a", "b"))
        for a, b in zip(*both, strict=True):
            streams.work(lambda a=a, b=b: (a.mul_(2), b.mul_(3)))
        for name in ("a", "b"):
            host[name].append(torch.full((9,), 9.0))
    offload.finish()
    assert not any(len(queue) > done for queue, done in zip(streams.queue.values(), streams.done.values(), strict=True))
    for name, factor in (("a", 2), ("b", 3)):
        wanted = [3.0 * factor**2, 2.0 * factor**2, 9.0 * factor, 9.0]
        assert [float(x[0]) for x in host[name]] == wanted and all((x == x[0]).all() for x in host[name])


RADIUS = (compopt.RadiusAdamW, dict(density=0.3, interval=4, dense_steps=2))
SCAPE = (compopt.ScapeAdamS, dict(density=0.1, density_steps=3))
FORMS = {
    "radius": (*RADIUS, "residual", torch.float32),
    "radius, int8": (RADIUS[0], {**RADIUS[1], "payload_dtype": torch.int8}, "residual", torch.float32),
    "scape": (*SCAPE, "residual", torch.float32),
    "scape, bf16": (*SCAPE, "all", torch.bfloat16),
    "scape, sharded": (SCAPE[0], {**SCAPE[1], "sharded": True}, "all", torch.bfloat16),
}


def run(cls, options: dict, offload: str | None, dtype: torch.dtype, device: str = "cpu", steps: int = 9) -> Ranks:
    ranks = Ranks(
        2, lambda: Small(dtype).to(device),
        lambda params, process_group: cls(
            params, lr=1e-3, process_group=process_group, offload=offload, **options
        ),
    )  # fmt: skip
    ranks.train(loss if device == "cpu" else on_cuda, steps)
    return ranks


@pytest.mark.parametrize("payload_dtype", [None, torch.int8])
@pytest.mark.parametrize("cls", [compopt.RadiusAdamW, compopt.ScapeAdamS])
def test_more_offloaded_tensors_than_buffers_are_sent_as_they_are(cls, payload_dtype):
    """On the default backend: two buffers hold two tensors, and a pass over all of them would read two."""

    def trained(offload: str | None) -> list[nn.Parameter]:
        params = [nn.Parameter(torch.zeros(64, 64)) for _ in range(5)]
        optimizer = cls(params, density=0.1, dense_steps=0, offload=offload, payload_dtype=payload_dtype,
                        **{"interval": 2} if cls is compopt.RadiusAdamW else {"density_steps": 0})  # fmt: skip
        for t in range(6):
            for p, g in zip(params, torch.randn(5, 64, 64, generator=torch.Generator().manual_seed(t)), strict=True):
                p.grad = g
            optimizer.step()
        return params

    for p, q in zip(trained(None), trained("residual"), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_offloaded_or_not_steps_are_the_same_to_the_bit(monkeypatch, name):
    monkeypatch.setenv("COMPOPT_BACKEND", "torch")  # which streams offloaded state; kernels take what is in one place
    cls, options, offload, dtype = FORMS[name]
    here, there = run(cls, options, None, dtype), run(cls, options, offload, dtype)
    for ranks in (here, there):
        ranks.world.consolidate(ranks.optimizers)
        ranks.train(loss, 2)
    for a, b in zip(here.optimizers, there.optimizers, strict=True):
        assert_same(snapshot(a), snapshot(b))
        assert b.stats.residual_norm() == a.stats.residual_norm() > 0
    kept = there.optimizers[0]._buckets[0].offload.names
    assert kept == {"residual": ("residual",), "all": ("residual", "master")}[offload]
    again = copy.deepcopy(there.optimizers[0])
    assert again.offload == offload and again._buckets[0].offload.names == there.optimizers[0]._buckets[0].offload.names
    with pytest.raises(ValueError, match=r"offload must be .*, got 'some'"):
        cls([nn.Parameter(torch.zeros(64, 64))], offload="some")


PASSES = {  # of a steady step: how often the residual goes to the device, and back
    "RadiusAdamW": (*RADIUS, 1, 1),
    "ScapeAdamS": (*SCAPE, 2, 1),
}


@pytest.mark.parametrize("name", PASSES)
def test_how_often_a_residual_passes_through_the_device(monkeypatch, name):
    cls, options, inward, outward = PASSES[name]
    monkeypatch.setenv("COMPOPT_BACKEND", "torch")
    copied, copy_ = {"in": 0, "out": 0}, NoStreams.copy

    def counted(self, stream, to, source, after):
        copied[stream] += source.numel()
        return copy_(self, stream, to, source, after)

    ranks = run(cls, options, "residual", torch.float32, steps=6)
    monkeypatch.setattr(NoStreams, "copy", counted)
    ranks.train(loss, 1)
    n = sum(e["residual"].numel() for o in ranks.optimizers for e in o.state.values() if "residual" in e)
    assert copied == {"in": inward * n, "out": outward * n} and ranks.optimizers[0].stats.phase == "sparse"


def storages() -> dict[int, int]:
    """All live tensors' memory: address to bytes."""
    gc.collect()
    live = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in live if x.untyped_storage().nbytes()}


def test_the_device_keeps_what_the_paper_says_and_what_is_selected():
    """n/4 bytes of masks and two buffers of 4 P; the paper's other 2 P are masks a byte an element, here positions.

    Beside them: momentum and payload, 4 bytes an element selected, and two masks' positions, 4 each.
    """
    density, shapes = 0.02, 30 * [(64, 64)]
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    n, largest = sum(p.numel() for p in params), max(p.numel() for p in params)
    for p in params:
        p.grad = torch.empty_like(p)
    before = storages()
    optimizer = compopt.ScapeAdamS(params, density=density, density_steps=0, offload="residual", simulate=True)
    for step in range(3):
        for p in params:
            p.grad.normal_(generator=torch.Generator().manual_seed(step))
        optimizer.step()
    optimizer._engine.settle_state()
    host = {b.flat["residual"].untyped_storage().data_ptr() for b in optimizer._buckets}
    held = {at: size for at, size in storages().items() if at not in before and at not in host}
    masks = sum(b.flat[name].nbytes for b in optimizer._buckets for name in ("mask", "next_mask"))
    buffers = sum(x.nbytes for double in optimizer._engine.offload.buffers.values() for x in double.buffers)
    assert (masks, buffers) == (n / 4, 8 * largest)
    selected = 4 * 4 * density * n
    scratch = sum(x.nbytes for x in optimizer.ops._scratch.tensors)
    assert scratch < 5 * largest
    assert masks + buffers <= sum(held.values()) - scratch <= n / 4 + 10 * largest + 1.1 * selected
    assert 4 * n > 2 * sum(held.values())  # which the residual alone would take


def on_cuda(model: Small, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank)).to(model.scale)
    return (model(x) - x.flip(1)).square().mean()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", FORMS)
def test_on_a_gpu_offloaded_steps_are_the_same(name, monkeypatch):
    monkeypatch.setenv("COMPOPT_BACKEND", "torch")  # kernels take no offloaded buckets
    cls, options, offload, dtype = FORMS[name]
    here, there = (run(cls, options, how, dtype, "cuda") for how in (None, offload))
    for a, b in zip(here.optimizers, there.optimizers, strict=True):
        for p, q in zip(here.models[0].parameters(), there.models[0].parameters(), strict=True):
            torch.testing.assert_close(p, q)
        assert b._buckets[0].flat["residual"].is_pinned() and a._buckets[0].flat["residual"].is_cuda


DEVICE = "lazy"  # any that is not the CPU, and of which tensors without numbers can be made without a driver

DEVICES_FORMS = {
    "Radius": (compopt.RadiusAdamW, dict(density=0.3, interval=4, dense_steps=2, offload="residual"), torch.float32),
    "SCAPE": (compopt.ScapeAdamS, dict(density=0.1, density_steps=0, offload="all"), torch.bfloat16),
    "SCAPE, sharded": (
        compopt.ScapeAdamS,
        dict(density=0.1, density_steps=0, offload="all", sharded=True),
        torch.bfloat16,
    ),
}
every = pytest.mark.parametrize("form", DEVICES_FORMS.values(), ids=DEVICES_FORMS)


def trained(form, steps: int = 3) -> Ranks:
    cls, options, dtype = form
    ranks = Ranks(2, lambda: Small(dtype), lambda ps, process_group: cls(ps, process_group=process_group, **options))
    ranks.train(loss, steps)
    for optimizer in ranks.optimizers:
        optimizer._engine.settle_state()
    return ranks


class Answered:
    """A communicator that answers by shape, as two ranks would; it takes what is on the device only."""

    rank, size, bytes_sent = 0, 2, 0

    def start(self, request):
        assert request.tensor.device.type == DEVICE, f"{type(request).__name__} of a tensor in host memory"
        self.request = request
        return self

    def wait(self):
        if isinstance(self.request, compopt._wire.requests.AllGather):
            return torch.stack([self.request.tensor] * 2)
        return self.request.message


def put_on(bucket, convert) -> None:
    """The bucket's tensors, on the devices that they have where there is a GPU."""
    hosted = bucket.offload.names
    bucket.device = torch.device(DEVICE)
    for name, flat in bucket.flat.items():
        device = "cpu" if name in hosted else DEVICE
        sizes = [0 if view is None else view.numel() for view in bucket.state[name]]
        bucket.flat[name] = convert(flat).to(device)
        views = bucket.flat[name].split(sizes)
        pairs = zip(bucket.state[name], views, strict=True)
        bucket.state[name] = [None if old is None else view.view(old.shape) for old, view in pairs]
    bucket.params = [convert(p.detach()).to(DEVICE) for p in bucket.params]


@every
def test_consolidation_mixes_no_devices(form):
    optimizer = trained(form).optimizers[0]
    optimizer._engine.connection = Answered()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        for bucket in optimizer._buckets:
            put_on(bucket, mode.from_tensor)
        optimizer._consolidate()
        for bucket in optimizer._buckets:
            for i, entry in enumerate(bucket.entries):
                fake = tree_map_only(torch.Tensor, mode.from_tensor, dict(entry))
                shown = {name: bucket.state[name][i] for name in fake if name in bucket.flat}
                saved = compopt._engine.checkpoint.expand_entry(
                    bucket, i, optimizer.bucket_layouts(bucket), {**fake, **shown}
                )
                hosted = {name for name in saved if name in bucket.flat and saved[name].device.type == "cpu"}
                assert hosted == set(bucket.offload.names) & saved.keys()


class Late:
    """Streams whose way out takes until somebody waits for it."""

    def __init__(self):
        self.out = []

    def copy(self, stream, to, source, after):
        self.out += [(to, source.clone())]
        if stream == "in":
            to.copy_(source)
            self.out.pop()

    def record_work(self): ...

    def delay_work(self, event): ...

    def finish(self):
        for to, source in self.out:
            to.copy_(source)
        self.out.clear()


def test_what_is_owed_is_read_when_it_has_arrived():
    case = by_name["RadiusAdamW"]
    optimizer = case.make(Small().parameters(), offload="residual")
    bucket = optimizer._buckets[0]
    optimizer._engine.offload.streams[bucket.device] = Late()
    for residual in bucket.iterate_state("residual", write=True):
        if residual is not None:
            residual.fill_(1.0)
    bucket.cache.pop("has_residual", None)
    assert bucket.has_residual
