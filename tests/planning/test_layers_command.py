"""`compopt-advise --tensor`, and the probe that measures layers: what they say, and mistakes told in sentences."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout

import pytest
from ranks import run_ranks

from compopt.costmodel import COMPRESSORS, LayerCosts, Layers, advise_layers
from compopt.planning.advise_command import main
from compopt.planning.probe import read_layer_probe
from compopt.probe import main as measure


def asked(line: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        main(line.split())
    return out.getvalue()


COMMAND = (
    "--tensor 4 --pipeline 2 --hidden 4096 --layers 32 --sequence 2048 --micro-batch 4 --inside 2.4tbit --link 10gbit"
)


def test_the_command_says_where_every_number_is_from():
    text = asked(COMMAND)
    assert text == asked(COMMAND)
    assert "8 micro-batches a step (assumed) of 4 x 2048 tokens, 2 bytes a number" in text
    assert "tensor parallelism of 4, over 2.4 Tbit/s a rank (given) and 10 us a message (assumed);" in text
    assert "stages: 2, over 10 Gbit/s a rank (given) and 50 us a message (assumed);" in text
    assert "(assumed: a100, name another with --device)" in text
    flops = 8 * Layers(4096, 32, 2048, 4, 8).flops  # of a step, over two stages of four ranks at 40 % of an A100's peak
    assert f"a rank computes {flops / 8 / (0.4 * 312e12):.3g} s a step (assumed: a100" in text
    given = asked(f"{COMMAND} --step-time 900 --device h100 --micro-batches 16 --activation-bytes 4")
    assert "a rank computes 900 ms a step (given)" in given and "16 micro-batches a step (given)" in given
    assert "4 bytes a number" in given and "(assumed: h100)" in given
    assert "bandwidth given" in asked(f"{COMMAND} --memory-bandwidth 1T")
    assert "compressors at 1 TB/s" in asked(f"{COMMAND} --memory-bandwidth 1T")
    assert text.startswith("Use Quantize, 4 both ways") and "\n> Quantize, 4 both ways" in text
    assert "and 30 ms a message (assumed: --wan)" in asked(f"{COMMAND} --wan")
    assert "and 2 ms a message (given)" in asked(f"{COMMAND} --latency 2")
    assert "as they are" in asked(f"{COMMAND} --loss-budget 0") and "Use " in asked(f"{COMMAND} --loss-budget 0.9")


FILE = {
    "tensor": 4, "pipeline": 2, "activation_bytes": 4, "local": [1e10, 1e11, 2e11],
    "link_bits_per_s": 1e9, "latency_s": 1e-4, "inside_bits_per_s": 1e11, "inside_latency_s": 1e-5,
    "costs": {"alpha": 1e-12, "beta": 1e-9, "gamma": 1e-10, "constant": 1e-4, "threshold": 1000},
}  # fmt: skip


def test_a_probes_file_is_all_of_the_machine(tmp_path):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(FILE))
    sizes = "--hidden 256 --layers 8 --sequence 64 --micro-batch 4"
    text = asked(f"--probed {path} --tensor 4 {sizes}")
    work = Layers(256, 8, 64, 4, 8, 4)
    took = 1e-12 * work.flops * 8 / 2  # alpha is of the four ranks of a layer together
    assert f"a rank computes {1e3 * took:.3g} ms a step (measured)" in text
    assert (
        "1 Gbit/s a rank (measured) and 100 us a message (measured)" in text and "100 Gbit/s a rank (measured)" in text
    )
    assert "compressors at 0.01 TB/s, 0.1 and 0.2 TFLOP/s in float32 and 16 bits (measured)" in text
    assert "2 Gbit/s a rank (given)" in asked(f"--probed {path} --tensor 4 --link 2gbit {sizes}")
    named = asked(f"--probed {path} --tensor 4 --device h100 {sizes}")
    assert "step (assumed: h100)" in named and "bits (assumed: h100)" in named
    assert read_layer_probe(str(path))["costs"] == LayerCosts(**FILE["costs"])


def probe(rank, path):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank)}
    measure(["--layers", "--tensor", "1", "--hidden", "64", "--tokens", "32", "--out", f"{path}/one.json"])
    return list(os.listdir(path)) if rank == 0 else []


def probe_two(rank, path):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    measure(["--layers", "--tensor", "2", "--hidden", "64", "--tokens", "32", "--out", f"{path}/two.json"])


def test_the_probe_measures_links_inside_and_between_stages(tmp_path):
    run_ranks(probe, 3, str(tmp_path))  # three stages: the last has no neighbour of its own
    run_ranks(probe_two, 2, str(tmp_path))
    stages, inside = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert (stages["tensor"], stages["pipeline"], inside["tensor"], inside["pipeline"]) == (1, 3, 2, 1)
    assert "inside_bits_per_s" not in stages and "link_bits_per_s" not in inside
    assert min(stages["link_bits_per_s"], inside["inside_bits_per_s"]) > 1e6
    for results in (stages, inside):
        costs = LayerCosts(**results["costs"])
        assert costs.alpha > 0 and costs.gamma > 0 and costs.threshold >= 1 and min(results["local"]) > 0
    assert LayerCosts(**inside["costs"]).beta > 0
    asked = read_layer_probe(str(tmp_path / "one.json"))
    advice = advise_layers(Layers(64, 6, 32, 1, 3, asked.pop("activation_bytes")), **asked)
    assert len(advice.rows) == 1 + len(COMPRESSORS) and "measured" in str(advice)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--tensor 2", "The layers are missing: give --hidden, --layers, --sequence and --micro-batch."),
        ("--hidden 64 --parameters 1M --ranks 2 --link 1gbit --step-time 1", "--hidden is for activations"),
        (f"{COMMAND} --plot x.png", "--plot is for advice on gradients"),
        (f"{COMMAND} --ranks 8", "--ranks is for advice on gradients"),
        (f"{COMMAND} --tensor 3", "tensor must divide the width, 4096; got 3."),
        (f"{COMMAND} --pipeline 0", "pipeline must be at least 1; got 0."),
        (f"{COMMAND} --tensor 0", "tensor must be at least 1; got 0."),
        (f"{COMMAND} --pipeline 64 --micro-batches 64", "pipeline must be no more than the 32 layers"),
        (f"{COMMAND} --micro-batches 1", "and the 1 micro-batches of a step; got 2."),
        (f"{COMMAND} --micro-batches 9999", "pipeline times micro_batches must be at most 16384"),
        (f"{COMMAND} --micro-batch 0", "micro_batch must be a positive number; got 0."),
        (f"{COMMAND} --activation-bytes 3", "activation_bytes must be 2 or 4; got 3."),
        (f"{COMMAND} --step-time 0", "compute_s must be positive and finite; got 0.0."),
        (f"{COMMAND} --step-time inf", "compute_s must be positive and finite; got inf."),
        (f"{COMMAND} --loss-budget nan", "loss_budget must be a share such as 0.01; got nan."),
        ("--tensor 2 --hidden 64 --layers 2 --sequence 8 --micro-batch 1", "inside_bits_per_s is missing"),
        ("--pipeline 2 --hidden 64 --layers 2 --sequence 8 --micro-batch 1", "link_bits_per_s is missing"),
        (f"{COMMAND} --probed nowhere.json", "--probed nowhere.json cannot be read: No such file or directory."),
    ],
)  # fmt: skip
def test_a_mistake_is_a_sentence(line, words):
    error = io.StringIO()
    with redirect_stderr(error), pytest.raises(SystemExit):
        main(line.split())
    message = error.getvalue().splitlines()[-1]
    assert words in message and "Traceback" not in error.getvalue()


def test_a_file_that_is_none_or_of_another_grid_is_a_sentence(tmp_path):
    path = tmp_path / "layers.json"
    sizes = "--hidden 256 --layers 8 --sequence 64 --micro-batch 4"
    for text, words in (
        ('{"ranks": 2}', "is not what compopt.probe --layers writes"),
        (json.dumps(FILE | {"costs": {"alpha": 1}}), "is not what compopt.probe --layers writes"),
        (json.dumps(FILE), "was measured with --tensor 4."),
        (json.dumps(FILE | {"tensor": 2, "costs": FILE["costs"] | {"alpha": -1.0}}), "compute_s must be positive"),
    ):
        path.write_text(text)
        error = io.StringIO()
        with redirect_stderr(error), pytest.raises(SystemExit):
            main(f"--probed {path} --tensor 2 {sizes}".split())
        assert words in error.getvalue(), text
    with pytest.raises(ValueError, match="device must be one of"):
        advise_layers(Layers(4096, 32, 2048, 4, 16), tensor=1, pipeline=1, device="abacus")
