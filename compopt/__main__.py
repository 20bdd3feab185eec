"""`python -m compopt`: the package's commands, where scripts are not on the path."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import __version__
from .planning import advise_command, diagnose

COMMANDS = {"advise": advise_command.main, "diagnose": diagnose.main}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the first argument names, with the rest of them."""
    parser = argparse.ArgumentParser(
        prog="python -m compopt", description="Compressed data-parallel optimizers."
    )
    parser.add_argument("--version", action="version", version=f"compopt {__version__}")
    parser.add_argument(
        "command",
        choices=COMMANDS,
        help="advise: what would compression make of a training step? diagnose: what compression "
        "will a training script bear?",
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the command's own; --help lists them"
    )
    options = parser.parse_args(argv)
    COMMANDS[options.command](options.arguments, prog=f"python -m compopt {options.command}")


if __name__ == "__main__":
    main()
