"""`compopt-advise --tensor`: what it says, and mistakes told in sentences."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import compopt
from compopt.costmodel import Layers, advise_layers
from compopt.planning.advise_command import main

ROOT = Path(compopt.__file__).parent


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


def test_advice_on_activations_has_one_entry():
    """The files that count bytes and predict steps are imported by ``activation_advice`` and each other alone."""
    inner = {"activation_costs", "layer_prediction"}
    paths = [path for path in ROOT.rglob("*.py") if path.stem not in {*inner, "activation_advice"}]
    assert len(paths) > 100 and not [p.name for p in paths if any(f"{name} import" in p.read_text() for name in inner)]


FILE = {"ranks": 2, "link_bits_per_s": 1e9, "latency_s": 1e-4, "local": [1e10, 1e11], "interference": [0.0, 0.0]}


def test_a_probes_file_is_the_link_between_stages_and_the_speed_of_a_rank(tmp_path):
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(FILE))
    sizes = "--pipeline 2 --hidden 256 --layers 8 --sequence 64 --micro-batch 4"
    text = asked(f"--probed {path} {sizes}")
    assert "stages: 2, over 1 Gbit/s a rank (measured) and 100 us a message (measured)" in text
    assert "compressors at 0.01 TB/s, 0.1 and 156 TFLOP/s in float32 and 16 bits (measured)" in text
    assert "2 Gbit/s a rank (given)" in asked(f"--probed {path} --link 2gbit {sizes}")
    assert "in float32 and 16 bits (assumed: h100)" in asked(f"--probed {path} --device h100 {sizes}")
    faster = asked(f"--probed {path} --memory-bandwidth 1T {sizes}")
    assert "compressors at 1 TB/s, 0.1 and 156 TFLOP/s in float32 and 16 bits (bandwidth given)" in faster


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


def test_a_file_that_is_none_and_a_device_that_is_none_are_sentences(tmp_path):
    path = tmp_path / "probe.json"
    path.write_text('{"ranks": 2}')
    error = io.StringIO()
    with redirect_stderr(error), pytest.raises(SystemExit):
        main(f"--probed {path} --pipeline 2 --hidden 256 --layers 8 --sequence 64 --micro-batch 4".split())
    assert "is not what compopt.probe writes" in error.getvalue()
    with pytest.raises(ValueError, match="device must be one of"):
        advise_layers(Layers(4096, 32, 2048, 4, 16), tensor=1, pipeline=1, device="abacus")
