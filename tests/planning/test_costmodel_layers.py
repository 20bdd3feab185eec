"""The cost model of compressed activations: bytes that ranks send, the codecs' work, published steps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from codecs_table import COMPRESSORS, HIDDEN, SHAPE
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from compopt.activations import (
    AutoEncoder,
    Identity,
    MeshRanks,
    PowerSGD,
    Quantize,
    ReceiveCompressed,
    SendCompressed,
    TopK,
    tensor_parallel,
)
from compopt.costmodel import Layers, speedup
from compopt.planning.activation_costs import COMPRESSORS as KINDS
from compopt.planning.activation_costs import Work, crossing_of, exchange_of
from compopt.planning.hardware import DEVICES, Speed
from compopt.planning.layer_prediction import order_1f1b, pipeline_seconds
from compopt.planning.model_parallel import PAPER


def on_meta(make):
    with torch.device("meta"):
        return make()


def handed_over(name: str, mesh) -> dict[str, list[int]]:
    """Bytes that this rank hands to every collective of one all-reduce, and of its backward."""
    sent: dict[str, list[int]] = {"reduced": [], "gathered": []}
    reduce, gather = tensor_parallel._all_reduce, tensor_parallel._all_gather

    def counted(key, call):
        def wrapper(x, *args):
            sent[key].append(x.nbytes)
            return call(x, *args)

        return wrapper

    tensor_parallel._all_reduce = counted("reduced", reduce)
    tensor_parallel._all_gather = counted("gathered", gather)
    try:
        x = torch.randn(SHAPE, requires_grad=True)
        y = COMPRESSORS[name]()(x, MeshRanks(mesh))
        forward = {key: list(calls) for key, calls in sent.items()}
        sent["reduced"].clear()
        y.sum().backward()
        return forward | {"back": sent["reduced"]}
    finally:
        tensor_parallel._all_reduce, tensor_parallel._all_gather = reduce, gather


def crossed(name: str, rank: int) -> int:
    """Bytes that this rank sends over a stage boundary, a step of two micro-batches."""
    pair, sent = dist.new_group([0, 1]), [0]
    isend = dist.isend

    def counted(tensor, *args, **kwargs):
        sent[0] += tensor.nbytes
        return isend(tensor, *args, **kwargs)

    codec, stage = COMPRESSORS[name](), nn.Linear(HIDDEN, HIDDEN)
    beside = {"pair": pair} if codec.straight_through and not codec.fits_payload() else {}
    part = ReceiveCompressed(stage, codec, SHAPE, **beside) if rank else SendCompressed(stage, codec, **beside)
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu")), 2, loss_fn=lambda y, t: y.square().sum())
    x = torch.randn(2 * SHAPE[0], *SHAPE[1:])
    for _ in range(2):  # the first finds out shapes
        dist.isend = dist.distributed_c10d.isend = counted
        sent[0] = 0
        try:
            schedule.step(**{"target": x}) if rank else schedule.step(x)
        finally:
            dist.isend = dist.distributed_c10d.isend = isend
    dist.barrier()  # a stage that is freed before its last gradient has left takes it along
    return sent[0]


def worker(rank):
    mesh = init_device_mesh("cpu", (2,))
    return [
        {name: handed_over(name, mesh) for name in COMPRESSORS},
        {name: crossed(name, rank) for name in COMPRESSORS},
    ]


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(worker, 2)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_bytes_are_those_that_ranks_hand_over(two_ranks, name):
    for exchanged, _ in two_ranks:
        counted = exchange_of(on_meta(COMPRESSORS[name]), SHAPE, torch.float32, 2)
        assert exchanged[name]["reduced"] == list(counted.reduced)
        assert exchanged[name]["gathered"] == list(counted.gathered)
        assert exchanged[name]["back"] == list(counted.reduced_back)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_bytes_across_a_boundary_are_those_that_ranks_send(two_ranks, name):
    counted = crossing_of(on_meta(COMPRESSORS[name]), SHAPE, torch.float32)
    assert [crossed[name] for _, crossed in two_ranks] == [2 * counted.forth, 2 * counted.back]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_codecs_own_formula_says_the_same(name, dtype):
    shape = 2, 64, 96
    codec = KINDS[name].make(128, 96)
    counted = crossing_of(codec, shape, dtype)
    assert counted.forth == codec.bytes(shape, dtype)


def test_counting_touches_neither_the_codec_nor_the_callers_random_numbers():
    before = torch.random.get_rng_state()
    first, again = (exchange_of(KINDS[n].make(64, 32), (2, 32, 32), torch.float32, 4) for n in ("RandomK, 1/10",) * 2)
    assert first == again
    crossing_of(KINDS["PowerSGD, 1/10"].make(64, 32), (2, 32, 32), torch.float32)
    assert torch.equal(before, torch.random.get_rng_state())


FAST = Speed(1e12, 1e13, 1e14)


def test_products_are_counted_in_the_precision_they_are_made_in():
    n, tokens, hidden, code = 2, 64, 96, 10
    one = exchange_of(on_meta(lambda: AutoEncoder(hidden, code)), (n, tokens, hidden), torch.bfloat16, 4)
    assert one.forward.half_flops == 2 * 2 * n * tokens * hidden * code and one.forward.flops == 0
    assert one.backward.half_flops == 4 * 2 * n * tokens * hidden * code
    wide = exchange_of(on_meta(lambda: AutoEncoder(hidden, code)), (n, tokens, hidden), torch.float32, 4)
    assert wide.forward.flops == one.forward.half_flops and wide.forward.half_flops == 0
    factors = exchange_of(on_meta(lambda: PowerSGD(4, hidden)), (n, tokens, hidden), torch.bfloat16, 4)
    m = n * tokens
    assert factors.forward.flops == 2 * m * hidden * 4 + 20 * 4 * m * 4**2  # in float32, and a basis
    assert factors.forward.half_flops == 2 * 2 * m * hidden * 4


def test_what_is_gathered_is_decoded_as_often():
    two, eight = (exchange_of(on_meta(lambda: TopK(0.25)), (2, 64, 96), torch.float32, n) for n in (2, 8))
    elements = 2 * 64 * 96
    # Of each further rank: zeros copied and written (2 x 4 bytes), values and positions widened, clamped and put there.
    assert two.gathered == eight.gathered and two.reduced == ()
    assert (eight.forward.traffic - two.forward.traffic) / 6 >= 8 * elements
    summed = [exchange_of(on_meta(Identity), (2, 64, 96), torch.float32, n) for n in (2, 8)]
    assert summed[0] == summed[1] and summed[0].forward == Work()


def test_seconds_of_work_are_passes_then_products():
    assert Work(2e12, 3e13, 5e14).seconds(FAST) == pytest.approx(2 + 3 + 5)
    with pytest.raises(ValueError, match="half_flops_per_s must be positive"):
        Speed(1.0, 1.0, 0.0)


# MCBench, Table 6: ms a step in which activations of the last 12 layers are encoded and decoded, tensor 4 x pipeline 4,
# 8 micro-batches of (128, 128, 1024) in fp16 on V100. A rank of the last two stages has 6 layers, two exchanges each.
TABLE_6 = {
    "A1": (lambda: AutoEncoder(1024, 50), 8.64 + 16.20),
    "A2": (lambda: AutoEncoder(1024, 100), 12.96 + 20.52),
    "T1": (lambda: TopK(50 / 1024 / 2), 108.00 + 268.92),
    "T2": (lambda: TopK(100 / 1024 / 2), 153.36 + 427.68),
    "P1": (lambda: PowerSGD(48, 1024), 169.96 + 7.53),
    "P2": (lambda: PowerSGD(96, 1024), 405.12 + 10.20),
    "Q1": (lambda: Quantize(2), 90.72 + 304.56),
    "Q2": (lambda: Quantize(4), 85.32 + 271.08),
}
SEQUENCES = 128, 128, 1024
V100 = DEVICES["v100"].speed


def overhead(label: str) -> float:
    """Predicted ms of Table 6's two columns: forward, of a rank of the last two stages."""
    one = exchange_of(on_meta(TABLE_6[label][0]), SEQUENCES, torch.float16, 4)
    return 1e3 * 8 * 6 * 2 * one.forward.seconds(V100)


@pytest.mark.parametrize("label", TABLE_6)
def test_the_overhead_of_every_codec_is_of_the_size_that_was_published(label):
    # Inputs: operations of our codecs and a V100's data sheet, no time of anybody's. Theirs are other programs:
    # PowerSGD in float64, positions in int64. Random-K is left out: theirs samples on the host for a minute.
    assert 1 / 2.5 < overhead(label) / TABLE_6[label][1] < 2.5


def test_only_auto_encoders_are_cheap_to_compute():
    cheap = max(overhead("A1"), overhead("A2"))
    assert all(overhead(label) > 4 * cheap for label in TABLE_6 if label[0] not in "A")


# Table 6, without compression, ms a step: forward, backward, and tensor-parallel communication within forward.
FORWARD, BACKWARD, EXCHANGED = 467.73, 419.26, 91.08


def pretraining(label: str) -> float:
    """Predicted seconds of a step in the paper's pre-training setting; "w/o" or a label of Table 6.

    From measured times of the uncompressed step's computation alone, 10 Gbit/s between nodes, and the codec's own bytes
    and work.
    """
    codec = on_meta(Identity if label == "w/o" else TABLE_6[label][0])
    one, crossing = exchange_of(codec, SEQUENCES, torch.float16, 4), crossing_of(codec, SEQUENCES, torch.float16)
    whole = 2 * 128 * 128 * 1024
    nbytes = (sum(one.reduced) + 4 * sum(one.gathered) / 2) / whole
    tensor = EXCHANGED / 8e3
    forward = [FORWARD / 8e3 - tensor + (1 if stage < 2 else nbytes) * tensor for stage in range(4)]
    backward = [BACKWARD / 8e3] * 4
    for stage in (2, 3):  # the last half of the layers: 6 of 6 here, two exchanges each
        forward[stage] += 12 * one.forward.seconds(V100)
        backward[stage] += 12 * one.backward.seconds(V100)
    for boundary in (1, 2):
        forward[boundary] += crossing.send.seconds(V100)
        forward[boundary + 1] += crossing.receive.seconds(V100)
        backward[boundary + 1] += crossing.receive_back.seconds(V100)
        backward[boundary] += crossing.send_back.seconds(V100)
    link = 10e9 / 8
    forth = [whole / link, crossing.forth / link, crossing.forth / link]
    back = [whole / link, crossing.back / link, crossing.back / link]
    return pipeline_seconds(forward, backward, forth, back, 8)


def test_the_papers_pretraining_gains_what_it_found():
    # Table 6: 1422.40 ms uncompressed, 1242.97 and 1223.20 with auto-encoders of 50 and 100, 1410 with Top-K.
    dense = pretraining("w/o")
    assert dense == pytest.approx(1.4224, rel=0.17)  # 16 % above: every boundary is taken to be waited for
    assert dense / pretraining("A2") == pytest.approx(1422.40 / 1223.20, abs=0.03)
    assert dense / pretraining("A1") == pytest.approx(1422.40 / 1242.97, abs=0.06)  # theirs is slower than A2 is
    assert dense / pretraining("Q1") < 1 and dense / pretraining("Q2") < 1  # theirs take 2.4 and 2.6 s


def test_equation_3_does_not_predict_it():
    # It counts a boundary once a step and no gradient that returns: 7 % in place of 16 %. The paper's alpha as printed
    # puts 1580 TFLOP/s into four V100, three times their peak, and so makes it a factor of two instead.
    layers = (FORWARD + BACKWARD - EXCHANGED) / 8e3 / 6
    a_layer = layers, EXCHANGED / 8e3 / 6
    crossing = 2 * 128 * 128 * 1024 / (10e9 / 8)
    rounds = (8 - 1) / 4 + 1
    overhead_s = overhead("A2") / 8e3 / 6
    dense = rounds * 24 * sum(a_layer) + 3 * crossing
    half = rounds * (24 * sum(a_layer) - 12 * (a_layer[1] * (1 - 100 / 1024) - overhead_s))
    assert dense / (half + crossing * (1 + 2 * 100 / 1024)) == pytest.approx(1.075, abs=0.005)
    printed = speedup(PAPER, hidden=1024, layers=24, nodes=4, batch=1024, micro_batch=128, sequence=128, code=100)
    assert printed > 2
    assert 1 / PAPER.alpha > 3 * 4 * DEVICES["v100"].half_flops_per_s


def test_a_pipeline_runs_one_forward_one_backward():
    assert order_1f1b(2, 3, 2) == [(True, 0), (False, 0), (True, 1), (False, 1)]
    assert order_1f1b(0, 3, 4) == [
        *((True, 0), (True, 1), (True, 2), (False, 0)),
        *((True, 3), (False, 1), (False, 2), (False, 3)),
    ]


def test_seconds_of_a_pipeline():
    assert pipeline_seconds([1.0], [2.0], [], [], 5) == 15
    even = pipeline_seconds([1.0] * 4, [2.0] * 4, [0.0] * 3, [0.0] * 3, 8)
    assert even == (8 + 4 - 1) * 3  # what is known of 1F1B: m + n - 1 micro-batches
    # Two stages, one micro-batch: all in turn.
    assert pipeline_seconds([1.0, 2.0], [3.0, 4.0], [10.0], [20.0], 1) == 1 + 10 + 2 + 4 + 20 + 3
    # A slow link carries one activation after the other: the last leaves at 1 + 3 x 10.
    assert pipeline_seconds([1.0, 1.0], [1.0, 1.0], [10.0], [0.0], 3) == 1 + 30 + 1 + 1 + 1
    # Of three stages the one in the middle sends on and back at once.
    assert pipeline_seconds([1.0] * 3, [1.0] * 3, [4.0] * 2, [4.0] * 2, 3) == 34
    slower = pipeline_seconds([1.0, 1.0], [1.0, 1.0], [10.0], [5.0], 3)
    assert slower > pipeline_seconds([1.0, 1.0], [1.0, 1.0], [10.0], [0.0], 3)


def test_presets_of_a_device_are_shares_of_its_peak():
    device = DEVICES["a100"]
    assert device.speed == Speed(*device.local, 0.5 * 312e12)
    assert all(dataclasses.astuple(d.speed) > (0, 0, 0) for d in DEVICES.values())


def test_an_activation_has_two_or_four_bytes():
    with pytest.raises(ValueError, match="activation_bytes must be 2 or 4; got 3"):
        Layers(64, 2, 32, 2, 2, activation_bytes=3)
