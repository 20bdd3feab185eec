"""``payload_dtype`` as people write it: a torch.dtype or its name. Groups and checkpoints keep the name."""

from __future__ import annotations

import inspect
from typing import get_args

import conformance
import pytest
import torch
from pairs import name_of
from slow_rows import slow_but
from table import CASES, FORMS

import compopt
from compopt._sharded.zero1_adamw import UPDATE_DTYPES, UpdateDtype
from compopt._wire.codec import PAYLOAD_CODECS

SENDING = [case for case in CASES + FORMS if "payload_dtype" in inspect.signature(case.cls).parameters]
every = pytest.mark.parametrize("case", SENDING, ids=lambda case: case.name)
WRONG = ["torch.int8", "", torch.int32, torch.float8_e4m3fn, torch.complex64, 8, ["int8"]]
NAMES = [name for name in PAYLOAD_CODECS if isinstance(name, str)]


def takes(case, name: str) -> bool:
    if name == "int2":
        return case.cls in (compopt.Average, compopt.LocalSteps)
    return PAYLOAD_CODECS[name].bits is None or not case.sharded


def names_in(optimizer) -> list[object]:
    saved = [group["payload_dtype"] for group in optimizer.state_dict()["param_groups"]]
    return [group["payload_dtype"] for group in optimizer._option_groups] + saved


@pytest.mark.parametrize("case", slow_but(lambda case: case in SENDING[::2], SENDING), ids=lambda case: case.name)
def test_each_name_sends_what_it_says(case):
    bytes_of = {}
    for name in filter(lambda name: takes(case, name), [*NAMES, None]):
        run = conformance.make_ranks(case, 2, payload_dtype=name and getattr(torch, name, name))
        assert set(names_in(run.optimizers[0])) == {name}
        run.train(conformance.loss, 3)
        bytes_of[name] = run.optimizers[0].stats.bytes_sent
    assert bytes_of[None] == bytes_of["float32"] < bytes_of["float64"]
    assert bytes_of["bfloat16"] <= bytes_of["float16"] < bytes_of["float32"]
    assert case.sharded or bytes_of["int8"] < bytes_of["float16"]
    assert "int2" not in bytes_of or bytes_of["int2"] < bytes_of["int4"] < bytes_of["int8"]


@pytest.mark.parametrize(
    ("case", "word"),
    [(case, "flt32") for case in SENDING] + [(SENDING[0], word) for word in WRONG],
    ids=name_of,
)
def test_another_word_is_refused_by_a_list_of_those_there_are(case, word):
    p = torch.nn.Parameter(torch.ones(64, 64))
    with pytest.raises(
        ValueError, match=r"payload_dtype must be None, 'int8', .*'float16', 'bfloat16', 'float32'"
    ) as message:
        case.make([p], payload_dtype=word)
    assert repr(word) in str(message.value) and "torch.dtype of that name" in str(message.value)


def test_a_group_may_have_its_own():
    p, q = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    optimizer = compopt.RadiusAdamW([{"params": [p], "payload_dtype": torch.int8}, {"params": [q]}])
    assert names_in(optimizer) == ["int8", None] * 2
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "payload_dtype": torch.float16})
    assert names_in(optimizer)[2] == "float16"


@every
def test_a_checkpoint_with_either_form_loads(case):
    """A state dict that was edited may hold the torch.dtype."""
    run = conformance.make_ranks(case, 2, payload_dtype="bfloat16")
    run.train(conformance.loss, 5)
    run.world.consolidate(run.optimizers)
    saved = run.optimizers[0].state_dict()
    for group in saved["param_groups"]:
        group["payload_dtype"] = torch.bfloat16
    other = conformance.make_ranks(case, 2)
    for optimizer in other.optimizers:
        optimizer.load_state_dict(conformance.through_a_file(saved))
        assert set(names_in(optimizer)) == {"bfloat16"}
    other.train(conformance.loss, 3)
    other.assert_replicas_equal()


@every
def test_set_by_hand_a_torch_dtype_is_saved_by_its_name_and_ranks_do_not_differ_by_it(case):
    run = conformance.make_ranks(case, 2)
    for optimizer, given in zip(run.optimizers, ("float16", torch.float16), strict=True):
        for group in optimizer._option_groups:
            group["payload_dtype"] = given
    run.train(conformance.loss, 4)
    run.finish_round(conformance.loss)
    run.assert_replicas_equal()
    other = conformance.make_ranks(case, 2, payload_dtype="float16")
    other.train(conformance.loss, 4)
    other.finish_round(conformance.loss)
    assert run.optimizers[0].stats.bytes_sent == other.optimizers[0].stats.bytes_sent
    assert [optimizer.state_dict()["param_groups"][0]["payload_dtype"] for optimizer in run.optimizers] == 2 * [
        "float16"
    ]


def test_update_dtypes_are_those_of_the_annotation():
    (literal,) = [one for one in get_args(UpdateDtype) if get_args(one)]
    assert get_args(literal) == UPDATE_DTYPES
