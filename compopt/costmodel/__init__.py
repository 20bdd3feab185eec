"""What a training step costs, and what compression would make of it. Plain numbers in, plain numbers out.

Two models, and the fit that gives both their constants:

- `model_parallel`: activations of tensor- and pipeline-parallel layers, equations 1 to 3 of MCBench;
- `data_parallel`: gradients averaged inside the optimizer, one row of `METHODS` an optimizer;
- `fit`: constants from measured points, with every residual shown.
"""

from .data_parallel import Machine, Step, all_gather_seconds, all_reduce_seconds, step_seconds, training_speedup
from .fitting import Fit, fit, fit_communication
from .methods import METHODS, Cost, Workload
from .model_parallel import PAPER, LayerCosts, layer_flops, layer_seconds, speedup

__all__ = [
    "METHODS",
    "PAPER",
    "Cost",
    "Fit",
    "LayerCosts",
    "Machine",
    "Step",
    "Workload",
    "all_gather_seconds",
    "all_reduce_seconds",
    "fit",
    "fit_communication",
    "layer_flops",
    "layer_seconds",
    "speedup",
    "step_seconds",
    "training_speedup",
]
