"""Offloaded state is on another device than the rest: nothing mixes them, and nobody reads what is still on its way.

Two devices without a second device: tensors that have a device and a shape, and no numbers (``FakeTensorMode``).
"""

from __future__ import annotations

import pytest
import torch
from conformance import Small, loss
from sim import Ranks
from table import by_name
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import compopt

DEVICE = "lazy"  # any that is not the CPU, and of which tensors without numbers can be made without a driver

FORMS = {
    "Radius": (compopt.RadiusAdamW, dict(density=0.3, interval=4, dense_steps=2, offload="residual"), torch.float32),
    "SCAPE": (compopt.ScapeAdamS, dict(density=0.1, density_steps=0, offload="all"), torch.bfloat16),
    "SCAPE, sharded": (
        compopt.ScapeAdamS,
        dict(density=0.1, density_steps=0, offload="all", sharded=True),
        torch.bfloat16,
    ),
}
every = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def trained(form, steps: int = 3) -> Ranks:
    cls, options, dtype = form
    ranks = Ranks(2, lambda: Small(dtype), lambda ps, process_group: cls(ps, process_group=process_group, **options))
    ranks.train(loss, steps)
    for optimizer in ranks.optimizers:
        optimizer._session.settle_state()
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
    optimizer._session.connection = Answered()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        for bucket in optimizer._buckets:
            put_on(bucket, mode.from_tensor)
        for _ in optimizer.consolidate_as_generator():
            pass
        for bucket in optimizer._buckets:
            for i, entry in enumerate(bucket.entries):
                fake = tree_map_only(torch.Tensor, mode.from_tensor, dict(entry))
                shown = {name: bucket.state[name][i] for name in fake if name in bucket.flat}
                saved = compopt._engine.checkpoint.expand_entry(
                    bucket, i, optimizer._bucket_layouts(bucket), {**fake, **shown}
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
    optimizer._session.offload.streams[bucket.device] = Late()
    for residual in bucket.iterate_state("residual", write=True):
        if residual is not None:
            residual.fill_(1.0)
    bucket.cache.pop("has_residual", None)
    assert bucket.has_residual
