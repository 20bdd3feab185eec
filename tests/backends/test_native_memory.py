"""Checks of memory before C may read it: dtype, layout, device, length; positions and masks while it does."""

from __future__ import annotations

import pytest
import torch
from sim import Ranks
from table import CASES, by_name
from test_backends import assert_same
from torch import nn

import compopt
from compopt._ops.native import build, passes
from compopt._ops.native.native_ops import NativeOps
from compopt._ops.operations import Ops
from compopt._state import bits as _bits
from compopt._state.masks import Mask

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="needs a C compiler")
N = 5000


@pytest.fixture
def ops() -> NativeOps:
    return NativeOps()


@pytest.fixture
def bucket():
    random = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(50, 100, generator=random)) for _ in range(2)]
    for p in params:
        p.grad = torch.randn(50, 100, generator=random)
    return compopt.ScapeAdamS(params)._buckets[0]


def test_a_tensor_becomes_an_address_only_as_it_will_be_read():
    x = torch.zeros(4, 6)
    assert passes.address("x", x, 24) == x.data_ptr() and passes.address("x", None, 24) == 0
    assert passes.address("x", torch.zeros(0), 0) != 0
    assert passes.address_in_turn("x", x, [3, 0, 5]) == [x.data_ptr() + 4 * before for before in (0, 3, 3)]
    for wrong in (x.double(), x.t(), x[:, :3], x[:2], x.to("meta")):
        with pytest.raises(
            ValueError, match=r"reads 24 contiguous elements of torch.float32 on the CPU as x, and number"
        ):
            passes.address("x", wrong, 24)
    with pytest.raises(ValueError, match=r"reads 25 contiguous .* number 0 is torch.float32 of shape \(4, 6\)"):
        passes.address_in_turn("x", x, [20, 5])


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


class Net(nn.Module):
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

    def model() -> Net:
        net = Net().to(own)
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


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["RadiusAdamW", "ScapeAdamS", "AdamS", "SeparateAdam", "TagcAdamW"])
def test_parameters_that_were_converted_afterwards_are_refused_in_words(monkeypatch, name, change, steps):
    monkeypatch.delenv("COMPOPT_BACKEND", raising=False)
    torch.manual_seed(0)
    model = Net()
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
    """Where the momentum of before is said to be is not trusted with memory."""
    monkeypatch.setenv("COMPOPT_BACKEND", "native")
    ranks = Ranks(1, Net, lambda params, **o: compopt.ScapeAdamS(params, density=0.1, density_steps=0, **o))
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
    ranks = Ranks(1, Net, lambda params, **o: compopt.RadiusAdamW(params, density=0.1, dense_steps=1, **o))
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
