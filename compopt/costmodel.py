"""The cost of a training step, and what compression would change. Plain numbers in, plain
numbers out.

- `advise` says which optimizer to use: it predicts a step and a run with every method, and goes by
  the losses that were measured.
- `advise_layers` says whether to compress activations of tensor- and pipeline-parallel layers.
- `speedup` is equation 3 of MCBench; `fit_communication` finds constants from measured points.
"""

from .planning.activation_advice import Layers, LayersAdvice, advise_layers
from .planning.advice import Advice, advise
from .planning.measurement import fit_communication
from .planning.model_parallel import LayerCosts, speedup
from .planning.workload import Workload

__all__ = [
    "Advice",
    "LayerCosts",
    "Layers",
    "LayersAdvice",
    "Workload",
    "advise",
    "advise_layers",
    "fit_communication",
    "speedup",
]
