"""MuonAdamW: which tensor is whose, torch's own two optimizers by hand, checkpoints, ranks, refusals."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conformance import Small, data, loss, through_a_file
from oracles import MuonOracle
from ranks import run_ranks
from sim import Ranks
from test_dcp import OPTIONS as DCP
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import compopt
from compopt._inside.base_state import make_first_state
from compopt._state.tensors import to_local
from compopt.muon import muon, orthogonal
from compopt.muon.orthogonal import cut_rows, make_batches

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch.optim.Muon, of torch 2.9")


def of(shapes: dict[str, tuple[int, ...]], **options) -> dict[str, list[str]]:
    """The names of Muon's and of AdamW's tensors."""
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    listed = compopt.MuonAdamW(named, **options).list_parameters()
    return {name: [line.rpartition(" (")[0] for line in lines] for name, lines in listed.items()}


M, V, C = (8, 6), (8,), (8, 6, 3, 3)  # a matrix, a vector, a convolution

MODELS = {  # names as these models have them: Muon's, AdamW's
    "nanoGPT": (
        {"transformer.h.0.attn.c_attn.weight": M, "transformer.h.11.mlp.c_proj.weight": M},
        {
            "transformer.wte.weight": M,
            "transformer.wpe.weight": M,
            "transformer.h.0.ln_1.weight": V,
            "lm_head.weight": M,
        },
    ),
    "under DDP and torch.compile": (
        {"module._orig_mod.transformer.h.0.attn.c_attn.weight": M},
        {"module._orig_mod.transformer.wte.weight": M, "module._orig_mod.lm_head.weight": M},
    ),
    "Llama": (
        {"layers.0.attention.wq.weight": M, "layers.31.feed_forward.w2.weight": M},
        {"tok_embeddings.weight": M, "layers.0.attention_norm.weight": V, "norm.weight": V, "output.weight": M},
    ),
    "Hugging Face's Llama": (
        {"model.layers.0.self_attn.q_proj.weight": M, "model.layers.0.mlp.down_proj.weight": M},
        {"model.embed_tokens.weight": M, "lm_head.weight": M},
    ),
    "BERT": (  # whose layers have an ``output`` each
        {
            "bert.encoder.layer.0.attention.output.dense.weight": M,
            "bert.encoder.layer.0.output.dense.weight": M,
            "bert.encoder.layer.0.attention.self.query.weight": M,
        },
        {
            "bert.embeddings.word_embeddings.weight": M,
            "bert.embeddings.position_embeddings.weight": M,
            "bert.pooler.dense.weight": M,
            "cls.predictions.decoder.weight": M,
            "classifier.weight": M,
        },
    ),
    "a lecture's GPT, with heads in each layer": (
        {"blocks.0.sa.heads.3.key.weight": M, "blocks.0.sa.proj.weight": M, "blocks.0.ffwd.net.0.weight": M},
        {"token_embedding_table.weight": M, "position_embedding_table.weight": M, "lm_head.weight": M},
    ),
    "ViT": (
        {"blocks.0.attn.qkv.weight": M},
        {"cls_token": (1, 1, 8), "pos_embed": (1, 4, 8), "patch_embed.proj.weight": C, "head.weight": M},
    ),
    "a mixer, of tokens": ({"blocks.0.mlp_tokens.fc1.weight": M}, {"stem.proj.weight": M, "head.weight": M}),
    "embeddings in every layer": (
        {"blocks.0.attn.q.weight": M},
        {"blocks.0.attn.rel_pos_emb.weight": M, "blocks.0.attn.position.weight": M, "blocks.1.value_embeds.weight": M},
    ),
    "examples/train_gpt.py": (
        {"blocks.0.qkv.weight": M, "blocks.3.out.weight": M},
        {"bytes.weight": M, "positions.weight": M, "head.weight": M, "norm.weight": V},
    ),
    "no layers": (
        {"up.weight": M, "multihead_attn.in_proj_weight": M, "out.weight": M},
        {"up.bias": V, "tokens.weight": M, "word_emb.weight": M, "classifier.weight": M, "output.weight": M},
    ),
    "numbered heads, no layers": ({"up.weight": M, "out.weight": M}, {"heads.0.weight": M, "heads.1.weight": M}),
    "numbered embeddings, no layers": ({"up.weight": M, "out.weight": M}, {"embeddings.0.weight": M}),
    "several heads": ({"layers.0.weight": M}, {"heads.0.weight": M, "task_heads.1.fc.weight": M, "logits.weight": M}),
    "other shapes": ({"layers.0.w": M}, {"layers.0.experts": (4, 8, 6), "layers.0.conv": C, "layers.0.gain": ()}),
}


@pytest.mark.parametrize("model", MODELS)
def test_hidden_matrices_are_muons_by_shape_and_name(model):
    muon, adamw = MODELS[model]
    listed = of({**adamw, **muon})
    assert listed == {"Muon": [*muon], "AdamW": [*adamw]}


def test_a_predicate_or_a_group_decides():
    shapes = {"blocks.0.a": M, "blocks.0.b": M, "embed": M}
    assert of(shapes, use_muon=lambda name, p: name == "embed")["Muon"] == ["embed"]
    params = [nn.Parameter(torch.zeros(M)) for _ in range(3)]
    optimizer = compopt.MuonAdamW(
        [{"params": params[:2], "use_muon": True}, {"params": params[2:], "use_muon": False, "lr": 0.5}], lr=0.25
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
    muon, adamw = optimizer.members
    assert muon.param_groups[0]["params"] == params[:2] and adamw.param_groups[0]["params"] == params[2:]
    assert optimizer.list_parameters()["AdamW"] == ["a tensor (8, 6)"]


def test_a_tied_embedding_and_head_counts_once():
    tied, hidden = (nn.Parameter(torch.zeros(M)) for _ in range(2))
    for names in (("mixer.0.w", "wte.weight"), ("wte.weight", "mixer.0.w")):
        named = [(names[0], tied), ("blocks.0.w", hidden), (names[1], tied)]
        optimizer = compopt.MuonAdamW(named)
        assert optimizer.list_parameters() == {"Muon": ["blocks.0.w (8, 6)"], "AdamW": [f"{names[0]} (8, 6)"]}
    assert "1 tensors, 48 elements" in repr(optimizer) and "AdamW: 1 tensors" in repr(optimizer)


def by_hand(model: Small, lr: float = 1e-2):
    matrices = [model.up.weight, model.down.weight, model.idle.weight]
    rest = [model.scale, model.up.bias, model.down.bias, model.idle.bias]
    muon = torch.optim.Muon(
        matrices, lr=lr, weight_decay=0.2, momentum=0.9, nesterov=False, ns_steps=4, adjust_lr_fn="match_rms_adamw"
    )
    return muon, torch.optim.AdamW(rest, lr=lr, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-5)


OPTIONS = dict(weight_decay=0.2, momentum=0.9, nesterov=False, ns_steps=4, betas=(0.8, 0.9), eps=1e-5)


OFF = {"normalize": None, "muon_beta2": 0.95}  # which torch's has not
ROUNDING = 0.03  # of an update, where one iteration is in bfloat16 and the other in float32; 0.013 was measured
DTYPES = [torch.bfloat16, torch.float32]  # of the iteration, on devices that have units for bfloat16 and on others


@needs_muon
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)])
def test_it_is_torchs_two_optimizers_up_to_the_rounding_of_bfloat16(lr, dtype, monkeypatch):
    monkeypatch.setattr(muon, "choose_dtype", lambda device: dtype)
    torch.manual_seed(0)
    model = Small()
    other, start = copy.deepcopy(model), copy.deepcopy(model)
    optimizer, two = compopt.MuonAdamW(model.named_parameters(), lr, **OPTIONS), by_hand(other, lr)
    for t in range(5):
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        assert optimizer.step(lambda: (value := loss(model, 0, t)).backward() or value).requires_grad  # noqa: B023
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = copy.deepcopy(p.grad)
        for each in two:
            each.step()
    for p, q, before in zip(model.parameters(), other.parameters(), start.parameters(), strict=True):
        if p.ndim == 2 and p.grad is not None:
            assert (q - before).norm() > 0 and (p - q).norm() < ROUNDING * (q - before).norm()
        else:
            assert torch.equal(p, q)
    ours, torchs = optimizer.members[0].state_dict(), two[0].state_dict()
    names = ["up.weight", "down.weight", "idle.weight"]
    assert ours["param_groups"] == [torchs["param_groups"][0] | {"param_names": names} | OFF]
    assert all(torch.equal(ours["state"][i]["momentum_buffer"], torchs["state"][i]["momentum_buffer"]) for i in (0, 1))
    assert ours["state"].keys() == torchs["state"].keys() == {0, 1}
    two[0].load_state_dict(ours)
    optimizer.members[0].load_state_dict(torchs)


SHAPES = {  # of a tensor, and what its rows are: how many matrices, or the rows of each
    "wide": ((6, 8), True),
    "wide too": ((6, 8), True),
    "tall": ((8, 6), 1),
    "a tall one in bfloat16's place": ((8, 6), True),
    "square": ((8, 8), True),
    "q, k and v": ((18, 8), 3),
    "heads": ((32, 6), 4),
    "grouped queries": ((12, 8), (8, 2, 2)),
    "a gate, queries and keys": ((22, 8), [6, 8, 2, 6]),
    "experts": ((5, 8, 6), True),
    "experts of two matrices": ((2, 12, 8), 2),
    "experts of two unequal matrices": ((2, 14, 8), (8, 6)),
    "a row": ((1, 8), True),
    "a column": ((8, 1), True),
    "a large one": ((40, 50), True),
}
ROWS = {
    name: rows if isinstance(rows, tuple | list) else (shape[-2] // int(rows),) * int(rows)
    for name, (shape, rows) in SHAPES.items()
}


ZEROS = {"wide": 2, "tall": 5, "a large one": slice(3, 9), "grouped queries": slice(8, 10), "q, k and v": slice(18)}


def draw_gradients(t: int) -> dict[str, torch.Tensor | None]:
    """One tensor has none at one step; there are rows and matrices of zeros, and later a whole tensor."""
    torch.manual_seed(t)
    grads: dict[str, torch.Tensor | None] = {name: torch.randn(shape) for name, (shape, _) in SHAPES.items()}
    for name, rows in ZEROS.items():
        if name != "q, k and v" or t < 2:
            grads[name][rows] = 0
    return grads | ({"tall": None} if t == 1 else {})


def step_beside_the_oracle(params: dict[str, torch.Tensor], steps: int, **options):
    """The optimizer and the oracle, after so many steps on the same gradients."""
    named = {name: nn.Parameter(p.clone()) for name, p in params.items()}
    normalize = options.pop("normalize")
    oracle = MuonOracle([*params.values()], [*ROWS.values()], normalize=normalize is not None, **options)
    options.pop("is_corrected", None)
    optimizer = compopt.MuonAdamW(
        named.items(), use_muon=lambda name, p: SHAPES[name][1], normalize=normalize, **options
    )
    for t in range(steps):
        grads = draw_gradients(t)
        for name, p in named.items():
            p.grad = None if grads[name] is None else grads[name].to(p.dtype)
        oracle.step([p.grad for p in named.values()])
        optimizer.step()
    return optimizer, named, dict(zip(named, oracle.params, strict=True)), oracle


@pytest.mark.parametrize(("normalize", "most"), [(None, 2**26), (None, 100), ("rows", 2**26), ("rows", 100)])
def test_matrices_in_batches_are_stepped_by_the_definition(normalize, most, monkeypatch):
    """In float64, of all shapes at once; a batch of at most so many elements."""
    monkeypatch.setattr(muon, "BATCH", most)
    monkeypatch.setattr(muon, "choose_dtype", lambda device: torch.float64)
    torch.manual_seed(0)
    params = {name: torch.randn(shape, dtype=torch.float64) for name, (shape, _) in SHAPES.items()}
    options = dict(lr=0.1, weight_decay=0.3, momentum=0.8, ns_steps=4, normalize=normalize)
    optimizer, named, wanted, oracle = step_beside_the_oracle(params, 4, is_corrected=True, **options)
    torch.testing.assert_close({name: p.detach() for name, p in named.items()}, wanted, rtol=1e-7, atol=1e-7)
    for p, variances in zip(named.values(), oracle.variances, strict=True):
        if normalize:
            torch.testing.assert_close(optimizer.state[p]["second_momentum_buffer"].squeeze(-1), variances)
        else:
            assert optimizer.state[p].keys() == {"momentum_buffer"}


@pytest.mark.parametrize("normalize", [None, "rows"])
@pytest.mark.parametrize(
    ("of_params", "iteration", "allowed"),
    [(torch.float32, torch.float32, 1e-3), (torch.float32, None, 0.06), (torch.bfloat16, None, 0.06)],
)
def test_in_other_dtypes_they_are_near_the_definition(of_params, iteration, allowed, normalize, monkeypatch):
    """By how far all steps moved a tensor. The iteration is in float32, or what this machine takes."""
    if iteration:
        monkeypatch.setattr(muon, "choose_dtype", lambda device: iteration)
    params = {name: torch.zeros(shape, dtype=of_params) for name, (shape, _) in SHAPES.items()}
    options = dict(lr=0.1, weight_decay=0.0, nesterov=False, normalize=normalize)
    optimizer, named, wanted, _ = step_beside_the_oracle(params, 4, **options)
    for name, p in named.items():
        moved = wanted[name].norm()
        assert (p - wanted[name]).norm() < allowed * moved, name
        if normalize:
            assert optimizer.state[p]["second_momentum_buffer"].shape == (*p.shape[:-1], 1)
            assert optimizer.state[p]["second_momentum_buffer"].dtype == of_params


def test_a_step_under_autocast_iterates_in_its_own_dtype(monkeypatch):
    monkeypatch.setattr(muon, "choose_dtype", lambda device: torch.float32)
    p, q = (nn.Parameter(torch.zeros(6, 8)) for _ in range(2))
    p.grad = q.grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    for one, autocasts in ((p, False), (q, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
            compopt.MuonAdamW([one], use_muon=lambda name, p: True).step()
    assert torch.equal(p, q)


def test_a_batch_has_one_shape_and_its_transpose_and_is_not_too_large():
    shapes = [(6, 8), (6, 8), (3, 4), (8, 6), (6, 8), (8, 6), (200, 4), (200, 4)]
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    batches = make_batches([one for p in params for one in cut_rows(p, (p.shape[0],))], 200)
    number = {p: i for i, p in enumerate(params)}
    assert [[[number[one.p] for one in side] for side in batch] for batch in batches] == [
        [[2]],
        [[6]],
        [[7]],
        [[0, 1, 4], [3]],
        [[5]],
    ]


@pytest.mark.parametrize("rule", ["original", None, "match_rms_adamw"])
@needs_muon
def test_a_group_may_scale_updates_in_torchs_other_way(rule, monkeypatch):
    monkeypatch.setattr(muon, "choose_dtype", lambda device: torch.bfloat16)
    params = [nn.Parameter(torch.ones(shape)) for shape in ((8, 6), (6, 8))]
    others = copy.deepcopy(params)
    optimizer = compopt.MuonAdamW([{"params": params, "use_muon": True, "adjust_lr_fn": rule}], lr=0.1)
    torchs = torch.optim.Muon(others, lr=0.1, adjust_lr_fn=rule)
    for p, q in zip(params, others, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    optimizer.step()
    torchs.step()
    torch.testing.assert_close(params, others, rtol=2e-3, atol=2e-3)
    with pytest.raises(ValueError, match="adjust_lr_fn must be"):
        compopt.MuonAdamW([{"params": params, "use_muon": True, "adjust_lr_fn": "both"}])


def test_tensors_of_two_dtypes_in_a_group_are_stepped_as_alone():
    params = [nn.Parameter(torch.ones(6, 8, dtype=dtype)) for dtype in DTYPES]
    alone = copy.deepcopy(params)
    torch.manual_seed(0)
    for p, q in zip(params, alone, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
        compopt.MuonAdamW([{"params": [q], "use_muon": True}], lr=0.1, normalize="rows").step()
    compopt.MuonAdamW([{"params": params, "use_muon": True}], lr=0.1, normalize="rows").step()
    assert all(map(torch.equal, params, alone))


def test_the_iteration_is_in_bfloat16_where_a_device_has_units_for_it(monkeypatch):
    def choose(device: str, machine: str = "x86_64", onednn: bool = True, avx: bool = False, amx: bool = False):
        monkeypatch.setattr("platform.machine", lambda: machine)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        monkeypatch.setattr(orthogonal, "onednn_takes_bfloat16", lambda: onednn)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation: avx and not including_emulation
        )
        return orthogonal.choose_dtype(torch.device(device))

    assert choose("cpu", avx=True) == choose("cpu", amx=True) == torch.bfloat16
    assert choose("cpu") == choose("cpu", avx=True, onednn=False) == torch.float32  # which emulates it, or has none
    assert choose("cpu", "aarch64") == torch.bfloat16 and choose("cpu", "aarch64", onednn=False) == torch.float32
    assert choose("cuda", avx=True) == torch.bfloat16 and choose("cuda") == torch.float32
    assert choose("xpu") == torch.bfloat16


def test_defaults_are_those_of_the_measured_runs():
    optimizer = compopt.MuonAdamW(Small().named_parameters())
    muon, adamw = optimizer.param_groups
    wanted = dict(lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ns_steps=5, adjust_lr_fn="match_rms_adamw")
    wanted |= OFF
    assert {name: muon[name] for name in wanted} == wanted
    assert (adamw["lr"], adamw["betas"], adamw["eps"], adamw["weight_decay"]) == (1e-3, (0.9, 0.95), 1e-8, 0.1)


def test_groups_keep_their_options_and_what_users_add():
    named = [("blocks.0.w", nn.Parameter(torch.zeros(M))), ("blocks.0.b", nn.Parameter(torch.zeros(V)))]
    group = {"params": named, "lr": 0.5, "momentum": 0.8, "betas": (0.7, 0.8), "eps": 1e-4, "rank": 4, "name": "first"}
    given = dict(group)
    muon, adamw = compopt.MuonAdamW([group]).param_groups
    assert group == given
    assert (muon["lr"], muon["momentum"], muon["rank"], muon["name"]) == (0.5, 0.8, 4, "first")
    assert (adamw["lr"], adamw["betas"], adamw["eps"], adamw["rank"], adamw["name"]) == (
        0.5,
        (0.7, 0.8),
        1e-4,
        4,
        "first",
    )
    assert "betas" not in muon and muon["eps"] == 1e-7 and "momentum" not in adamw and "use_muon" not in muon
    assert muon["param_names"] == ["blocks.0.w"] and adamw["param_names"] == ["blocks.0.b"]


def test_a_new_group_is_divided_and_known_tensors_are_refused():
    first, second, bias = (nn.Parameter(torch.zeros(shape)) for shape in (M, M, V))
    optimizer = compopt.MuonAdamW([("blocks.0.w", first)])
    assert [len(member.param_groups) for member in optimizer.members] == [1, 0]
    optimizer.add_param_group({"params": [("blocks.1.w", second), ("blocks.1.b", bias)], "lr": 0.5})
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [(1, 1e-3), (1, 0.5), (1, 0.5)]
    with pytest.raises(ValueError, match=r"blocks\.1\.b \(8,\) in more than one group"):
        optimizer.add_param_group({"params": [("blocks.1.b", bias)]})
    with pytest.raises(ValueError, match="more than one group"):
        compopt.MuonAdamW([{"params": [("a.0.w", first)]}, {"params": [("wte", first)]}])
    assert len(optimizer.param_groups) == 3


def test_what_it_cannot_step_is_refused_by_name():
    matrix, vector = nn.Parameter(torch.zeros(M)), nn.Parameter(torch.zeros(V))
    with pytest.raises(ValueError, match=r"a tensor \(8, 6\) without a name.*model\.named_parameters\(\)"):
        compopt.MuonAdamW([matrix, vector])
    assert compopt.MuonAdamW([vector]).param_groups[0]["params"] == [vector]
    with pytest.raises(ValueError, match=r"use_muon chooses b \(8,\)"):
        compopt.MuonAdamW([("b", vector)], use_muon=lambda name, p: True)
    with pytest.raises(TypeError, match=r"use_muon chooses w \(8, 6\), which is complex"):
        compopt.MuonAdamW([("w", torch.zeros(M, dtype=torch.complex64))], use_muon=lambda name, p: True)
    for parts in ((4, 3), [8, 1], (4, -4, 8), (True, 7)):
        with pytest.raises(
            ValueError, match=rf"use_muon returns {re.escape(repr(parts))} for w \(8, 6\): return the rows"
        ):
            compopt.MuonAdamW([("w", matrix)], use_muon=lambda name, p, parts=parts: parts)
    assert compopt.MuonAdamW([("w", matrix)], use_muon=lambda name, p: [8.0]).members[0].rows == {}
    for parts in (3, -2):
        with pytest.raises(ValueError, match=rf"use_muon returns {parts} for w \(8, 6\), whose 8 rows are not so many"):
            compopt.MuonAdamW([("w", matrix)], use_muon=lambda name, p, parts=parts: parts)
    with pytest.raises(ValueError, match="maximize must be False"):
        compopt.MuonAdamW([{"params": [nn.Parameter(torch.zeros(3))], "maximize": True}])
    with pytest.raises(ValueError, match="params is empty"):
        compopt.MuonAdamW([])
    with pytest.raises(TypeError, match="got a Tensor"):
        compopt.MuonAdamW(matrix)
    with pytest.raises(TypeError, match="got a set"):
        compopt.MuonAdamW([{"params": {matrix}}])
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        compopt.MuonAdamW([("a", 3)])
    bad = dict(lr=-1.0, weight_decay=-1.0, momentum=-1.0, eps=-1.0, betas=(1.0, 0.5), ns_steps=100)
    for name, value in bad.items():
        with pytest.raises(ValueError):
            compopt.MuonAdamW([("blocks.0.w", matrix), ("b", vector)], **{name: value})
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got -2"):
        compopt.MuonAdamW([{"params": [("blocks.0.w", matrix)], "momentum": -2}])


def train(model, optimizer, steps) -> None:
    for t in steps:
        optimizer.zero_grad()
        (loss(model, 0, t) + model.idle(data(0, t, torch.float32)).square().mean()).backward()
        optimizer.step()


def in_parts(name: str, p: torch.Tensor) -> bool | tuple[int, ...]:
    if name == "up.weight":
        return (p.shape[0] - 3, 1, 2)
    return p.ndim == 2


def make(model: Small, lr: float = 1e-2) -> compopt.MuonAdamW:
    return compopt.MuonAdamW(model.named_parameters(), lr, use_muon=in_parts, normalize="rows", muon_beta2=0.8)


def trained() -> tuple[Small, compopt.MuonAdamW]:
    torch.manual_seed(0)
    model = Small()
    optimizer = make(model)
    train(model, optimizer, range(4))
    return model, optimizer


def test_checkpoints_and_copies_go_on_to_the_bit():
    model, optimizer = trained()
    saved = through_a_file(optimizer.state_dict())
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1, 2], [3, 4, 5, 6]]
    loaded = copy.deepcopy(model)
    resumed = make(loaded, lr=0.7)
    resumed.load_state_dict(saved)
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer))), (loaded, resumed)]
    train(model, optimizer, range(4, 8))
    for net, one in copies:
        train(net, one, range(4, 8))
        assert all(map(torch.equal, net.parameters(), model.parameters()))
        assert one.list_parameters() == optimizer.list_parameters()
        one.add_param_group({"params": [("more.weight", nn.Parameter(torch.zeros(M)))]})
        assert one.list_parameters()["Muon"][-1] == "more.weight (8, 6)"
    with pytest.raises(ValueError, match="groups of"):
        compopt.MuonAdamW([("blocks.0.w", nn.Parameter(torch.zeros(M)))]).load_state_dict(saved)


def test_a_scheduler_and_a_gradscaler_take_it_as_one_optimizer():
    model, optimizer = trained()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for t in range(3):
        optimizer.zero_grad()
        scaler.scale(loss(model, 0, t)).backward()
        scaler.unscale_(optimizer)
        if t == 1:
            model.up.bias.grad[3] = float("nan")
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(torch.ones(()))
            before = model.up.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if t == 1:
            assert torch.equal(before, model.up.weight)
    assert len({group["lr"] for group in optimizer.param_groups}) == 1 and optimizer.param_groups[0]["lr"] < 1e-2


@pytest.mark.parametrize("around", [compopt.Average, compopt.Separate, compopt.LocalSteps])
def test_its_checkpoint_goes_on_inside_a_class_that_averages(around):
    model, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    wrapped = around(make(other))
    wrapped.load_state_dict(saved)
    train(model, optimizer, range(4, 7))
    train(other, wrapped, range(4, 7))  # one process: nothing is averaged
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("around", [None, compopt.Average, compopt.LocalSteps])
def test_a_checkpoint_without_normalized_rows_begins_them_and_leaves_the_options(around):
    """One that torch's Muon wrote, or an older release of this class."""
    model, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in (*saved["state"].values(), *optimizer.state.values()):
        entry.pop("second_momentum_buffer", None)
    for group in saved["param_groups"]:
        for name in OFF:
            group.pop(name, None)
    other = copy.deepcopy(model)
    inside = make(other, lr=0.7)
    resumed = inside if around is None else around(inside)
    resumed.load_state_dict(saved)
    assert (inside.param_groups[0]["normalize"], inside.param_groups[0]["muon_beta2"]) == ("rows", 0.8)
    train(model, optimizer, range(4, 6))
    train(other, resumed, range(4, 6))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_consolidated_momenta_and_mean_squares_of_rows_are_means_over_ranks():
    def local(params, process_group):
        inside = compopt.MuonAdamW([(f"layers.{i}", p) for i, p in enumerate(params)], normalize="rows")
        return compopt.LocalSteps(inside, every=5, dense_steps=0, growth_steps=0, process_group=process_group)

    ranks = Ranks(2, Small, local)
    ranks.train(loss, 3)
    states = [optimizer.base.state[model.up.weight] for _, model, optimizer in ranks]
    wanted = {name: (a + states[1][name]) / 2 for name, a in states[0].items()}
    assert wanted.keys() == {"momentum_buffer", "second_momentum_buffer"}
    assert not torch.equal(wanted["momentum_buffer"], states[0]["momentum_buffer"])
    ranks.world.consolidate(ranks.optimizers)
    for state in states:
        torch.testing.assert_close(dict(state), wanted)


@pytest.mark.parametrize("how", DCP)
def test_torchs_checkpoint_functions_bring_everything_back(how, alone, tmp_path):
    model, optimizer = trained()
    options = StateDictOptions(**DCP[how])
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other = copy.deepcopy(model)
    resumed = make(other, lr=0.7)
    state = {"optimizer": get_optimizer_state_dict(other, resumed, options=options)}
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, resumed, optim_state_dict=state["optimizer"], options=options)
    assert [group["lr"] for group in resumed.param_groups] == [1e-2, 1e-2]
    train(model, optimizer, range(4, 8))
    train(other, resumed, range(4, 8))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def with_settings(optimizer: compopt.MuonAdamW, dtype: torch.dtype) -> compopt.MuonAdamW:
    """As it is on a rank whose device has this dtype's units."""
    muon = optimizer.members[0]
    muon.__class__ = type("Muon", (type(muon),), {"settings": muon.settings | {"iteration in": [str(dtype)]}})
    return optimizer


@pytest.mark.parametrize("name, options", [("Average", {}), ("LocalSteps", {"dense_steps": 3})])
def test_ranks_that_orthogonalize_otherwise_are_refused_where_they_have_to_step_alike(name, options):
    def make(params, process_group):
        inside = compopt.MuonAdamW([(f"layers.{i}", p) for i, p in enumerate(params)])
        inside = with_settings(inside, DTYPES[process_group.rank])
        return getattr(compopt, name)(inside, process_group=process_group, **options)

    ranks = Ranks(2, Small, make)
    ranks.backward(loss)
    with pytest.raises(ValueError, match=r"Muon, iteration in: rank 0 has .*bfloat16.*, rank 1 has .*float32"):
        ranks.world.step(ranks.optimizers)


def test_in_rounds_ranks_may_orthogonalize_otherwise():
    def make(params, process_group):
        inside = compopt.MuonAdamW([(f"layers.{i}", p) for i, p in enumerate(params)])
        inside = with_settings(inside, DTYPES[process_group.rank])
        options = dict(dense_steps=0, growth_steps=0, process_group=process_group)
        return compopt.LocalSteps(inside, every=2, **options)

    ranks = Ranks(2, Small, make)
    ranks.train(loss, 4)
    assert all(map(torch.equal, *(model.parameters() for model in ranks.models)))


# Real ranks


class Shards(nn.Module):
    """Tensors that FSDP2 shards over two ranks: evenly, unevenly, and so that one rank has nothing."""

    def __init__(self):
        super().__init__()
        shapes = {
            "even": (32, 48),
            "uneven": (7, 4),
            "tall": (48, 32),
            "row": (1, 48),
            "qkv": (6, 5),
            "grouped": (9, 5),
        }
        shapes |= {"experts": (3, 4, 7), "expert": (1, 8, 6), "halves": (3, 6, 7), "vector": (5,)}
        for number, (name, shape) in enumerate(shapes.items()):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + step)
        return sum((p * torch.randn(p.shape, generator=generator)).sum() for p in self.parameters())


def of_shards(model: Shards) -> compopt.MuonAdamW:
    parts = {"vector": 0, "qkv": 3, "grouped": (4, 2, 2, 1), "halves": (4, 2)}
    return compopt.MuonAdamW(
        model.named_parameters(), lr=0.1, use_muon=lambda name, p: parts.get(name, 1), normalize="rows"
    )


def step_shards(model: Shards) -> compopt.MuonAdamW:
    optimizer = of_shards(model)
    for step in range(3):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    return optimizer


def on_two(rank: int) -> tuple[bool, dict[str, bool], bool]:
    """Are DDP's replicas equal; FSDP2's tensors, and their state, as whole ones stepped by one rank?"""
    torch.manual_seed(0)
    net = Small()
    ddp = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = compopt.MuonAdamW(ddp.named_parameters(), lr=1e-2)
    for t in range(4):
        optimizer.zero_grad()
        x = data(rank, t, torch.float32)
        (ddp(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([p.detach().view(-1) for p in net.parameters()])
    of_rank_0 = flat.clone()
    dist.broadcast(of_rank_0, 0)

    sharded, whole = fully_shard(Shards()), Shards()
    optimizer = step_shards(sharded)
    reference = step_shards(whole)
    state = get_optimizer_state_dict(sharded, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    same = {
        name: torch.equal(p.full_tensor(), q)
        and (
            rank > 0
            or name == "vector"
            or all(torch.equal(state[name][key], value) for key, value in reference.state[q].items())
        )
        for (name, p), q in zip(sharded.named_parameters(), whole.parameters(), strict=True)
    }
    return torch.equal(flat, of_rank_0), same


def test_ddp_averages_for_it_and_fsdp2s_shards_are_stepped_as_a_whole():
    for is_equal, same in run_ranks(on_two, 2):
        assert is_equal and all(same.values()), same


def gathered_shapes(rank: int) -> list[tuple[int, ...]]:
    shapes = []
    gather = muon.gather_whole
    muon.gather_whole = lambda p, local: shapes.append(tuple(p.shape)) or gather(p, local)
    step_shards(fully_shard(Shards()))
    return shapes


def test_experts_that_are_whole_on_a_rank_are_not_gathered():
    for shapes in run_ranks(gathered_shapes, 2):
        assert shapes.count((32, 48)) == 3 and not any(len(shape) == 3 for shape in shapes)


def describe_state(state: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {
        name: (x.shape, to_local(x).shape, x.dtype, getattr(x, "placements", None))
        for name, x in state.items()
        if name != "step"
    }


def first_states(rank: int) -> tuple[list[Any], list[Any]]:
    """Return the state before the first step, which only rank 0 makes, and that of the steps."""
    model = fully_shard(Shards())
    optimizer, first = of_shards(model), []
    if rank == 0:
        groups = optimizer.param_groups
        first = [describe_state(make_first_state(optimizer, p, group)) for group in groups for p in group["params"]]
    stepped = step_shards(model)
    return first, [describe_state(stepped.state[p]) for group in stepped.param_groups for p in group["params"]]


def test_one_rank_alone_makes_the_state_of_shards_before_the_first_step():
    (first, state), _ = run_ranks(first_states, 2)
    assert first == state and len(first) > 5
