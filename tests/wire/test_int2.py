"""int2 payloads by their definition: levels, scales, how codes lie in bytes, and that what is owed dies out."""

from __future__ import annotations

import pytest
import torch
from problems import replicas, step
from test_int4 import LENGTHS
from test_quantized import answer, payloads

import compopt
from compopt._wire.codec import QuantizedMean
from compopt._wire.payload import Scratch
from compopt._wire.quantization import (
    ROW,
    RowSpan,
    dequantize_rows,
    pack_int2,
    packed_bytes,
    quantize_rows,
    unpack_int2,
)

every_length = pytest.mark.parametrize("n", LENGTHS)


def by_definition(x: torch.Tensor) -> torch.Tensor:
    """Return one row of x as it arrives."""
    x = x.double()
    level = torch.where(x.abs() >= x.square().mean().sqrt(), 3.0, 1.0).double() * torch.where(x < 0, -1.0, 1.0)
    return (x @ level) / (level @ level) * level


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows of x as they arrive, the quantized values, and the rounding errors."""
    quantized, scales, rounding_errors = (
        torch.empty(x.shape, dtype=torch.int8),
        torch.empty(len(x)),
        torch.empty_like(x),
    )
    quantize_rows(x, (RowSpan(0, 0, x.numel()),), quantized, scales, rounding_errors, (), Scratch(), 2)
    return dequantize_rows(quantized, scales, torch.empty_like(x)), quantized, rounding_errors


def gaussian(rows: int) -> torch.Tensor:
    return torch.randn(rows, ROW, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("rows", [1, 511, 512, 513])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_levels_and_scales_are_those_of_the_definition(rows, dtype):
    x = (gaussian(rows) * torch.logspace(-20, 20, rows).unsqueeze(1)).to(dtype)
    got, quantized, rounding_errors = rounded(x)
    wanted = torch.stack([by_definition(row) for row in x])
    assert set(quantized.unique().tolist()) == {-3, -1, 1, 3}
    near = x.abs() - x.double().square().mean(1, keepdim=True).sqrt()  # a last bit may decide which level it is
    clear = (near.abs() > 1e-5 * x.abs()).all(1)
    assert clear.float().mean() > 0.9
    torch.testing.assert_close(got[clear].double(), wanted[clear], rtol=1e-5, atol=0)
    assert ((got + rounding_errors - x).abs() <= 2e-7 * x.abs().amax(1, keepdim=True)).all()


def test_little_of_a_normal_row_is_taken_off_and_never_more_than_there_is():
    x = gaussian(1000)
    _, _, rounding_errors = rounded(x)
    assert float(rounding_errors.square().sum() / x.square().sum()) == pytest.approx(0.1175, abs=0.003)
    odd = torch.zeros(5, ROW)
    odd[0, 3], odd[1, :64], odd[2], odd[3, ::2] = 7.0, 1.0, torch.logspace(-30, 30, ROW), -1.0
    odd[4] = 5.0
    _, _, rounding_errors = rounded(odd)
    assert (rounding_errors.double().norm(dim=1) <= odd.double().norm(dim=1)).all()
    assert rounding_errors[4].abs().max() < 1e-5, "equal values are exact"


def test_rows_out_of_the_ordinary():
    tiny = torch.finfo(torch.float32).tiny
    x = torch.zeros(6, ROW)
    x[1, 5], x[1, 6] = 3e38, 1.0
    x[2], x[3] = tiny / 4, 0.1 * tiny * torch.arange(ROW)
    x[4, 7], x[5, 9] = float("inf"), float("nan")
    got, _, rounding_errors = rounded(x)
    assert not got[0].any() and not rounding_errors[0].any()
    assert got[1].isfinite().all() and got[1, 5] > 1e36
    assert not got[2].any() and torch.equal(rounding_errors[2], x[2])
    torch.testing.assert_close(got[3] + rounding_errors[3], x[3], rtol=1e-3, atol=0)
    assert got[4].isnan().all() and got[5].isnan().all()
    wide, *_ = rounded(x.double() * 1e30)
    assert wide[1].isnan().all(), "beyond float32 it is not finite"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_whose_scale_is_too_small_becomes_zeros(dtype):
    """Its values are normal numbers; the scale, a third of the largest, would not be one."""
    tiny = torch.finfo(torch.float32).tiny
    x = torch.tensor([[2 * tiny], [4 * tiny]], dtype=dtype) * torch.tensor([1, -1] * (ROW // 2), dtype=dtype)
    got, _, rounding_errors = rounded(x)
    assert not got[0].any() and torch.equal(rounding_errors[0], x[0])
    assert got[1].any() and not torch.equal(rounding_errors[1], x[1])


def test_zeros_have_the_level_of_their_sign():
    x = torch.tensor([[5.0, -5.0, 0.0, -0.0] * (ROW // 4)])
    got, quantized, rounding_errors = rounded(x)
    assert quantized.view(-1, 4).unique(dim=0).tolist() == [[3, -3, 1, -1]]
    assert got[0, 2] == -got[0, 3] > 0 and torch.equal(rounding_errors, x - got)


@every_length
def test_four_codes_lie_in_a_byte(n):
    quantized = 2 * torch.randint(-2, 2, (n,), dtype=torch.int8, generator=torch.Generator().manual_seed(n)) + 1
    packed = torch.full((packed_bytes(n, 2),), 99, dtype=torch.int8)
    assert len(packed) == -(-n // 4)
    pack_int2(quantized, packed)
    byte, quarter = packed.view(torch.uint8).tolist(), len(packed)
    assert quantized.tolist() == [2 * (byte[i % quarter] // 4 ** (i // quarter) % 4) - 3 for i in range(n)]
    assert torch.equal(unpack_int2(packed, torch.full((n,), 99, dtype=torch.int8)), quantized)


def test_every_byte():
    packed = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)
    quantized = unpack_int2(packed, torch.empty(1024, dtype=torch.int8))
    back = torch.empty_like(packed)
    pack_int2(quantized, back)
    assert torch.equal(back, packed)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@every_length
def test_the_mean_beside_every_length(n, ranks):
    """Rows that end early are rounded as if what is behind them were not there."""
    lengths = [n, 3]
    sent = payloads(ranks, lengths, bits=2)
    meant = [payload.body.clone() for payload in sent]
    rows = [row for part in meant[0].split(lengths) for row in part.split(ROW) if len(row)]
    if ranks > 1:
        QuantizedMean(sent[0], 0, ranks).encode_for_owners()
        wanted = torch.cat([by_definition(row) for row in rows]).float()
        share = ((meant[0] - sent[0].rounding_errors - wanted).abs() <= 1e-5).float().mean()
        assert share > 0.999, "but for values a last bit from a level's edge"
        sent = payloads(ranks, lengths, bits=2)
    answer(sent)
    assert all(torch.equal(payload.flat, sent[0].flat) for payload in sent)
    lost = torch.stack([payload.rounding_errors for payload in sent]).mean(0)
    torch.testing.assert_close(sent[0].body + lost, torch.stack(meant).mean(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_is_owed_stays_bounded(ranks):
    """The same message sent again and again arrives whole, on average, though one has 2 bits."""
    lengths, residuals, arrived = [1000, 7], None, torch.zeros(1007)
    meant = [payload.body.clone() for payload in payloads(ranks, lengths, bits=2)]
    for _ in range(60):
        sent = payloads(ranks, lengths, bits=2)
        for rank, payload in enumerate(sent):
            payload.body.copy_(meant[rank] if residuals is None else meant[rank] + residuals[rank])
        answer(sent)
        residuals = [payload.rounding_errors.clone() for payload in sent]
        arrived += sent[0].body
    mean = torch.stack(meant).mean(0)
    assert float((arrived / 60 - mean).norm() / mean.norm()) < 0.05
    assert float(torch.stack(residuals).mean(0).norm()) < 3 * float(mean.norm())


@pytest.mark.parametrize("cls", [compopt.RadiusAdamW, compopt.SeparateAdam, compopt.ScapeAdamS, compopt.TagcAdamW])
def test_refused_where_not_all_is_owed(cls):
    with pytest.raises(ValueError, match=r"payload_dtype='int2' is for Average, AdamS and LocalSteps|not for Tagc"):
        cls([torch.nn.Parameter(torch.ones(3))], payload_dtype="int2")


@pytest.mark.parametrize(("payload", "other", "bound"), [("int2", 3, 0.1), ("bfloat16", 0, 1e-4)])
def test_biases_are_owed_as_well(payload, other, bound):
    """Ranks without a compressed tensor: a bias's mean comes whole in the end. bfloat16 is summed in bfloat16; here
    the sum is exact."""

    def make(params, process_group):
        sgd = torch.optim.SGD(params, lr=1.0)
        return compopt.Average(sgd, payload_dtype=payload, process_group=process_group)

    bias = torch.linspace(-1, 1, 10)
    world, params, optimizers = replicas(2, [torch.zeros(10)], make)
    for _ in range(50):
        step(world, params, optimizers, [[bias], [other * bias]])
    torch.testing.assert_close(-params[0][0].detach() / 50, (1 + other) / 2 * bias, rtol=bound, atol=bound)
