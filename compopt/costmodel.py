"""The cost of a training step, and what compression would change. Plain numbers in, plain
numbers out.

- `advise` says which optimizer to use: it predicts a step and a run with every method of `METHODS`,
  and goes by the losses that were measured. `rows_of` gives the predictions alone.
- `advise_layers` says whether to compress activations of tensor- and pipeline-parallel layers.
- `layer_seconds` and `speedup` are equations 1 to 3 of MCBench.
- `fit` and `fit_communication` find the constants of both from measured points.
"""

from .planning.activation_advice import Layers, LayersAdvice, advise_layers
from .planning.advice import Advice, advise
from .planning.hardware import (
    DEVICES,
    Device,
    Machine,
    Speed,
    all_gather_seconds,
    all_reduce_seconds,
)
from .planning.losses import LOSSES, Measurement
from .planning.measurement import Fit, fit, fit_communication
from .planning.methods import METHODS, Cost, Method
from .planning.model_parallel import PAPER, LayerCosts, layer_flops, layer_seconds, speedup
from .planning.prediction import Row, Situation, Step, step_seconds
from .planning.prediction import predict_rows as rows_of
from .planning.workload import Workload

__all__ = [
    "DEVICES",
    "LOSSES",
    "METHODS",
    "PAPER",
    "Advice",
    "Cost",
    "Device",
    "Fit",
    "LayerCosts",
    "Layers",
    "LayersAdvice",
    "Machine",
    "Measurement",
    "Method",
    "Row",
    "Situation",
    "Speed",
    "Step",
    "Workload",
    "advise",
    "advise_layers",
    "all_gather_seconds",
    "all_reduce_seconds",
    "fit",
    "fit_communication",
    "layer_flops",
    "layer_seconds",
    "rows_of",
    "speedup",
    "step_seconds",
]
