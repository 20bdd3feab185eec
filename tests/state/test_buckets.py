"""Buckets: how parameters are dealt to them, in which order, what is compressed, and the memory of payloads."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import compopt
from compopt._state import buckets as _buckets
from compopt._state.bucket import Bucket
from compopt._state.buckets import make_buckets
from compopt._state.layouts import Bits, TensorInfo
from compopt._state.tensors import is_compressed


def group(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **message) -> dict:
    params = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return {
        "params": params,
        "param_names": [f"{dtype}{shape}" for shape in shapes],
        "compress": None,
        "step": 0,
        **message,
    }


def dealt(*groups: dict) -> list[list[str]]:
    return [bucket.names for bucket in make_buckets(groups)]


def test_the_last_parameters_are_in_the_first_bucket_and_names_are_their_own():
    """Backward finishes them first."""
    first, second = group((3,), (4,), (5,)), group((6,), (7,))
    buckets = make_buckets([first, second])
    assert [[tuple(p.shape) for p in bucket.params] for bucket in buckets] == [[(7,), (6,)], [(5,), (4,), (3,)]]
    for bucket in buckets:
        assert [name.endswith(f"{tuple(p.shape)}") for p, name in zip(bucket.params, bucket.names, strict=True)]
        assert all(
            name == f"torch.float32{tuple(p.shape)}" for p, name in zip(bucket.params, bucket.names, strict=True)
        )
    assert [bucket.index for bucket in buckets] == [0, 1]


def test_a_bucket_holds_so_many_bytes_and_a_larger_tensor_alone(monkeypatch):
    monkeypatch.setattr(_buckets, "BUCKET_BYTES", 40)
    shapes = [(100,), (0,), (5,), (5,), (1,), (0,), (0,)]
    assert [[int(name.split("(")[1].rstrip(",)")) for name in names] for names in dealt(group(*shapes))] == [
        [0, 0, 1, 5],
        [5, 0],
        [100],
    ]


def numbered(*shapes: tuple[int, ...]) -> dict:
    return group(*shapes) | {"param_names": [str(i) for i in range(len(shapes))]}


def test_compressed_tensors_of_one_shape_are_neighbours_and_the_others_follow():
    shapes = [(64, 64), (64,), (64, 80), (64, 64), (3,), (64, 80), (80, 64)]
    assert dealt(numbered(*shapes)) == [["6", "5", "2", "3", "0", "4", "1"]]
    assert dealt({**numbered(*shapes), "compress": False}) == [["6", "5", "4", "3", "2", "1", "0"]]


def test_what_is_a_neighbour_is_said_within_a_bucket_only(monkeypatch):
    monkeypatch.setattr(_buckets, "BUCKET_BYTES", 4 * 3 * 64 * 64)
    shapes = [(64, 64), (64, 63), (64, 64)] * 2
    assert dealt(numbered(*shapes)) == [["5", "3", "4"], ["2", "0", "1"]]


class Mesh:
    shape = (2,)


def shards(rank: int, *shapes: tuple[int, ...]) -> dict:
    """A rank's part of tensors whose rows are cut over two."""
    cut = numbered(*shapes)
    for p in cut["params"]:
        p.to_local = lambda p=p: p.chunk(2)[rank]
        p.device_mesh, p.placements = Mesh, (Shard(0),)
    return cut


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_have_one_order_though_their_shards_are_of_unlike_shapes(rank):
    """Of 129, 130 and 131 rows rank 0 has 65, 65 and 66, rank 1 64, 65 and 65."""
    (bucket,) = make_buckets([shards(rank, (129, 64), (131, 64), (130, 64), (129, 64))])
    assert bucket.names == ["3", "0", "2", "1"] and bucket.lengths == [
        64 * n for n in [(65, 65, 65, 66), (64, 64, 65, 65)][rank]
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_cut_and_join_alike_though_their_shards_are_of_unlike_sizes(monkeypatch, rank):
    """Of five rows rank 0 has three, rank 1 two."""
    tensors = shards(rank, *[(5, 64)] * 6)
    monkeypatch.setattr(_buckets, "BUCKET_BYTES", 2 * 4 * 3 * 64)
    assert dealt(tensors) == [["5", "4"], ["3", "2"], ["1", "0"]]
    joined = make_buckets([tensors], bytes_sent=lambda bucket: bucket.numel / 8)  # 48 of 96 bytes on both
    assert [b.names for b in joined] == [["5", "4", "3", "2"], ["1", "0"]]


def test_buckets_are_joined_while_they_send_less_than_is_worth_a_message(monkeypatch):
    monkeypatch.setattr(_buckets, "BUCKET_BYTES", 16 * 40)
    monkeypatch.setattr(_buckets, "DEVICE_BUCKET_BYTES", 40)
    monkeypatch.setattr(_buckets, "JOINED_PART_ON_CPU", 1 / 16)
    tensors = numbered(*[(160,)] * 7)

    def joined(*sent: float) -> list[list[str]]:
        each = dict(zip("6543210", sent, strict=True))
        return [b.names for b in make_buckets([tensors], bytes_sent=lambda bucket: each[bucket.names[0]])]

    assert joined(*[10] * 7) == [["6", "5", "4", "3"], ["2", "1", "0"]]
    assert joined(30, 11, 29, 41, 1, 1, 1) == [["6"], ["5", "4"], ["3"], ["2", "1", "0"]]
    assert joined(*[41] * 7) == dealt(tensors) == [[name] for name in "6543210"]
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert _buckets.bucket_bytes(cpu) == 16 * 40 and _buckets.bucket_bytes(meta) == 40


def test_on_devices_they_are_joined_until_they_send_as_much_as_parameters_are_in_one(monkeypatch):
    monkeypatch.setattr(_buckets, "DEVICE_BUCKET_BYTES", 640)
    tensors = numbered(*[(160,)] * 5)
    tensors["params"] = [nn.Parameter(torch.empty(160, device="meta")) for _ in range(5)]
    assert dealt(tensors) == [[name] for name in "43210"]
    assert [b.names for b in make_buckets([tensors], bytes_sent=lambda _: 320)] == [["4", "3"], ["2", "1"], ["0"]]


def test_tensors_of_one_shape_are_neighbours_in_joined_buckets_too(monkeypatch):
    monkeypatch.setattr(_buckets, "BUCKET_BYTES", 4 * 64 * 80)
    monkeypatch.setattr(_buckets, "JOINED_PART_ON_CPU", 1 / 16)  # 1280 bytes are sent, some 130 of each tensor
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(64, 64), (64, 80)] * 5]
    names = [f"{i}" for i in range(10)]
    optimizer = compopt.SeparateAdam(zip(names, params, strict=True), rank=1, simulate=True)
    assert [bucket.names for bucket in optimizer._buckets] == [[*"975318642"], ["0"]]
    assert [b.names for b in compopt.AdamS(zip(names, params, strict=True))._buckets] == [[n] for n in "9876543210"]


def test_the_state_of_neighbours_is_one_tensor_and_what_lies_elsewhere_is_copied():
    params = [nn.Parameter(torch.zeros(64, 64)) for _ in range(4)]
    (bucket,) = compopt.SeparateAdam(params, rank=2, simulate=True)._buckets
    residuals = bucket.state["residual"]
    for number, e in enumerate(residuals):
        e.fill_(number)
    stack = bucket.stack_state("residual", range(1, 4))
    assert stack.shape == (3, 64, 64) and stack.data_ptr() == residuals[1].data_ptr()
    assert stack[:, 5, 7].tolist() == [1, 2, 3]
    stack[1].fill_(9.0)
    assert residuals[2].eq(9.0).all() and residuals[1].eq(1.0).all()
    for order in ([0, 2, 1, 3], [3, 2, 1, 0], [0, 1, 3]):  # in the first both ends are where they would be
        bucket.state["residual"] = [residuals[i] for i in order]
        copy = bucket.stack_state("residual", range(len(order)))
        assert all(torch.equal(x, residuals[i]) for x, i in zip(copy, order, strict=True))
    bucket.state["residual"] = residuals
    assert bucket.stack_state("residual", range(2, 3)).data_ptr() == residuals[2].data_ptr()


def test_tensors_of_unlike_dtypes_are_apart():
    mixed = group((3,), (4,))
    mixed["params"][0] = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    assert {bucket.dtype for bucket in make_buckets([mixed])} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    ("shape", "option", "compressed"),
    [((64, 64), None, True), ((4095, 1), None, False), ((5000,), None, False), ((64, 64), False, False),
     ((3,), True, True), ((64, 64), True, True), ((1, 4096), None, True)],
)  # fmt: skip
def test_what_is_compressed(shape, option, compressed):
    assert is_compressed(torch.zeros(shape), {"compress": option}) == compressed


def test_what_is_frozen_is_in_no_bucket_unless_it_is_asked_for():
    some = group((3,), (4,), (5,))
    some["params"][1].requires_grad_(False)
    assert dealt(some) == [["torch.float32(5,)", "torch.float32(3,)"]]
    assert [bucket.names for bucket in make_buckets([some], included={some["params"][1]})] == [["torch.float32(4,)"]]


def one(dtype: torch.dtype, *shapes: tuple[int, ...], index: int = 0) -> Bucket:
    of = group(*shapes, dtype=dtype)
    return Bucket(index, of, of["params"], of["param_names"])


def test_payloads_are_of_the_dtype_that_is_asked_for():
    bucket = one(torch.float32, (3, 4))
    assert bucket.make_payload([12], None).flat.dtype == torch.float32
    assert bucket.make_payload([12], torch.bfloat16).flat.dtype == torch.bfloat16
    again = bucket.make_payload([12], None)  # as many elements, in other memory
    assert again.flat.dtype == torch.float32 and len(again.body) == 12
    assert one(torch.bfloat16, (3, 4)).make_payload([12], torch.int8).flat.dtype == torch.float32


def test_payloads_of_one_step_have_memory_and_random_numbers_of_their_own():
    bucket, other = one(torch.float32, (3, 4)), one(torch.float32, (3, 4), index=1)
    payloads = [bucket.make_payload([12], torch.int8), bucket.make_payload([12], torch.int8, use=1)]
    assert payloads[0].flat.data_ptr() != payloads[1].flat.data_ptr()
    assert payloads[0].rounding_errors.data_ptr() != payloads[1].rounding_errors.data_ptr()
    payloads.append(other.make_payload([12], torch.int8))
    bucket.group["step"] = 1
    payloads.append(bucket.make_payload([12], torch.int8))
    assert len({payload.seed for payload in payloads}) == 4


def test_a_payload_of_another_size_frees_the_memory_of_the_last_one():
    bucket = one(torch.float32, (3, 4))
    dense = weakref.ref(bucket.make_payload([12], None).flat.untyped_storage())
    assert bucket.make_payload([12], None).flat.untyped_storage() is dense()
    sparse = bucket.make_payload([4], torch.bfloat16).flat
    assert dense() is None and sparse.untyped_storage().nbytes() == 2 * sparse.numel()


def test_a_tensor_is_present_where_any_rank_has_a_gradient():
    bucket = one(torch.float32, (3,), (4,), (5,))
    payload = bucket.make_payload([5, 4, 3], None)
    payload.header.copy_(torch.tensor([0.0, 1.0 / 64, 1.0]))
    assert payload.have_gradients == [False, True, True]


def test_a_mask_has_whole_bytes():
    assert [Bits().numel(TensorInfo(torch.zeros(n), True)) for n in (0, 1, 8, 9, 4225)] == [0, 1, 1, 2, 529]


def test_momentum_on_a_mask_of_another_size_gets_memory_of_that_size():
    p, q = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 64))
    (bucket,) = compopt.ScapeAdamS([p, q])._buckets
    first = bucket.resize_state("exp_avg", [10, 30])
    second = bucket.resize_state("exp_avg", [30, 10])  # as many in all
    assert [view.numel() for view in first] == [10, 30] and [view.numel() for view in second] == [30, 10]
    assert bucket.resize_state("exp_avg", [30, 10]) is second


def test_masters_keep_what_parameters_cannot_hold_and_follow_what_is_set_from_outside():
    p = nn.Parameter(torch.ones(64, 65, dtype=torch.bfloat16))
    optimizer = compopt.RadiusAdamW([p], lr=1e-2, dense_steps=0, simulate=True)
    (bucket,) = optimizer._buckets
    master = optimizer.state[p]["master"]
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(master, master.bfloat16().float()) and torch.equal(master.bfloat16(), p)
    fine = master.clone()
    bucket.update_masters()
    assert torch.equal(master, fine)
    with torch.no_grad():
        p.fill_(3.0)
    bucket.update_masters()
    assert (master == 3.0).all()
