"""Triton kernels of compopt, imported as ``compopt_kernels``: one operation per file.

Their references are in ``tests/support/oracles/kernels.py`` unless a file names another.

A launch works on all tensors of a bucket. Gradients and weights lie anywhere in memory, so a kernel
is given a table of addresses, a row for each tensor, and a list of blocks; each program works on
one block. Offsets are 64 bits wide, arithmetic is float32 at least.

Without a GPU the kernels run in Triton's interpreter: TRITON_INTERPRET=1, set before this package
is imported.
"""

from ._blocks import INTERPRETED, Blocks, Table, addresses_in_turn, make_blocks, upload
from .adamw import AdamWRow, AdamWTypes, adamw, adamw_table
from .cholesky_qr import MAX_RANK, orthonormalize, prepare_orthonormalize
from .compact import compact, compact_table, compact_with_table
from .elias_fano import (
    DecodeRow,
    EncodeRow,
    decode_masks,
    decode_table,
    encode_masks,
    encode_table,
)
from .factored import FactoredRow, FactoredTypes, factored, factored_table
from .mask_bits import block_offsets, block_offsets_table, pack_bits
from .project import (
    MAX_NARROW,
    ProjectRow,
    ProjectTypes,
    Tiles,
    project,
    project_table,
    project_tiles,
)
from .quantize import (
    Programs,
    dequantize,
    make_programs,
    mean_of_codes,
    mean_of_headers,
    quantize,
)
from .scape_updates import ScapeRow, moment, moment_table, scape, scape_table
from .top_k import TopKRow, top_k, top_k_table

__all__ = [
    "INTERPRETED",
    "MAX_NARROW",
    "MAX_RANK",
    "AdamWRow",
    "AdamWTypes",
    "Blocks",
    "DecodeRow",
    "EncodeRow",
    "FactoredRow",
    "FactoredTypes",
    "Programs",
    "ProjectRow",
    "ProjectTypes",
    "ScapeRow",
    "Table",
    "Tiles",
    "TopKRow",
    "adamw",
    "adamw_table",
    "addresses_in_turn",
    "block_offsets",
    "block_offsets_table",
    "compact",
    "compact_table",
    "compact_with_table",
    "decode_masks",
    "decode_table",
    "dequantize",
    "encode_masks",
    "encode_table",
    "factored",
    "factored_table",
    "make_blocks",
    "make_programs",
    "mean_of_codes",
    "mean_of_headers",
    "moment",
    "moment_table",
    "orthonormalize",
    "pack_bits",
    "prepare_orthonormalize",
    "project",
    "project_table",
    "project_tiles",
    "quantize",
    "scape",
    "scape_table",
    "top_k",
    "top_k_table",
    "upload",
]
