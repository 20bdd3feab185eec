"""The C passes against their references, on any number of threads."""

from __future__ import annotations

import pytest
import torch
from oracles import kernels as reference
from sim import Ranks
from table import by_name
from test_backends import assert_same, trained
from torch import nn

import compopt
from compopt import tagc
from compopt._ops.native import build
from compopt._ops.native.native_ops import NativeOps
from compopt._ops.native.native_selection import NativeSelection, code_table, find_largest
from compopt._ops.native.passes import Table
from compopt._ops.operations import Ops
from compopt._state import bits as _bits
from compopt._state.masks import Mask, code_layout, encode_mask, partition_mask
from compopt._state.shards import cut_evenly

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="needs a C compiler")
SHAPES = [(64, 68), (17,), (300, 70), (1, 5), (2500, 4)]  # blocks of 1024 elements end within tensors


class Net(nn.Module):
    """Tensors of many sizes; the last has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)
        self.unused = nn.Parameter(torch.randn(64, 65))


def loss(model: Net, rank: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1 + 10 * step + rank)
    return sum(((p - torch.randn(p.shape, generator=random)) ** 2).sum() for p in model.many)


RUNS = [
    ("AdamS", {}),
    ("AdamS", {"maximize": True}),
    ("RadiusAdamW", {"dense_steps": 2, "interval": 4, "maximize": True, "max_grad_norm": 0.5}),
    ("RadiusAdamW", {"dense_steps": 0, "interval": 100, "payload_dtype": torch.int8}),
    ("ScapeAdamS", {"density": 0.01}),
    ("ScapeAdamS", {"max_grad_norm": 0.5, "clip": "scape", "maximize": True}),
    ("ScapeAdamS", {"payload_dtype": torch.bfloat16}),
    ("ScapeAdamS", {"payload_dtype": torch.int8, "density": 0.2}),
    ("SeparateAdam", {}),
    ("TagcAdamW", {"density": 0.01}),  # some parts of tensors then have nothing to send
    ("TagcAdamW", {"payload_dtype": torch.bfloat16}),
]


def run(monkeypatch, name: str, backend: str, options: dict, steps: int = 6) -> Ranks:
    options = {"density_steps": 0, "dense_steps": 1} | options if name == "ScapeAdamS" else options
    with monkeypatch.context() as patch:
        patch.setattr("test_backends.Net", Net)
        patch.setattr("test_backends.loss", loss)
        return trained(backend, patch, name, lr=1e-2, steps=steps, **options)


@pytest.mark.parametrize("name, options", RUNS)
def test_native_equals_torch(monkeypatch, name, options):
    plain, ours = (run(monkeypatch, name, backend, options) for backend in ("torch", "native"))
    if "payload_dtype" not in options:
        return assert_same(ours, plain, 1e-5)
    for p, q in zip(ours.models[0].parameters(), plain.models[0].parameters(), strict=True):
        apart = (p - q).abs() > 1e-3  # a last bit that differs is now and then rounded the other way on the wire
        assert apart.sum() <= 1e-3 * p.numel()


@pytest.mark.parametrize(
    "name, options",
    [("RadiusAdamW", {"dense_steps": 1, "interval": 3}), RUNS[5], ("ScapeAdamS", {}), ("TagcAdamW", {})],
)
def test_threads_change_nothing(monkeypatch, name, options):
    ours = run(monkeypatch, name, "native", options)
    torch.set_num_threads(3)
    try:
        assert_same(run(monkeypatch, name, "native", options), ours, 0.0)
    finally:
        torch.set_num_threads(1)


@pytest.fixture
def ops() -> NativeOps:
    return NativeOps()


CROWDS = {
    "normal": torch.randn(40_000, generator=torch.Generator().manual_seed(0)),
    "two values": torch.tensor([1.0, -2.0]).repeat(15_000),
    "mostly zero": torch.randn(40_000, generator=torch.Generator().manual_seed(1)) * (torch.arange(40_000) % 50 == 0),
    "all equal": torch.full((20_000,), -3.0),
    "tiny": torch.tensor([1e-42, -0.0, 3e-45, 1.0]),
    "wide": torch.logspace(-38, 38, 30_011),
}


@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("guess", [0.0, 1e-30, 0.5, 1e30])
def test_the_largest_are_found_wherever_one_looks_first(ops, crowd, guess):
    x = CROWDS[crowd]
    for k in {1, 3, len(x) // 100 + 1, len(x) // 2, len(x)}:
        out = torch.empty(k, dtype=torch.int32)
        find_largest(ops, x, k, out, guess)
        assert (out[1:] > out[:-1]).all()
        assert torch.equal(x.abs()[out.long()].sort().values, x.abs().topk(k).values.sort().values)
        equal = (x.abs() == x.abs()[out.long()].min()).nonzero().view(-1)  # of equal ones the first
        selected = equal[torch.isin(equal, out.long())]
        assert torch.equal(selected, equal[: len(selected)])


@pytest.mark.parametrize("k", [1, 400, 4000, 20_000])
@pytest.mark.parametrize("power", [0.2, 1.0, 4.0])  # from a crowd just below the largest to a long tail
def test_the_next_look_finds_enough_and_not_many_more(ops, k, power):
    """Whatever the distribution: a threshold some share below the last one would let all of a crowd through."""
    x = torch.rand(40_000, generator=torch.Generator().manual_seed(k)) ** power
    out, guess = torch.empty(k, dtype=torch.int32), 0.0
    for _ in range(3):
        guess = find_largest(ops, x, k, out, guess)
        found = int((x > guess).sum())
        assert k < found <= 2 * k + 40 * k**0.5 + 0.05 * len(x)  # what a bin of the histogram may hold


@pytest.mark.parametrize("density", [1, 0.1, 0.001])
@pytest.mark.parametrize("ranks", [1, 3])
def test_sums_are_selected_as_the_reference_does(ops, ranks, density):
    """By a threshold of the step before, by one that lets too many or too few through, and by none."""
    (bucket,) = compopt.TagcAdamW([nn.Parameter(torch.zeros(shape)) for shape in ((90, 83), (7,), (300, 70))])._buckets
    bucket.shards = cut_evenly(bucket.lengths, bucket.compressed, 0, ranks)
    ks, random = [tagc.count_selected(density, n) for n in bucket.shards.compressed_counts], torch.Generator()
    for scale in (1.0, 1.0, 1000.0, 0.001, 0.0, 1.0):
        bucket.flat["residual"].normal_(generator=random).mul_(scale)
        grads = [torch.randn(shape, generator=random) * scale for shape in bucket.shapes[:-1]] + [None]
        ours = ops.run(tagc.select_largest, bucket, grads, ks)
        reference_ = tagc.select_largest(bucket, Ops(), grads, ks)
        assert all(torch.equal(a, b) for a, b in zip(ours, reference_, strict=True))
        union = _bits.make_bits(torch.cat([ours.positions, torch.tensor([1, 5])]).unique(), len(ours.bits))
        pair = (x.read_union(union, ours.values, ours.positions) for x in (ops, Ops()))
        assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("n, k", [(8, 1), (1000, 300), (40_000, 400)])
def test_top_k(ops, n, k):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).abs()
    assert torch.equal(ops.top_k_mask(x, k), reference.top_k(x, k))


@pytest.mark.parametrize("ranks, density", [(1, 0.01), (2, 0.01), (3, 0.2), (5, 0.001)])
def test_masks_cross_the_network_as_the_reference_has_them(ops, ranks, density):
    lengths = (4096, 70 * 80 + 3, 40_003)
    partition = partition_mask(lengths, ranks, density)
    params = [nn.Parameter(torch.zeros(n, 1)) for n in reversed(lengths)]  # a bucket takes the last first
    (bucket,) = compopt.ScapeAdamS(params)._buckets
    random = torch.Generator().manual_seed(ranks)
    selections, messages, global_bits = [], [], []
    for rank, shard in enumerate(partition.by_rank):
        selection = NativeSelection(bucket, ops, partition, rank)
        chosen = [torch.randperm(p.stop - p.start, generator=random)[: p.k].sort().values for p in shard.slices]
        selection.positions.copy_(torch.cat(chosen))
        local = torch.cat([c + piece.first_bit for c, piece in zip(chosen, shard.slices, strict=True)])
        bits = torch.zeros(shard.nbytes, dtype=torch.uint8)
        _bits.set_bits_(bits, local)
        expected = encode_mask(local, bits, partition, rank)
        if not partition.is_elias_fano:
            assert len(expected) == partition.message_bytes
        assert torch.equal(selection.encode(), expected)
        selections.append(selection)
        messages.append(expected)
        global_bits.append(bits)
    for selection in selections:
        mask = selection.assemble(torch.stack(messages))
        assert torch.equal(torch.cat(mask.bits), torch.cat(global_bits))
        for n, bits, positions in zip(lengths, mask.bits, mask.positions, strict=True):
            assert torch.equal(positions, reference.positions(bits, n))


BROKEN = {  # what a message of one rank turns into on its way
    "all ones": lambda message, bits: message.fill_(255),
    "positions too large": lambda message, bits: message.zero_()[bits // 8 - 1 :].fill_(128),
    "nothing selected": lambda message, bits: message.zero_(),
    "not ascending": lambda message, bits: message[bits // 8 :].bitwise_not_(),
    "one more": lambda message, bits: message[bits // 8 - 9].fill_(255),
}


@pytest.mark.parametrize("density", [0.01, 0.3])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_mask_that_is_not_what_was_agreed_is_refused(ops, broken, density):
    """Another rank's message is not trusted with memory: positions are where they may be, or an error says so."""
    partition = partition_mask((4096, 0, 40_000), 2, density)
    params = [nn.Parameter(torch.zeros(n, 1)) for n in (40_000, 10, 4096)]
    (bucket,) = compopt.ScapeAdamS(params)._buckets
    messages = []
    for rank, shard in enumerate(partition.by_rank):
        selection = NativeSelection(bucket, ops, partition, rank)
        selection.positions.copy_(torch.cat([torch.arange(piece.k) for piece in shard.slices]))
        messages.append(selection.encode().clone())  # the next one of this bucket lies in the same memory
    selection.assemble(torch.stack(messages))
    bits = code_layout(partition.by_rank[0])[0] if partition.is_elias_fano else 8 * len(messages[0])
    BROKEN[broken](messages[0], bits)
    if broken == "not ascending" and not partition.is_elias_fano:
        return  # bits cannot be
    with pytest.raises(compopt.CommunicationError, match="the mask of rank 0 is not what was agreed: it has"):
        selection.assemble(torch.stack(messages))


@pytest.mark.parametrize("byte, last", [(255, 255), (0, 128)])
def test_a_code_that_says_what_was_not_agreed_writes_nothing_beyond(ops, byte, last):
    """Neither for more positions than agreed, nor for positions too large."""
    partition = partition_mask((40_000,), 2, 0.01)
    (piece,), shard = partition.by_rank[0].slices, partition.by_rank[0]
    size = shard.nbytes
    out, bits = torch.full((piece.k + 8,), -1, dtype=torch.int32), torch.zeros(9 * size, dtype=torch.uint8)
    message = torch.full((partition.message_bytes,), byte, dtype=torch.uint8)
    message[code_layout(shard)[0] // 8 - 1] = last  # the last of the runs that tell high bits
    row = Table(1, positions=out.data_ptr(), k=piece.k, at=piece.first_bit, start=piece.start, stop=piece.stop)
    read = ops.library.decode(message.data_ptr(), size, code_table(shard), row, 1, bits.data_ptr())
    assert read != piece.k
    assert (out[piece.k :] == -1).all() and not bits[size:].any()


def test_one_position_more_than_agreed_is_not_written(ops):
    """In order, within the tensor, and still too many."""
    chosen, bits = torch.tensor([3, 5, 11], dtype=torch.int32), torch.zeros(4, dtype=torch.uint8)
    ops.library.encode(Table(1, chosen=chosen.data_ptr(), k=3, at=0), 1, None, bits.data_ptr(), 4)
    out, again = torch.full((3,), -1, dtype=torch.int32), torch.zeros(4, dtype=torch.uint8)
    row = Table(1, positions=out.data_ptr(), k=2, at=0, start=0, stop=32)
    assert ops.library.decode(bits.data_ptr(), 4, None, row, 1, again.data_ptr()) == -1
    assert out.tolist() == [3, 5, -1]


def test_a_refused_mask_makes_the_next_step_dense(monkeypatch):
    """It arrives behind the commit: the step that chose it stands, and training goes on."""
    monkeypatch.setenv("COMPOPT_BACKEND", "native")
    options = dict(density=0.1, dense_steps=1, density_steps=0)
    ranks = Ranks(2, Net, lambda ps, process_group: compopt.ScapeAdamS(ps, process_group=process_group, **options))
    ranks.train(loss, 3)

    def refuse(*_: object) -> None:
        raise compopt.CommunicationError("the mask of rank 0 is not what was agreed")

    phases = []
    for assemble in (refuse, NativeSelection.assemble, NativeSelection.assemble):
        with monkeypatch.context() as patch:  # of the step before: it is read when the next one begins
            patch.setattr(NativeSelection, "assemble", assemble)
            ranks.train(loss, 1)
        phases.append(ranks.optimizers[0].stats.phase)
    assert phases == ["dense", "sparse", "sparse"]
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_is_not_finite_is_marked_wherever_it_is(ops, bad):
    params = [nn.Parameter(torch.zeros(50, 100)) for _ in range(3)]
    (bucket,) = by_name["ScapeAdamS"].make(params)._buckets
    for at_element in (0, 2047, 4999):
        grads = [torch.ones(50, 100), torch.ones(50, 100), None]
        grads[0].view(-1)[at_element] = bad
        index = [torch.tensor([7], dtype=torch.int32)] * 3
        payload = ops.encode(bucket, grads, Mask(bucket, positions=index))
        assert payload.header.isnan().tolist() == [True, False, False]
        assert payload.header[1:].tolist() == [1.0, 0.0] and payload.body.tolist()[1:] == [1.0, 0.0]
