"""`python -m compopt.probe`: measures the network and the machines that will train."""

from .planning.link_probe import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
