"""Compile every kernel for GPUs that need not be here: none may spill registers, unless matrices are wide, nor use
more shared memory than all GPUs have. Prints how many there were.

The interpreter runs what Triton would refuse, a type that does not fit for one. Run without TRITON_INTERPRET.
Any Triton from 3.2 on, which torch 2.6 comes with: put another's folder on PYTHONPATH.
"""

import inspect
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import compopt_kernels
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)]
OLD = triton.__version__.startswith("3.2.")  # it has no linker of its own for AMD's, and puts 8 bytes on the stack
if not OLD:
    TARGETS.append(GPUTarget("hip", "gfx942", 64))
POINTERS = {
    "where": "*i64", "tiles": "*i64", "table": "*i64", "starts": "*i64", "held_starts": "*i64",
    "bounds": "*i64", "bins": "*i64", "larger": "*i64", "sizes": "*i64", "candidates": "*i64", "equals": "*i64",
    "marks": "*u8",
    "counts": "*i32", "words": "*i32", "prefix": "*i32", "mask": "*u8", "bits": "*u8", "n": "i64",
    "rows_of": "*i32", "chunks": "*i32", "body": "*fp32", "rounding_errors": "*fp32", "noise": "*fp32",
    "message": "*u8", "received": "*u8", "gathered": "*u8", "codes": "*i8", "out": "*fp32", "place": "i32",
    "stride": "i32", "scales_at": "i32", "codes_at": "i32", "own_codes_at": "i32", "ranks": "i32", "count": "i32",
    "header": "*fp32", "partial": "*fp32", "triangles": "*fp64", "grams": "*fp64", "factors": "*i64", "said": "*fp32",
}  # fmt: skip
F64, F32, BF16 = tl.float64, tl.float32, tl.bfloat16
WIDE = dict(ST=F32, VT=F32, GT=F32, PT=F32, ALIGN=16)
LOW = dict(ST=F32, VT=BF16, GT=BF16, PT=BF16, ALIGN=1)
LAUNCHES = {  # the options of launches that have other than the compiler's
    "_project": {"enable_fp_fusion": True, "num_stages": 1},
    "_factored": {"num_warps": 2},
    "_gram": {"enable_fp_fusion": True, "num_warps": 1},
}
PROJECT = dict(ST=F32, NT=F32, OT=F32, HT=F32, R=16, OUTPUTS=64, DEPTH=64, CHUNK=1024, PRECISION="tf32x3")
CASES = {
    "_blocks._starts": [dict(PART=2048)],
    "mask_bits._count": [dict(FIELDS=2), dict(FIELDS=5)],
    "mask_bits._pack": [{}],
    "compact._compact": [
        dict(GT=BF16, AT=F32, SQT=F32, ST=F32, OT=BF16, HT=BF16, ALIGN=1),
        dict(GT=F32, AT=F32, SQT=F32, ST=F32, OT=F32, HT=F32, ALIGN=16),
        dict(GT=F32, AT=F64, SQT=F32, ST=F64, OT=F64, HT=F32, ALIGN=1),
    ],
    "adamw._adamw": [WIDE | {"ROUNDS": False}, WIDE | {"ROUNDS": True}, LOW | {"ROUNDS": True}],
    "scape_updates._moment": [dict(ST=F32, GT=BF16)],
    "scape_updates._scape": [
        WIDE | {"ROUNDS": False},
        WIDE | {"ROUNDS": True},
        LOW | {"ROUNDS": True},
    ],
    "top_k._histogram": [
        dict(SHIFT=23, WIDTH=8, MARKS=False, LOADS_MARKED=False, TYPE=F32, PART=4096),
        dict(SHIFT=7, WIDTH=8, MARKS=True, LOADS_MARKED=False, TYPE=F32, PART=4096),
        dict(SHIFT=0, WIDTH=7, MARKS=False, LOADS_MARKED=True, TYPE=F32, PART=4096),
    ],
    "top_k._descend": [dict(WIDTH=8), dict(WIDTH=7)],
    "top_k._count_equal": [dict(TYPE=F32, PART=4096)],
    "top_k._select": [dict(TYPE=F32, PART=4096)],
    "elias_fano._encode": [{}],
    "elias_fano._decode": [{}],
    "factored._factored": [
        dict(ST=F32, VT=F32, GT=F32, PT=F32, ALIGN=16, ROWS=4, COLUMNS=128),
        dict(ST=F32, VT=BF16, GT=BF16, PT=BF16, ALIGN=1, ROWS=4, COLUMNS=128),
    ],
    "project._project": [
        PROJECT | dict(GT=F32, TRANSPOSED=False, MARKS=True, ALIGN=16),
        PROJECT | dict(GT=F32, TRANSPOSED=True, MARKS=False, ALIGN=16),
        PROJECT | dict(GT=BF16, TRANSPOSED=True, MARKS=True, ALIGN=1),
        PROJECT | dict(GT=F32, TRANSPOSED=True, MARKS=False, ALIGN=16, R=compopt_kernels.MAX_NARROW),
    ],
    "project._add_up": [dict(ST=F32, OT=F32, TRANSPOSED=True, CHUNK=1024, PART=1024)],
    "cholesky_qr._gram": [dict(FIRST=first, XT=F32, R=16, CHUNK=128, ROWS=1) for first in (True, False)],
    "cholesky_qr._factorize": [dict(FIRST=first, XT=F32, R=16, PART=8) for first in (True, False)],
    "cholesky_qr._apply": [dict(FIRST=first, XT=F32, R=16, CHUNK=128) for first in (True, False)],
    "quantize._quantize": [dict(BITS=8, ROWS=8), dict(BITS=4, ROWS=8)],
    "quantize._mean": [dict(BITS=8, ROWS=8), dict(BITS=4, ROWS=8)],
    "quantize._dequantize": [dict(BITS=8, ROWS=8), dict(BITS=4, ROWS=8)],
    "quantize._pack4": [dict(BYTES=1024)],
    "quantize._words": [{}],
}


def source(kernel: triton.JITFunction, constants: dict) -> ASTSource:
    """The kernel with its constants, as this Triton wants them: before 3.3 by name, beside the signature."""
    types = {name: POINTERS[name] for name in kernel.arg_names if name not in constants}
    if "constexprs" not in inspect.signature(ASTSource.__init__).parameters:
        return ASTSource(kernel, types, constants=constants)
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    return ASTSource(kernel, signature, constexprs=places)


def compiled(kernel: triton.JITFunction, constants: dict, target: GPUTarget) -> dict:
    """The kernel in every form that the compiler has it in; its shared memory fits AMD's GPUs, which have least."""
    if "BLOCK" in kernel.arg_names and "BLOCK" not in constants:
        constants = constants | {"BLOCK": 8 * constants.get("PART", 128)}
    if "PRECISION" in constants and target.backend == "hip":
        constants = constants | {"PRECISION": "ieee"}
    options = {"enable_fp_fusion": False, "num_warps": 8 if "TYPE" in constants and "PART" in constants else 4}
    options |= LAUNCHES.get(kernel.fn.__name__, {})
    made = triton.compile(source(kernel, constants), target, options)
    assert made.metadata.shared <= 65536, f"{kernel.fn.__name__} uses {made.metadata.shared} bytes on {target.arch}"
    return made.asm


def spilled(forms: dict) -> list[int]:
    """Return the bytes or registers that do not fit, by the assembler's own word."""
    if "amdgcn" in forms:
        return [int(n) for n in re.findall(r"_spill_count: *(\d+)", forms["amdgcn"])]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(forms["cubin"])
        file.flush()
        message = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return [int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", message)]


done = 0
for name, cases in CASES.items():
    module, function = name.split(".")
    kernel = getattr(sys.modules[f"{compopt_kernels.__name__}.{module}"], function)
    for constants in cases:
        for target in TARGETS:
            forms, done = compiled(kernel, constants, target), done + 1
            spills = spilled(forms)
            is_wide = constants.get("R") == compopt_kernels.MAX_NARROW
            assert OLD or is_wide or (spills and not any(spills)), f"{name} spills on {target.arch}: {spills}"
            if constants.get("ALIGN") == 16 and "ptx" in forms:
                assert re.search(r"ld\.global\.v4|cp\.async.*, 0x10", forms["ptx"]), (
                    f"{name} loads one number at a time"
                )
kernels = {
    f"{module}.{name}"
    for module in (
        "mask_bits",
        "compact",
        "adamw",
        "scape_updates",
        "top_k",
        "elias_fano",
        "quantize",
        "factored",
        "project",
        "cholesky_qr",
    )
    for name, value in vars(sys.modules[f"{compopt_kernels.__name__}.{module}"]).items()
    if isinstance(value, triton.JITFunction)
    and value.fn.__module__.endswith(module)
    and {"BLOCK", "COLUMNS"} & {*value.arg_names}
}
inlined = {"mask_bits.to_bytes"}
assert kernels - inlined <= set(CASES), f"not compiled: {kernels - inlined - set(CASES)}"
print(f"{done} compiled")
