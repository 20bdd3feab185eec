"""Figures of README.md and bench/RESULTS.md, beside the files in bench/results that have them."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import compopt

ROOT = Path(compopt.__file__).parents[1]
README, RESULTS = (ROOT / name for name in ("README.md", "bench/RESULTS.md"))
Row = dict[str, str]


def read(name: str) -> list[Row]:
    with (ROOT / "bench/results" / name).open() as file:
        return list(csv.DictReader(file))


def tables(page: Path) -> Iterator[list[Row]]:
    """The tables of a page: of each row the text of its cells, by the text of their headings."""
    for lines in re.findall(r"(?:^\|.*\|\n)+", page.read_text(), re.MULTILINE):
        head, _, *rows = [re.sub(r"[*`]", "", line).strip("|\n").split("|") for line in lines.splitlines()]
        yield [dict(zip(map(str.strip, head), map(str.strip, row), strict=True)) for row in rows]


def table(page: Path, *headings: str) -> list[Row]:
    """The only table with these words in its headings."""
    (matching,) = [rows for rows in tables(page) if rows and all(any(h in name for name in rows[0]) for h in headings)]
    return matching


def row_of(rows: list[Row], label: str) -> Row:
    """The first row in which a cell has this label."""
    for row in rows:
        if any(re.search(label, cell) for cell in row.values()):
            return row
    raise AssertionError(f"no row has {label!r}: is it called otherwise now?")


def check(cell: str, expected: str | float | None, place: str, number: int = 0) -> None:
    """The number at this place of the cell is the expected one, rounded to the digits that it has."""
    numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", cell)
    if expected in (None, ""):
        assert "never" in cell or len(numbers) <= number, f"{place}: {cell!r} was not measured"
        return
    text = numbers[number].replace(",", "")
    digits = len(text.partition(".")[2])
    assert abs(float(text) - float(expected)) <= 0.5001 * 10**-digits, f"{place}: {cell!r} is not {expected}"


LADDER = {
    r"^SeparateAdam(\(params\))?$": "SeparateAdam",
    r"(or )?Separate\(MuonAdamW": "Separate(Muon) 16",
    r"LocalSteps\(torch\.optim\.AdamW": "LocalSteps(AdamW) 30, int4, 800",
    r"LocalSteps\(MuonAdamW(\(|\)$|, every=30)": "LocalSteps(Muon) 30, int4, 800",
}


def ladder() -> dict[tuple[str, str], Row]:
    return {(row["size"], row["row"]): row for row in read("ladder.csv") if row["ranks"] == "4"}


def test_the_first_table_of_the_readme_is_of_the_ladder():
    rows = table(README, "wait", "use")
    for label, name in LADDER.items():
        row, kept = row_of(rows, label), ladder()["0.2M", name]
        assert kept["seeds"] == "3"
        for heading, cell in row.items():
            key = next((k for word, k in COLUMNS.items() if word in heading), None)
            if key:
                check(cell, kept[key], f"README, {name}, {heading}")


def test_the_readme_says_what_normuon_gains():
    names = "DDP + NorMuon", "Separate(NorMuon) 16", "LocalSteps(NorMuon) 30, outer momentum 0.8"
    (said,) = re.findall(r"NorMuon .* ends at (.*)\.\n", README.read_text())
    for name, number in zip(names, re.findall(r"\d\.\d+", said), strict=True):
        row = ladder()["0.2M", name]
        assert row["seeds"] == "3"
        check(number, row["to_adamw"], f"README, {name}")


COLUMNS = {"bytes": "bytes_percent", "Muon": "to_muon", "loss": "to_adamw", "AdamW": "to_adamw"}
LINKS = {
    r"^DDP \+ fused AdamW": "ddp",
    r"no communication": "none",
    r"^RadiusAdamW 0\.4": "radius",
    r"^SeparateAdam.*Gaussian": "separate",
    r"^Separate\(AdamS\)": "tracked16",
    r"^ScapeAdamS 0\.01": "scape",
    r"^PowerSGD rank 4": "powersgd",
    r"^PowerSGD rank 32": "powersgd32",
    r"^naive top-k 0\.01": "topk",
}
RATES = {"loopback": "unshaped", "10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}


def test_steps_over_links():
    rows = table(RESULTS, "step", "loopback")
    kept = {(row["rate"], row["method"]): row for row in read("links.csv")}
    for label, method in LINKS.items():
        row = row_of(rows, label)
        for heading, rate in RATES.items():
            check(row[heading], kept[rate, method]["to_ddp"], f"{method}, {heading}")
        for heading in (heading for heading in row if heading.startswith("MB per step")):
            sent = float(kept["100mbit", method]["socket_bytes"]) / 1e6
            check(row[heading], sent, f"{method}, {heading}")


def test_steps_of_tagc_over_links():
    kept = {(r["rate"], r["method"]): r for name in ("links-updates.csv", "links-tagc.csv") for r in read(name)}
    labels = {"float32": "", "bfloat16$": "bf16", "int4": "int4"}
    for label, name in labels.items():
        row = row_of(table(RESULTS, "step", "loopback"), f"^TagcAdamW 0.0125, .*{label}")
        for heading in ("1 Gbit/s", "100 Mbit/s"):
            check(row[heading], kept[RATES[heading], f"tagc0.0125{name}"]["to_ddp"], f"{label}, {heading}")


RUNS = {
    r"^SeparateAdam rank 16": "SeparateAdam tracked 16, int8",
    r"^PowerSGD rank 4": "PowerSGD rank 4",
    r"^RadiusAdamW 0\.4": "RadiusAdamW 0.4",
    r"^SeparateAdam 16, Gaussian": "SeparateAdam 16",
    r"^ScapeAdamS 0\.01": "ScapeAdamS 0.01",
}


def test_losses_and_seconds_of_the_older_runs():
    rows, kept = table(RESULTS, "last loss"), {r["run"]: r for r in read("time_to_loss-100mbit.csv")}
    kind = {"width": "128", "bf16": "False", "ranks": "2", "steps": "800"}
    quality = {row["run"]: row for row in read("quality.csv") if kind.items() <= row.items()}
    for label, name in RUNS.items():
        row = row_of(rows, label)
        ratio = quality[name]["to_adamw"]
        check(row["loss; x AdamW (0.95 t/p)"], kept[name]["loss"], f"{name}, loss")
        check(row["loss; x AdamW (0.95 t/p)"].partition(";")[2], ratio, f"{name}, x AdamW")
        (seconds,) = [cell for heading, cell in row.items() if "last loss" in heading]
        for part, key in zip(seconds.split(";"), ("seconds", "seconds_to_1.1"), strict=True):
            check(part, kept[name][key], f"{name}, {key}")


def test_seconds_of_the_ladder():
    rows = table(RESULTS, "final loss", "10 Mbit/s")
    kept = {(row["rate"], row["row"]): row for row in read("time_to_loss-0.2M.csv")}
    labels = {r"^DDP \+ AdamW$": "DDP + AdamW", r"^DDP \+ Muon$": "DDP + Muon"}
    labels |= {r"^Separate\(Muon": "Separate(Muon) 16", r"^LocalSteps\(Muon\)": "LocalSteps(Muon) 30, int4, 800"}
    labels |= {r"^DDP \+ NorMuon$": "DDP + NorMuon", r"^Separate\(NorMuon": "Separate(NorMuon) 16"}
    labels |= {r"^LocalSteps\(NorMuon\)": "LocalSteps(NorMuon) 30, outer momentum 0.8"}
    labels |= {r"^LocalSteps\(NorMuon, every=140": "LocalSteps(NorMuon) 140", r"^SeparateAdam$": "SeparateAdam"}
    for label, name in labels.items():
        row = row_of(rows, label)
        for heading, rate in (("10 Mbit/s", "10mbit"), ("100 Mbit/s", "100mbit"), ("1 Gbit/s", "1gbit")):
            line, place = kept[rate, name], f"{name}, {heading}"
            check(row[heading], line["run_seconds"], place)
            if "(never)" in row[heading]:
                assert line["seconds_to_adamw"] == "", place
            elif "(" in row[heading]:
                check(row[heading], line["seconds_to_adamw"], place, 1)
            check(row["final loss"], line["loss"], place)
            check(row["bytes"], line["bytes_percent"], place)


def test_the_seconds_of_the_readme():
    """Until DDP + AdamW's final loss, which DDP + AdamW has at its end."""
    rows = table(README, "10 Mbit/s", "final loss")
    kept = {(row["rate"], row["row"]): row for row in read("time_to_loss-0.2M.csv")}
    labels = {r"^DDP \+ AdamW$": "DDP + AdamW", r"^DDP \+ NorMuon": "DDP + NorMuon"}
    labels |= {r"^Separate\(Muon": "Separate(Muon) 16", r"^LocalSteps\(Muon": "LocalSteps(Muon) 30, int4, 800"}
    labels |= {"^the same with": "LocalSteps(NorMuon) 30, outer momentum 0.8"}
    for label, name in labels.items():
        row, key = row_of(rows, label), "run_seconds" if name == "DDP + AdamW" else "seconds_to_adamw"
        for heading, rate in (("10 Mbit/s", "10mbit"), ("100 Mbit/s", "100mbit"), ("1 Gbit/s", "1gbit")):
            check(row[heading], kept[rate, name][key], f"README, {name}, {heading}")
        check(row["final loss"], kept["100mbit", name]["loss"], f"README, {name}")
        check(row["bytes"], kept["100mbit", name]["bytes_percent"], f"README, {name}")


def test_losses_by_size():
    """Means, and in brackets the ranges over seeds."""
    names = {r"^DDP \+ Muon$": "DDP + Muon", r"^SeparateAdam$": "SeparateAdam", r"^Separate\(Muon": "Separate(Muon) 16"}
    names |= {
        r"^LocalSteps\(Muon\)": "LocalSteps(Muon) 30, int4, 800",
        r"^LocalSteps\(Muon, .*140": "LocalSteps(Muon) 140",
    }
    names |= {r"^LocalSteps\(AdamW\)": "LocalSteps(AdamW) 30, int4, 800"}
    names |= {r"^DDP \+ NorMuon$": "DDP + NorMuon", r"^Separate\(NorMuon\)": "Separate(NorMuon) 16"}
    names |= {r"^Separate\(NorMuon, rank=32": "Separate(NorMuon) 32, int8"}
    names |= {
        r"^LocalSteps\(NorMuon\)": "LocalSteps(NorMuon) 30, outer momentum 0.8",
        r"^the same, averaged end": "LocalSteps(NorMuon) 30, outer momentum 0.8",
        r"^LocalSteps\(NorMuon, .*140": "LocalSteps(NorMuon) 140",
    }
    sizes = {f"{int(row['parameters']) / 1e6:.2g} M": size for (size, _), row in ladder().items()}
    rows = table(RESULTS, "run", "0.18 M, x Muon", "0.86 M, x AdamW")
    for label, name in names.items():
        for heading, cell in row_of(rows, label).items():
            if " M, x " not in heading or cell in ("", "1"):
                continue
            kept, place = ladder()[sizes[re.match(r"[\d.]+ M", heading)[0]], name], f"{name}, {heading}"
            key = "to_muon" if "Muon" in heading else "to_adamw"
            key = f"averaged_{key}" if "averaged" in label else key
            check(cell, kept[key], place)
            assert ("one seed" in cell) == (kept["seeds"] == "1"), place
            if "(" in cell:
                check(cell, kept[f"{key}_range"], place, 1)


STEPS = {
    r"^AdamS$": "AdamS",
    r"^RadiusAdamW 0\.4$": "RadiusAdamW 0.4, sparse",
    r"^ScapeAdamS 0\.01$": "ScapeAdamS 0.01",
    r"^ScapeAdamS 0\.1$": "ScapeAdamS 0.1",
    r"^SeparateAdam 16, Gaussian$": "SeparateAdam 16",
    r"^AdamW, foreach$": "AdamW, foreach",
}
NEW_STEPS = {
    r"^RadiusAdamW 0\.4, int8$": "RadiusAdamW 0.4, int8, sparse",
    r"^SeparateAdam, the default$": "SeparateAdam",
    r"^TagcAdamW$": "TagcAdamW",
    r"^Average": "Average(AdamW), int8",
    r"^LocalSteps": "LocalSteps(AdamW), a sync each step",
}


def test_step_alone():
    rows = table(RESULTS, "10 M, earlier, AVX2")
    kept = {(row["isa"], row["row"]): row for row in read("step.csv") if row["parameters"] == "10M"}
    for label, name in STEPS.items():
        for heading, isa in (("10 M", "avx512"), ("10 M, earlier, AVX2", "avx2")):
            check(row_of(rows, label)[heading], kept[isa, name]["to_adamw"], f"{name}, {heading}")
    for label, name in NEW_STEPS.items():
        check(row_of(rows, label)["10 M"], kept["avx512", name]["to_adamw"], name)


def test_memory_and_launches():
    rows, kept = table(RESULTS, "saved state"), {(r["optimizer"], r["ranks"]): r for r in read("memory.csv")}
    for label, name in ((r"^AdamS", "AdamS"), (r"^LocalSteps", "LocalSteps, AdamW")):
        for cell, key in zip(list(row_of(rows, label).values())[1:], ("saved", "beside", "most"), strict=True):
            check(cell, kept[name, "2"][key], f"{name}, {key}")
    rows, counted = table(RESULTS, "a steady step"), {row["row"]: row for row in read("launches.csv")}
    for label, name in ((r"^AdamS", "AdamS"), (r"^SeparateAdam rank 16", "tracked 16, int8"), ("Tagc", "TAGC .0125")):
        row = row_of(rows, label)
        for heading, key in (("launches", "launches"), ("host waits", "waits")):
            check(row[heading], counted[name][key], f"{name}, {heading}")


def test_steps_and_kernels_on_one_gpu():
    rows = table(RESULTS, "124 M: ms", "355 M: ms")
    for size in ("124M", "355M"):
        kept, second = read(f"gpu-steps-{size}.csv"), False
        for row, line in zip(rows, kept, strict=True):
            name = next(iter(row.values()))
            second |= "second machine" in name
            assert line["row"].split(" (second")[0] in name and ("second machine" in line["row"]) == second
            check(row[f"{size[:-1]} M: ms"], line["ms"], f"{size}, {name}")
            if size == "124M":
                check(row["bytes"], line["state_B"], f"{name}, kept bytes")
                check(row["bytes"], line["peak_B"], f"{name}, bytes at most", 1)
    (text,) = re.findall(r"^\*\*Kernels\*\*.*?\n\n", RESULTS.read_text(), re.MULTILINE | re.DOTALL)
    kernels = {row["kernel"]: row for row in read("gpu-kernels.csv")}
    for name in ("copy", "pack_bits", "unpack_bits"):
        check(re.search(rf"{name}`? ([\d.]+)", text)[1], kernels[name]["ms"], name)


def test_a_figure_that_is_not_in_the_file_is_seen():
    check("0.79 (2 runs)", "0.794", "here")
    check("1,961 (1,343)", 1342.6, "here", 1)
    check("never", "", "here")
    with pytest.raises(AssertionError, match="is not"):
        check("0.79", "0.796", "here")
    with pytest.raises(AssertionError, match="not measured"):
        check("162", "", "here")
    with pytest.raises(AssertionError, match="no row has"):
        row_of([{"a": "b"}], "c")
