"""The C passes: against their references, on any threads and instruction sets; checks of memory before C reads it."""

from __future__ import annotations

import check_neon
import pytest
import torch
from backend_runs import assert_same, trained
from oracles import kernels as reference
from pairs import pairs
from sim import Ranks
from slow_rows import slow_but
from table import CASES, by_name
from torch import nn

import compopt
from compopt._backends.native import library
from compopt._backends.native.library import Table
from compopt._backends.native.native_ops import NativeOps
from compopt._backends.native.native_selection import NativeSelection, code_table, find_largest
from compopt._ops.operations import Ops
from compopt._state import bits as _bits
from compopt._state.masks import Mask, code_layout, encode_mask, partition_mask
from compopt._state.shards import cut_evenly
from compopt.tagc import tagc

pytestmark = pytest.mark.skipif(not library.find_objects(), reason="needs the compiled passes")


SHAPES = [(64, 68), (17,), (300, 70), (1, 5), (2500, 4)]  # blocks of 1024 elements end within tensors


class Net(nn.Module):
    """Tensors of many sizes; the last has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)
        self.unused = nn.Parameter(torch.randn(64, 65))


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
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
        return trained(backend, patch, name, steps=steps, model=Net, loss=loss, lr=1e-2, **options)


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


@pytest.mark.parametrize(
    "case", [by_name[name] for name in ("RadiusAdamW", "ScapeAdamS", "SeparateAdam")], ids=lambda case: case.name
)
def test_each_of_several_empty_tensors_takes_its_step(case):  # as shards of FSDP2 on a rank that has nothing of them
    empty = [nn.Parameter(torch.empty(shape)) for shape in [(0,), (0, 3), (4, 0), (0,)]]
    optimizer = case.make([{"params": empty}], simulate=True)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)  # memory that nobody writes is NaN
    try:
        for p in empty:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
    assert optimizer.stats.phase != "skipped", optimizer.stats.reason
    assert [float(optimizer.state[p]["step"]) for p in empty] == [1.0] * 4


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
    """With any distribution: a threshold some share below the last one would let all of a crowd through."""
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


BLOCKS = (16, 512, 4096, 16384, 131072)  # sixteens, the passes' blocks, and what else the package cuts tensors by
SIZES = [n for block in BLOCKS for n in (block - 1, block, block + 1)] + [1, 0, 40_007]


@pytest.fixture(params=["avx512", "avx2", "neon"])
def isa(request, monkeypatch) -> str:
    here = library.list_isas()
    if request.param not in here:
        pytest.skip(f"this processor has no {request.param}, only {', '.join(here)}")
    monkeypatch.setenv("COMPOPT_BACKEND", "native")
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", request.param)
    return request.param


def portable(monkeypatch) -> None:
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", "portable")


class Sizes(nn.Module):
    """A tensor beside the end of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in SIZES)


def trained_by(name: str, options: dict) -> Ranks:
    def make(params, **more):
        return by_name[name].make([{"params": list(params), "compress": True}], **options, **more)

    world = Ranks(2, Sizes, make)
    world.train(loss, 4)
    world.assert_replicas_equal()
    return world


ISA_CASES = [
    ("RadiusAdamW", {"dense_steps": 1, "interval": 2, "density": 0.4}),  # read as bits
    ("RadiusAdamW", {"dense_steps": 1, "interval": 2, "density": 0.01, "max_grad_norm": 0.5}),  # as positions
    ("ScapeAdamS", {"dense_steps": 1, "density_steps": 0, "density": 0.1}),
    ("ScapeAdamS", {"dense_steps": 1, "density_steps": 0, "density": 0.01}),
    ("TagcAdamW", {"dense_steps": 1, "density": 0.1}),
    ("AdamS", {}),
    ("Average", {"payload_dtype": "int8"}),
    ("Average", {"payload_dtype": "int4"}),
]


@pytest.mark.parametrize("name, options", slow_but(lambda *row: row in ISA_CASES[::2], ISA_CASES))
def test_every_processor_computes_the_same_bits_beside_every_block(monkeypatch, isa, name, options):
    ours = trained_by(name, options)
    assert {o.ops.isa for o in ours.optimizers} == {isa}
    portable(monkeypatch)
    assert_same(trained_by(name, options), ours, 0.0)


@pytest.mark.parametrize("name, options", [RUNS[2], RUNS[5], RUNS[6]])
def test_every_processor_computes_the_same_bits(monkeypatch, isa, name, options):
    ours = run(monkeypatch, name, "native", options)
    portable(monkeypatch)
    assert_same(run(monkeypatch, name, "native", options), ours, 0.0)


def crowds(n: int) -> list[torch.Tensor]:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    return [x, x.round(), torch.full((n,), -3.0), x * (torch.arange(n) % 50 == 0)]


def selected(monkeypatch, isa: str) -> list[torch.Tensor]:
    """Positions, masks and guesses for crowds with and without ties, from no guess, a good one and bad ones."""
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", isa)
    ops, results = NativeOps(), []
    for x in (x for n in SIZES if n for x in crowds(n)):
        n = len(x)
        for k in sorted({1, n // 100 + 1, n // 3 + 1, n}):
            out = torch.empty(k, dtype=torch.int32)
            for guess in (0.0, 0.5, float(x.abs().kthvalue(n + 1 - k).values) * 0.9, 1e30):
                results += [torch.tensor(find_largest(ops, x, k, out, guess), dtype=torch.float64), out.clone()]
            results.append(ops.top_k_mask(x.abs(), k))
    return results


def test_every_processor_selects_the_same(monkeypatch, isa):
    ours, theirs = selected(monkeypatch, isa), selected(monkeypatch, "portable")
    assert len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_neon_computes_the_same_bits():
    """In an emulator where this is no ARM machine: every function of vectors.h, and all passes that use them."""
    if missing := check_neon.missing():
        pytest.skip(f"neon: not here: {missing}")
    results = check_neon.checksums(["portable"])
    assert set(results) == {"portable", "neon"} and len(set(results.values())) == 1


def test_less_than_there_is_can_be_asked_for_and_nothing_else(monkeypatch):
    monkeypatch.setenv("COMPOPT_BACKEND", "native")
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", "portable")
    assert NativeOps().isa == "portable"
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", "sse9")
    with pytest.raises(ValueError, match=r"COMPOPT_NATIVE_ISA must be one of avx512, .*portable, got 'sse9'"):
        compopt.AdamS([nn.Parameter(torch.zeros(3))])
    here = library.list_isas()
    monkeypatch.setenv("COMPOPT_NATIVE_ISA", next(isa for isa in library.ISAS if isa not in here))
    with pytest.raises(
        ValueError, match=r"COMPOPT_NATIVE_ISA=\w+ cannot run here: of what is compiled this processor has"
    ):
        compopt.AdamS([nn.Parameter(torch.zeros(3))])


N = 5000


@pytest.fixture
def bucket():
    random = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(50, 100, generator=random)) for _ in range(2)]
    for p in params:
        p.grad = torch.randn(50, 100, generator=random)
    return compopt.ScapeAdamS(params)._buckets[0]


def test_a_tensor_becomes_an_address_only_as_it_will_be_read():
    x = torch.zeros(4, 6)
    assert library.address("x", x, 24) == x.data_ptr() and library.address("x", None, 24) == 0
    assert library.address("x", torch.zeros(0), 0) != 0
    assert library.address_in_turn("x", x, [3, 0, 5]) == [x.data_ptr() + 4 * before for before in (0, 3, 3)]
    for wrong in (x.double(), x.t(), x[:, :3], x[:2], x.to("meta")):
        with pytest.raises(
            ValueError, match=r"reads 24 contiguous elements of torch.float32 on the CPU as x, and number"
        ):
            library.address("x", wrong, 24)
    with pytest.raises(ValueError, match=r"reads 25 contiguous .* number 0 is torch.float32 of shape \(4, 6\)"):
        library.address_in_turn("x", x, [20, 5])


def test_positions_of_another_dtype_are_converted(ops, bucket):
    """They were read as if they were int32: zeros between all, values of the wrong places."""
    grads, positions = bucket.grads(), torch.tensor([1, 7, 4999])

    def packed(by: Ops, positions: torch.Tensor) -> torch.Tensor:
        return by.encode(bucket, grads, Mask(bucket, positions=[positions] * 2)).flat

    expected = packed(Ops(), positions).clone()
    for dtype in (torch.int64, torch.int32, torch.int16):
        assert torch.equal(packed(ops, positions.to(dtype)), expected)
    assert torch.equal(packed(ops, torch.stack([positions.int()] * 2, 1)[:, 0]), expected)


@pytest.mark.parametrize("residuals", [False, True])
@pytest.mark.parametrize("negate", [False, True])
@pytest.mark.parametrize("every", [3, 40])  # read as bits, and as positions
def test_a_message_is_what_plain_operators_make_of_it(ops, bucket, every, negate, residuals):
    grads, index = bucket.grads(), [torch.arange(1, N, every, dtype=torch.int32)] * 2
    bits = torch.zeros((N + 7) // 8, dtype=torch.uint8)
    _bits.set_bits_(bits, index[0].long())
    bucket.state["residual"] = [p.detach() for p in bucket.params]
    options = {"adds_residuals": residuals, "scale": 0.5, "negate": negate}
    expected = Ops().encode(bucket, grads, Mask(bucket, positions=index), **options).flat.clone()
    assert torch.equal(ops.encode(bucket, grads, Mask(bucket, bits=[bits] * 2), **options).flat, expected)


@pytest.mark.parametrize(
    "positions", [[3, 2**32 + 4], [-1, 4], [3, N], [-7, 4], [4000, 3], [3, 3], [3, 2**31 - 1]]
)  # the first would fit, had it 32 bits
def test_positions_outside_are_refused_before_they_are_read(ops, bucket, positions):
    with pytest.raises(ValueError, match=r"parameter [01] of group 0 are not ascending within its 5000 elements"):
        Mask(bucket, positions=[torch.tensor(positions), None])
    mask = Mask(bucket, positions=[torch.tensor([1, 2]), None])
    if positions == [3, 3] or max(positions) >= 2**31:
        return
    mask.positions[0].copy_(torch.tensor(positions))  # what was right when the mask was made is not trusted
    with pytest.raises(RuntimeError, match=r"parameter [01] of group 0.*5000 elements"):
        ops.encode(bucket, bucket.grads(), mask)


def test_a_mask_with_fewer_bits_than_are_to_be_sent_is_refused(ops, bucket):
    bits = torch.zeros(N // 8, dtype=torch.uint8)
    bits[:200] = 255
    mask = Mask(bucket, bits=[bits, None], sizes=[2000, N])
    with pytest.raises(RuntimeError, match="parameter 1 of group 0 do not fit its 5000 elements"):
        ops.encode(bucket, bucket.grads(), mask)
    with pytest.raises(RuntimeError, match="a mask has 1600 of 5000 elements, and 2000 were selected"):
        mask.positions  # noqa: B018
    for wrong in (bits[:-1], bits.int()):
        with pytest.raises(ValueError, match=r"the mask of parameter 1 of group 0 is .* 625 bytes of bits"):
            Mask(bucket, bits=[wrong, None])


class MemoryNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(70, 64)), nn.Parameter(torch.randn(33))


def train(ranks: Ranks, steps: int, dtype: torch.dtype = torch.float32) -> None:
    for _ in range(steps):
        for rank, model, _ in ranks:
            random = torch.Generator().manual_seed(1 + 10 * ranks.steps + rank)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=random).to(dtype)
        ranks.world.step(ranks.optimizers)
        ranks.steps += 1
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("case", [case for case in CASES if not case.build], ids=lambda case: case.name)
@pytest.mark.parametrize("own, grad", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_gradients_of_another_dtype_than_their_parameters(monkeypatch, case, own, grad):
    """Read by the width that they have: beyond the end of a bfloat16 gradient there is somebody else's memory."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this PyTorch has no grad_dtype")

    def model() -> MemoryNet:
        net = MemoryNet().to(own)
        for p in net.parameters():
            p.grad_dtype = grad
        return net

    worlds = []
    for backend in ("native", "torch"):
        monkeypatch.setenv("COMPOPT_BACKEND", backend)
        worlds.append(Ranks(2, model, lambda params, **o: case.make(params, **o)))
        train(worlds[-1], 6, grad)
    ours, theirs = worlds
    if own is torch.bfloat16:  # left to PyTorch's operators but for single tensors
        return assert_same(ours, theirs)
    for p, q in zip(ours.models[0].parameters(), theirs.models[0].parameters(), strict=True):
        assert ((p - q).abs() > 1e-4).sum() <= 0.005 * p.numel()  # of equals, TAGC's two backends leave different ones


CHANGES = {
    "bfloat16": lambda model: model.bfloat16(),
    "float64": lambda model: model.double(),
    "shorter": lambda model: setattr(model.a, "data", torch.zeros(3, 4)),
    "longer": lambda model: setattr(model.a, "data", torch.zeros(700, 64)),
}


@pytest.mark.parametrize(
    ("name", "change", "steps"),
    pairs(["RadiusAdamW", "ScapeAdamS", "AdamS", "SeparateAdam", "TagcAdamW"], CHANGES, [0, 4]),
)
def test_parameters_that_were_converted_afterwards_are_refused_in_words(monkeypatch, name, change, steps):
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)
    torch.manual_seed(0)
    model = MemoryNet()
    optimizer = by_name[name].make(model.parameters())
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
        optimizer.step()
    for p in model.parameters():
        p.grad = None
    CHANGES[change](model)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(p.dtype)
    with pytest.raises(TypeError, match="when the optimizer was made: make the optimizer after"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["step"] == steps


@pytest.mark.parametrize("broken", ["beyond", "before", "descending", "too many"])
def test_positions_left_by_an_interrupted_commit_end_in_words(monkeypatch, broken):
    """Positions of the old momentum are checked before memory is read there."""
    monkeypatch.setenv("COMPOPT_BACKEND", "native")
    ranks = Ranks(1, MemoryNet, lambda params, **o: compopt.ScapeAdamS(params, density=0.1, density_steps=0, **o))
    train(ranks, 3)
    (bucket,) = ranks.optimizers[0]._buckets
    (i,) = [i for i, compressed in enumerate(bucket.compressed) if compressed]
    positions = bucket.cache["momentum_mask"].positions
    held = positions[i]
    positions[i] = {
        "beyond": held + 70 * 64,
        "before": held - 70 * 64,
        "descending": held.flip(0),
        "too many": torch.arange(4000, dtype=torch.int32),
    }[broken]
    with pytest.raises((ValueError, RuntimeError), match=r"do not fit its|as the momentum of before"):
        train(ranks, 1)


def test_a_mask_that_changes_between_message_and_commit_ends_in_words(monkeypatch):
    """The commit counts the averaged values that it uses."""
    monkeypatch.setenv("COMPOPT_BACKEND", "native")
    ranks = Ranks(1, MemoryNet, lambda params, **o: compopt.RadiusAdamW(params, density=0.1, dense_steps=1, **o))
    train(ranks, 3)
    encode = NativeOps.encode

    def encode_and_clear(self, bucket, grads, mask, *args, **options):
        message = encode(self, bucket, grads, mask, *args, **options)
        for bits in mask.bits:
            if bits is not None:
                bits.zero_()
        return message

    monkeypatch.setattr(NativeOps, "encode", encode_and_clear)
    with pytest.raises(RuntimeError, match=r"do not fit its 4480 elements"):
        train(ranks, 1)
