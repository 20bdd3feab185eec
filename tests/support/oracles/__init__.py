"""Reference implementations written from the papers, to test the optimizers against.

Dense float64 tensors, all ranks in one process, no buckets, no packing, nothing shared with the package under test:
a mistake there cannot hide here. Where a paper is wrong the docstring says what was corrected.
"""

from .average import AverageOracle
from .muon import MuonOracle
from .radius import RadiusOracle
from .scape import AdamSOracle, ScapeOracle
from .separate import SeparateOracle
from .tagc import TagcOracle

__all__ = ["AdamSOracle", "AverageOracle", "MuonOracle", "RadiusOracle", "ScapeOracle", "SeparateOracle", "TagcOracle"]
