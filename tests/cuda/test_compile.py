"""Every kernel that the plugin would launch compiles for every GPU it claims, without spills and within its budget.

No GPU is needed: `launches` runs the plugin's host code for the target and compiles what it asks for; `workers` does so
in processes without the interpreter that other tests of this folder use.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

from compiling import SHARED
from grids import sampled
from launches import Call, compile_calls

L = "linear"
SMALL, LARGE = {"n": 4096, "k": 4096}, {"n": 28672, "k": 8192}


def linear(scheme, m, target="sm_90", size=SMALL, **more):
    return Call("linear", {"scheme": scheme, "m": m, **size, **more}, target)


# What a Llama-8B-like model asks for, on the GPU that the figures are measured on.
MAIN = [linear(s, m) for s in ("w4a16-g128", "w8a16", "w4a8-g128", "w8a8") for m in (1, 16, 64, 256, 2048)]
MAIN += [linear(s, m, size=LARGE) for s in ("w4a16-g128", "w8a16", "w4a8-g128") for m in (1, 16)]
# Every other kind of weight, activation and result.
OTHER = [linear(s, m) for s in ("w4a16-g128-asym", "w4a16-g32-fzp", "w4a16", "w8a16-g32-asym") for m in (1, 64)]
OTHER += [linear("w4a16-g128", m, dtype=dtype) for dtype in ("float16", "float32") for m in (1, 64)]
OTHER += [linear("w4a16-g128", 64, target, dtype="float32") for target in SHARED if target != "sm_90"]
OTHER += [linear(s, m) for s in ("w4a8-g32-asym-aasym", "w8a8-g64", "w8a8-aasym") for m in (1, 2048)]
OTHER += [linear(s, 512) for s in ("w4a16-g128-asym", "w4a16", "w8a16-asym")]
OTHER += [linear(s, 512, dtype=d) for s in ("w4a16-fzp", "w8a16-fzp", "w4a16-g64-fzp") for d in ("bfloat16", "float16")]
OTHER += [linear("w4a16-g64-fzp", 257, dtype=d, size={"n": 16, "k": 64}) for d in ("bfloat16", "float32")]
OTHER += [linear(s, 512) for s in ("w4a8", "w4a8-g128-asym-aasym", "w4a8-g128-static-o8", "w4a8-g128-o8")]
OTHER += [linear("w4a16-asym", 512, dtype="float16", bias=True), linear("w8a16", 512, dtype="float16")]
OTHER += [linear("w4a8-g32-static", 16, bias=True), linear("w8a8-static-o8", 16), linear("w8a8-asym", 2048)]
OTHER += [linear("w8a16", 3, size={"n": 129, "k": 61}), linear("w4a16-g32", 17, size={"n": 20, "k": 33})]
OTHER += [linear("w4a16-g16", 1), linear("w8a16-g16-asym", 64, dtype="float32"), linear("wnf4a16-g10", 1, "sm_80")]
OTHER += [linear("w4a16-g48-fzp", 4, dtype="float16"), linear("wfp8a16-g510", 1, size={"n": 20, "k": 33})]
OTHER += [Call("embedding", {"scheme": s, "n": 1000, "k": 384}) for s in ("w4a16-g32", "w8a16")]
OTHER += [Call("conv2d", {"scheme": s, "channels": 256}) for s in ("w8a8", "w8a8-static", "w8a16")]
OTHER += [Call("conv2d", {"scheme": s, "channels": 96}) for s in ("w8a8", "w8a8-static")]
OTHER += [Call("conv2d", {"scheme": "w8a8", "channels": 64, "window": 1})]
DEPTHWISE = {"channels": 96, "groups": 96}
OTHER += [Call("conv2d", {"scheme": s, **DEPTHWISE, "last": last}) for s in ("w8a8", "w8a8-aasym") for last in (1, 0)]
OTHER += [Call("conv2d", {"scheme": "w8a8-aasym", **DEPTHWISE, "window": 9})]
OTHER += [Call("conv2d", {"scheme": s, "channels": 96, "groups": 12}) for s in ("w4a8-g32-fzp-aasym", "w8a8-static-o8")]
OTHER += [Call("conv2d", {"scheme": "w8a8", "channels": 256, "groups": 8, "last": last}) for last in (1, 0)]
NARROW = (DEPTHWISE, {"channels": 96, "groups": 12})
OTHER += [Call("conv2d", {"scheme": "w8a8", **n}, target) for n in NARROW for target in ("sm_80", "sm_120", "gfx942")]


def main_calls(target):
    """One or two per kernel."""
    calls = [linear(s, m, target) for s in ("w4a16-g128", "w8a16", "w4a8-g128") for m in (1, 64)]
    calls += [linear("w8a8", m, target) for m in (1, 2048)]
    calls += [Call("embedding", {"scheme": "w4a16-g32", "n": 1000, "k": 384}, target)]
    return [*calls, Call("conv2d", {"scheme": "w8a8", "channels": 256}, target)]


ELSEWHERE = [call for target in SHARED if target != "sm_90" for call in main_calls(target)]
# Many rows, where shared memory does not hold what that of sm_90 does.
ROOMS = (("w4a16-asym", "sm_89"), ("w8a16-asym", "sm_120"), ("w4a16", "gfx942"), ("w8a16-asym", "gfx942"))
ELSEWHERE += [linear(s, 512, target, dtype="float16") for s, target in ROOMS]
ELSEWHERE += [linear("w4a16-g128-asym", 512, "sm_89"), linear("w4a16-g128", 512, "gfx942")]
# Scales of a float32 model stay float32: they take shared memory from the stages of kernels for many rows.
WIDE = [linear(s, m, scale="float32") for s in ("w8a16-g64-asym", "w8a16-g128-fzp", "w4a16-g32-fzp") for m in (64, 256)]
WIDE += [linear(s, m, scale="float32") for s in ("w4a8-g32-asym-aasym", "w4a8-g64-aasym") for m in (64, 512)]
WIDE += [linear("w4a16-g64", 300, size={"n": 4096, "k": 64}), linear("w8a8-aasym", 512, scale="float32")]
MORE = [linear(s, 2048) for s in ("w4a16-g32", "w8a16-g128", "w4a8-g32", "w4a8-g32-asym")]
MORE += [linear(s, 512) for s in ("w4a8-g64-asym-aasym", "w8a8-g128-aasym")]
# Tables and e4m3: each way to decode, each kind of scales, each kernel.
TABLES = [linear(s, m) for s in ("mxfp4", "nvfp4", "nf4", "wfp8a16") for m in (1, 16, 64, 2048)]
TABLES += [linear(s, m) for s in ("mxfp8", "wfp8_e5m2a16", "wnf4a16", "wfp4a16-g64-fzp") for m in (1, 512)]
TABLES += [linear(s, m, dtype="float16") for s in ("mxfp4", "nvfp4", "nf4", "wfp8a16-g128") for m in (1, 64)]
TABLES += [linear(s, m, dtype="float32") for s in ("mxfp4", "nvfp4", "nf4", "wfp8a16") for m in (1, 64)]
TABLES += [linear(s, m) for s in ("wfp8afp8", "wfp8afp8-static", "wfp8afp8-g128") for m in (1, 64)]
TABLES += [linear("wfp8afp8-g128", m, square=square) for m in (64, 2048) for square in (False, True)]
TABLES += [linear(s, m) for s in ("w8afp8", "w4afp8-g128-token", "w4afp8-fzp") for m in (16, 64)]
TABLES += [
    linear(s, m, t) for s in ("nvfp4", "nf4", "wfp8a16", "wfp8afp8-g128") for m in (1, 64) for t in ("sm_80", "sm_89")
]
TABLES += [Call("embedding", {"scheme": s, "n": 1000, "k": 384}) for s in ("nvfp4", "nf4", "mxfp8")]


# Rows of results and parameters that do not begin on 16 bytes, and columns that do not fill a block.
ODD = [
    linear(s, m, size={"n": 5001, "k": 1000})
    for s in ("w4a16-g128", "w8a8", "w8a16-g32-asym", "w4a8-g32", "w4a8-g128", "wfp8afp8") for m in (1, 512)
]  # fmt: skip


def experts(scheme, rows, target="sm_90", number=8, **more):
    return Call("grouped_linear", {"scheme": scheme, "experts": number, "rows": rows, **SMALL, **more}, target)


# Few rows of each expert, some, many; and what only the kernel for every device takes.
EXPERTS = [experts(s, rows) for s in ("w4a16-g128", "w4a16-g32-asym", "w8a16", "w8a8") for rows in (8, 256, 4096)]
EXPERTS += [experts("w4a16-g128", rows, dtype="float32") for rows in (8, 4096)]
EXPERTS += [experts("w4a8-g32-asym", 4096), experts("w4a16-g64-fzp", 512, dtype="float16")]
EXPERTS += [experts("w4a16-g32", 300, number=200, n=72, k=2880)]
EXPERTS += [experts(s, rows) for s in ("mxfp4", "nvfp4") for rows in (8, 4096)]
EXPERTS += [experts(s, 1024, target) for s in ("w4a16-g128", "w8a8") for target in ("sm_80", "sm_120", "gfx942")]


def product(kernel, fields, scheme, **more):
    return Call("product", {"kernel": kernel, "fields": fields, "scheme": scheme, "m": 512, **SMALL, **more})


# Tiles with sums of their own and shared ones; tiles whose K two warpgroups share; tiles of three warpgroups.
UNITS = ((256, 0), (256, 1), (128, 0), (64, 1), (32, 2))
TILES = [product("w4a8_units_hopper", list(f), s) for s in ("w4a8-g32", "w4a8-g64") for f in UNITS]
TILES += [product("w4a8_units_hopper_64", [128, 2], s) for s in ("w4a8-g32", "w4a8-g32-aasym")]
TILES += [product("w4a8_units_hopper_192", [128, split], "w4a8-g32") for split in (0, 1)]
TILES += [
    product("int8_groups_hopper", [tokens, split], s)
    for s in ("w8a8-g64", "w8a8-g64-aasym", "w8a8-g256", "w8a8-g32-static-o8")
    for tokens, split in ((128, 0), (64, 1), (32, 2))
]
TILES += [
    product("w8a8_groups_hopper", [tokens, 0], s)
    for s in ("w8a8-g64-asym-aasym", "w8a8-g256-asym")
    for tokens in (64, 32)
]
TILES += [
    product("gemm_hopper_192", [128, split], s)
    for s in ("w4a16-g128-asym", "w4a16-g32-asym", "w4a16-fzp", "nvfp4", "nf4", "w8a16", "w8a16-g32-asym", "wfp8a16")
    for split in (0, 1)
]
TILES += [
    product("gemm_hopper_64", fields, s)
    for s in ("w4a16-g128", "w4a16-g32-asym", "w4a16-fzp", "nvfp4", "nf4", "w8a16", "w8a16-g32-asym", "wfp8a16")
    for fields in ([128, 4], [64, 1], [32, 0])
]
TILES += [
    product("gemv_chunks", [*shape, False, tokens], s, m=64)
    for s in ("w4a16-g32-asym", "nvfp4", "nf4", "w8a16", "w8a16-g32-asym", "wfp8a16")
    for shape, tokens in (((2, 1, 8, 2), 16), ((4, 1, 4, 2), 32))
]
TILES += [
    product("int8_gemv_chunks", [*shape, False, tokens], s, m=64)
    for s, shape, tokens in (
        ("w8a8", (2, 1, 8, 2), 16), ("w8a8", (4, 1, 4, 2), 32), ("w4a8-g32-asym-aasym", (2, 1, 8, 2), 32),
        ("w4a8-g32-asym-aasym", (4, 1, 4, 2), 16), ("w4a8-g128", (2, 1, 8, 2), 32),
    )
]  # fmt: skip
CALLS = [*TILES, *MAIN, *OTHER, *ELSEWHERE, *WIDE, *MORE, *TABLES, *ODD, *EXPERTS]
NAMES = {str(call): call for call in CALLS}
assert len(NAMES) == len(CALLS)

WEIGHTS = {
    "grouped:grouped_gemv": lambda c: 16 * c["R"] * c["U"] * c["NW"] * c["P"],
    "gemv:gemv": lambda c: 16 * c["R"] * c["U"] * c["NW"] * c["P"],
    "int8_gemv:int8_gemv": lambda c: 16 * c["R"] * c["U"] * c["NW"] * c["P"],
    "int8_slices:slices": lambda c: c["BN"] * c["S"] * c["P"],
    "slices:slices": lambda c: c["BN"] * c["NW"] * c["BK"],
}
"""Weights that one turn of a kernel's loop takes in a program, by its constexprs."""

BUDGETS = {
    str(linear("w4a16-g128", 1)): 2.6,
    str(linear("w4a16-g128-asym", 1)): 2.8,
    str(linear("w4a16-g128", 16)): 3.2,
    str(linear("w8a16", 1)): 4.3,
    str(linear("w4a8-g128", 1)): 2.0,
    str(linear("w8a8", 1)): 1.5,
    str(experts("w4a16-g128", 8)): 2.3,
    str(linear("mxfp4", 1)): 4.1,
    str(linear("nf4", 1)): 4.8,
    str(linear("wfp8a16", 1)): 6.6,
}
"""SASS instructions of a lane per weight on sm_90. At full memory speed there is time for 3.8 per int4 weight, for 7.6
per int8 weight."""

HOPPER = {
    str(linear("w4a16-g32", 2048)): "gemm_hopper",
    str(linear("w8a16-g128", 2048)): "gemm_hopper",
    str(linear("w4a8-g32", 2048)): "gemm_hopper",
    str(linear("w4a8-g32-asym", 2048)): "groups_hopper",
    str(linear("w4a8-g64-asym-aasym", 512)): "groups_hopper",
    str(linear("w8a8-g64", 2048)): "int8_groups_hopper",
    str(linear("w8a8-g128-aasym", 512)): "int8_groups_hopper",
    str(linear("w8a8-aasym", 2048)): "int8_hopper",
    str(linear("w4a16-g128", 2048)): "gemm_hopper",
    str(linear("w8a16", 2048)): "gemm_hopper",
    str(linear("w4a8-g128", 2048)): "w4a8_hopper",
    str(linear("nvfp4", 64)): "gemm_hopper",
    str(linear("nf4", 2048)): "gemm_hopper",
}
HOPPER |= {str(experts("w4a16-g128", 4096)): "grouped_hopper", str(experts("w8a8", 4096)): "grouped_hopper"}
KEPT = [*BUDGETS, *HOPPER]
OTHERS = sampled([name for name in NAMES if name not in KEPT], 12)
CASES = [*KEPT, *OTHERS]
PRODUCTS = [name for name in KEPT if NAMES[name] in MAIN] + [case for case in OTHERS if NAMES[case.values[0]] in MAIN]


@pytest.fixture(scope="module")
def results(request):
    """The compiled calls by name: only those that tests of this run ask for."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = [name for name in NAMES if any(item.callspec.params["name"] == name for item in items)]
    return dict(zip(asked, compile_calls(map(NAMES.get, asked)), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_it_compiles_without_spills_and_fits(results, name):
    found = results[name]
    assert not found.error, found.error
    assert found.kernels
    faults = [f"{kernel.job}: {fault}" for kernel in found.kernels for fault in faults_of(kernel)]
    assert not faults, "\n".join(faults)


def faults_of(kernel):
    if kernel.spills or kernel.stack:
        yield f"{kernel.spills} spills with {kernel.registers} registers, {kernel.stack} bytes of stack"
    if not kernel.fits:
        yield f"{kernel.shared} bytes of shared memory; there are {SHARED[kernel.job.target]} KiB"
    if kernel.overwritten:
        yield f"copies overwrite what running products read: {', '.join(kernel.overwritten)}"


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_run_on_tensor_cores(results, name):
    found = results[name].kernels
    by_torch = [kernel.job.kernel.endswith(":dequantize") for kernel in found]
    assert by_torch == [True] or any(kernel.loops and kernel.inner_loop.mma for kernel in found)


@pytest.mark.parametrize(("name", "kernel"), HOPPER.items())
def test_many_rows_have_a_kernel_of_their_own_on_hopper(results, name, kernel):
    *_, made = results[name].kernels
    assert made.job.kernel.endswith(f":{kernel}")


@pytest.mark.parametrize(("name", "budget"), BUDGETS.items())
def test_the_inner_loop_keeps_its_budget(results, name, budget):
    kernels = {made.job.kernel.rpartition(".")[2]: made for made in results[name].kernels}
    (kind,) = kernels.keys() & WEIGHTS.keys()
    made = kernels[kind]
    found = made.per_weight(WEIGHTS[kind](made.job.arguments))
    assert found <= budget, f"{made.job}: {found:.2f} per weight; {made.inner_loop.summary()}"
