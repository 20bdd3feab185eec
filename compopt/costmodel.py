"""The cost of a training step, and what compression would change. Plain numbers in, plain
numbers out.

- `advise` says which optimizer to use: it predicts a step and a run with every method, and goes by
  the losses that were measured.
- `advise_layers` says whether to compress activations of tensor- and pipeline-parallel layers.
- `speedup` is equation 3 of MCBench, with its constants in `LayerCosts`.
"""

from .planning.activation_advice import Layers, LayersAdvice, advise_layers
from .planning.advice import Advice, advise
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
    "speedup",
]
