"""Arguments, tables and pictures of all scripts: rows are dicts, printed in columns, kept as CSV in results/.

python bench/_table.py                              # the names of the tables that are kept
python bench/_table.py quality run steps loss       # one of them, these columns (default: all)
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
Columns = Mapping[str, tuple[str, str]]  # key: heading, format of the number, which begins with its width


def make_parser(doc: str, option: str, rows: Iterable[str], default: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A parser that shows the script's docstring, and whose ``option`` chooses rows, by default all of them."""
    cli = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = dict(metavar="ROW", choices=rows, default=list(default or rows))
    cli.add_argument(option, nargs="+", help="a wrong name lists them", **listed)
    return cli


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(
    path: Path,
    rows: Iterable[Row],
    fields: Sequence[str] | None = None,
    digits: Mapping[str, int] | None = None,
    keep: Sequence[str] = (),
) -> None:
    """Write rows as CSV, with these columns or those of the first row, numbers rounded to ``digits``.

    ``keep``: columns that name a row. Rows of the file whose names are not among the new ones stay in front.
    """
    rows = [row | {k: round(row[k], n) for k, n in (digits or {}).items() if row.get(k)} for row in rows]
    names = {tuple(str(row[key]) for key in keep) for row in rows}
    old = [row for row in read_rows(path) if tuple(row[key] for key in keep) not in names] if keep else []
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields or list(rows[0]), restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows([*old, *rows])


def print_rows(rows: Sequence[Row], columns: Columns, name: str, width: int = 40) -> None:
    """Print a line a row: its name, then numbers under headings; a dash where there is none."""
    widths = [max(len(head) + 1, len(format(0, form))) for head, form in columns.values()]
    heads = [head.rjust(n) for (head, _), n in zip(columns.values(), widths, strict=True)]
    print(f"{name:<{width}}{''.join(heads)}")
    for row in rows:
        cells = [
            "-".rjust(n) if row.get(key) in (None, "") else format(row[key], form).rjust(n)
            for (key, (_, form)), n in zip(columns.items(), widths, strict=True)
        ]
        print(f"{row[name]:<{width}}{''.join(cells)}", flush=True)


@contextlib.contextmanager
def drawing(
    path: Path, columns: int = 1, size: tuple[float, float] = (9, 5.5), dpi: int = 130, **options: Any
) -> Iterator[tuple]:
    """A figure and the list of its axes, without frames; saved as PNG when the context ends."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, columns, figsize=size, squeeze=False, layout="constrained", **options)
    for axis in panels.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    yield figure, list(panels.flat)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def color(number: int) -> Any:
    """The number's color of twenty; dark ones first."""
    import matplotlib.pyplot as plt

    return plt.get_cmap("tab20")(2 * number % 20 + 2 * number // 20 % 2)


def show_kept(name: str, *columns: str) -> None:
    """Print a table of results/ as it is in its file."""
    rows = read_rows(RESULTS / f"{name}.csv")
    heads = columns or tuple(rows[0])
    widths = {head: max(len(head), *(len(row[head]) for row in rows)) for head in heads}
    for row in [dict(zip(heads, heads, strict=True)), *rows]:
        print("  ".join(row[head].ljust(widths[head]) for head in heads).rstrip())


if __name__ == "__main__":
    names = sys.argv[1:]
    show_kept(*names) if names else print(*sorted(path.stem for path in RESULTS.glob("*.csv")), sep="\n")
