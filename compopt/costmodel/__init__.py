"""What a training step costs, and what compression would make of it. Plain numbers in, plain
numbers out.

Two models, what follows from them, and the fit that gives both their constants:

- `model_parallel`: activations of tensor- and pipeline-parallel layers, equations 1 to 3 of
  MCBench;
- `data_parallel`: gradients averaged inside the optimizer, one row of `METHODS` an optimizer;
- `advise`: what to use, by the second of these and the losses that were measured;
- `advise_layers`: whether to compress activations, by the first, a pipeline's schedule, and the
  accuracies that were measured;
- `fit`: constants from measured points, with every residual shown.
"""

from .advice import Advice, advise
from .compressors import COMPRESSORS, Kind
from .data_parallel import (
    Machine,
    Step,
    all_gather_seconds,
    all_reduce_seconds,
    step_seconds,
    training_speedup,
)
from .devices import DEVICES, Device, Speed
from .fitting import Fit, fit, fit_communication
from .grid import Grid, Layers
from .layers import LayerRow, rows_of_layers
from .layers_advice import LayersAdvice, advise_layers
from .methods import MEASURED_ON, METHODS, Method
from .model_parallel import (
    PAPER,
    Encoded,
    LayerCosts,
    encoded,
    layer_flops,
    layer_seconds,
    speedup,
)
from .predicting import Row, Situation, rows_of
from .workload import Cost, Workload

__all__ = [
    "COMPRESSORS",
    "DEVICES",
    "MEASURED_ON",
    "METHODS",
    "PAPER",
    "Advice",
    "Cost",
    "Device",
    "Encoded",
    "Fit",
    "Grid",
    "Kind",
    "LayerCosts",
    "LayerRow",
    "Layers",
    "LayersAdvice",
    "Machine",
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
    "encoded",
    "fit",
    "fit_communication",
    "layer_flops",
    "layer_seconds",
    "rows_of",
    "rows_of_layers",
    "speedup",
    "step_seconds",
    "training_speedup",
]
