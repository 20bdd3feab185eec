"""Everything sent for a while, or from now on: warm-up, and fine-tuning without the compressors
(MCBench, table 5).
"""

from __future__ import annotations

from torch import nn

from .codecs import Compressor, Identity
from .pipeline import _Boundary


def set_compression(model: nn.Module, enabled: bool) -> None:
    """Turn every compressor of the model on or off, on all ranks alike: a warm-up sends everything
    at first.

    A tensor-parallel model may be turned at any step. Payloads of stage boundaries change in size:
    make PipelineStage and the schedule anew afterwards.
    """
    for module in model.modules():
        if isinstance(module, Compressor):
            module.enabled = bool(enabled)


def drop_compressors(model: nn.Module) -> nn.Module:
    """The model without compressors, on all ranks alike: what a checkpoint trained with them is
    fine-tuned as.

    Keys of the state dict that are not a compressor's stay as they are, and are those of a model
    that never had one: load the checkpoint first, or with strict=False afterwards. Make
    PipelineStage and the optimizer anew.
    """
    while isinstance(model, _Boundary):
        model = model.stage
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Compressor):
                setattr(module, name, Identity())
            elif isinstance(child, _Boundary):
                setattr(module, name, drop_compressors(child))
    return model
