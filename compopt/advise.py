"""`compopt-advise`: what compression would make of a training run."""

from .planning.advise_command import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
