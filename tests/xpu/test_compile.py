"""Every Triton kernel that the plugin would launch compiles, with the very constants that it is launched with.

No GPU is needed. Triton's part for Intel GPUs is not published on PyPI: where it is installed, kernels are compiled for
XPU; elsewhere for two GPUs of other makers, which shows that they are plain Triton and that nothing in them spills.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "cuda"))  # the tools that compile without a GPU

from grids import sampled
from workers import in_processes

HELPER = Path(__file__).parents[1] / "helpers" / "xpu_triton_launches.py"
WARPS = 32
"""Sub-groups of a work-group: 1024 work-items of sub-groups of 32."""
SHARED = {"sm_90": 227 << 10, "gfx942": 64 << 10}


def linear(scheme, m, n=4096, k=4096, **more):
    return "linear", {"scheme": scheme, "m": m, "n": n, "k": k, **more}


CALLS = [linear(scheme, m) for scheme in ("w4a8-g32", "w4a8-g128-asym-aasym", "w8a8-g64-asym") for m in (1, 40, 512)]
CALLS += [linear("w4a8", 512, bias=True), linear("w4a8-fzp-aasym", 20, dtype="float32", k=20000)]
CALLS += [linear("w8a8-g32-fzp", 40, dtype="float16"), linear("w4a8-g64-static-o8", 20), linear("w4a8-g96", 1, n=129)]
CALLS += [linear("w4a8-g32-asym-aasym", 3, n=20, k=77), linear("w8a8-asym-aasym", 20, n=12, k=1 << 16)]
CALLS += [linear("w8a16-asym", 4), linear("w4a16-g128", 4, dtype="float32"), linear("w8a16-g32-fzp", 1, n=129, k=61)]
CALLS += [("embedding", {"scheme": scheme, "n": 1000, "k": 384}) for scheme in ("w4a16-g32", "w8a16-asym")]
CALLS += [("conv2d", {"scheme": s, "channels": 64}) for s in ("w8a8-static-o8", "w4a8-g32-asym-aasym", "w8a16")]
CALLS += [("conv2d", {"scheme": "w8a8-asym", "channels": c, **more}) for c, more in ((512, {}), (64, {"groups": 2}))]
CALLS += [("conv2d", {"scheme": "w8a8", "channels": 64, "window": 1})]
NAMES = [f"{function}-{'-'.join(map(str, arguments.values()))}" for function, arguments in CALLS]


CASES = sampled(NAMES, 6)


def compiled(target, request):
    """What became of the calls that tests of this run ask for, by name."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = {name: call for name, call in zip(NAMES, CALLS, strict=True) if any(f"{name}]" in i.name for i in items)}
    calls = [{"function": name, "arguments": arguments, "target": target} for name, arguments in asked.values()]
    return dict(zip(asked, in_processes(f"{HELPER}:answer", calls), strict=True))


@pytest.fixture(scope="module", params=["sm_90", "gfx942"])
def target(request):
    return request.param


@pytest.fixture(scope="module")
def elsewhere(target, request):
    return compiled(target, request)


@pytest.fixture(scope="module")
def here(request):
    import triton

    if not (Path(triton.__file__).parent / "backends" / "intel").is_dir():
        pytest.skip("this Triton has no part for Intel GPUs: it comes with the XPU build of torch, not from PyPI")
    return compiled("xpu", request)


@pytest.mark.parametrize("name", CASES)
def test_it_compiles_without_spills_and_fits(target, elsewhere, name):
    found = elsewhere[name]
    assert isinstance(found, list), found
    assert found
    for kernel in found:
        what = f"{kernel['kernel']} {kernel['constants']}"
        assert kernel["shared"] <= SHARED[target], what
        assert not kernel["spills"], what
        assert kernel["warps"] <= WARPS
        assert not kernel["constants"].get("PDL")
        assert not kernel["constants"].get("ASM")


@pytest.mark.parametrize("name", [case for case in CASES if "a8" in case.values[0]])
def test_products_run_on_matrix_units(elsewhere, name):
    (product,) = {k["kernel"]: k for k in elsewhere[name] if k["kernel"] in {"tiles", "convolve"}}.values()
    assert re.search(r"\bI[GM]*MMA\b|\bIMMA\.|v_mfma_i32", product["text"])


@pytest.mark.parametrize("name", CASES)
def test_it_compiles_for_intel(here, name):
    found = here[name]
    assert isinstance(found, list), found
    assert all(kernel["bytes"] for kernel in found)
    assert all("#ttig.dpas" in kernel["text"] for kernel in found if kernel["kernel"] == "tiles")
