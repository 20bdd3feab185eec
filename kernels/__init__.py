"""Triton kernels of compopt, imported as ``compopt_kernels``: a file an operation.

Their references are in ``compopt/_ops/math.py``.

A launch works on all tensors of a bucket. Gradients and weights lie anywhere, so a kernel gets a
table of addresses, a row a tensor, and a list of blocks; each program takes one block. Offsets are
64 bits wide, maths is float32 at least.

Without a GPU the kernels run in Triton's interpreter: TRITON_INTERPRET=1, set before this package
is imported.
"""

from ._blocks import INTERPRETED, Blocks, Table, cut
from ._programs import Programs, programs
from .adamw import AdamWRow, adamw, adamw_table
from .code import CodeRow, EncodeRow, decode, decode_table, encode, encode_table
from .compact import compact, compact_known, compact_table
from .factored import FactoredRow, factored
from .pack_bits import pack_bits, unpack_bits
from .positions import count, count_table, positions
from .quantise import dequantise, mean, mean_of_words, quantise
from .scape import ScapeRow, moment, moment_table, scape, scape_table
from .top_k import TopKRow, top_k, top_k_table

__all__ = [
    "INTERPRETED",
    "AdamWRow",
    "Blocks",
    "CodeRow",
    "EncodeRow",
    "FactoredRow",
    "Programs",
    "ScapeRow",
    "Table",
    "TopKRow",
    "adamw",
    "adamw_table",
    "compact",
    "compact_known",
    "compact_table",
    "count",
    "count_table",
    "cut",
    "decode",
    "decode_table",
    "dequantise",
    "encode",
    "encode_table",
    "factored",
    "mean",
    "mean_of_words",
    "moment",
    "moment_table",
    "pack_bits",
    "positions",
    "programs",
    "quantise",
    "scape",
    "scape_table",
    "top_k",
    "top_k_table",
    "unpack_bits",
]
