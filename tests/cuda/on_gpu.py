"""What only a GPU can show of the plugin's wiring; a script, not collected by pytest.

``python tests/cuda/on_gpu.py [CHECK ...]``

Streams and graphs, devices beside the current one, autocast, compilation, threads, an index out of range, and what a
call costs the host. Numbers are the conformance kit's business: ``qcore conformance cuda``.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent / "helpers"))

import odd_layouts

import qcore

SCHEMES = ("w4a16-g128", "w4a16-g32-asym", "w8a16", "w8a8", "w4a8-g128-aasym", "w8a8-static(0.03,5)")
N, K = 1024, 2048
DESCENDING = """
import torch, qcore
made = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 64, 64), "w4a16-g32").to("cuda")
x, ends = torch.randn(9, 64, device="cuda"), torch.tensor([2, 5, 9], device="cuda", dtype=torch.int32)
made(x, ends); torch.cuda.synchronize()
made(x, ends.flip(0)); torch.cuda.synchronize()
"""
OUT_OF_RANGE = """
import torch, qcore
layer = qcore.nn.QuantizedEmbedding.from_float(torch.nn.Embedding(20, 64), "w8a16").to("cuda")
layer(torch.tensor([3], device="cuda")); torch.cuda.synchronize()
layer(torch.tensor([20], device="cuda")); torch.cuda.synchronize()
"""


def layer(scheme, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    made = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(K, N, dtype=dtype), scheme).to(device)
    assert made.decision.plugin == "cuda", str(made.decision)
    return made.eval()


def inputs(rows, device="cuda", dtype=torch.bfloat16):
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(device, dtype)


def close(found, expected, tolerance=2e-2):
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < tolerance, f"relative error {error:.3g}"


def probe():
    (status,) = [s for s in qcore.plugins() if s.name == "cuda"]
    print(f"    {status.device}; {status.driver}; {status.details}; {status.seconds:.2f} s")
    assert str(status.state) == "available", status.reason


def probing_leaves_cuda_alone():
    code = "import torch, qcore; qcore.plugins(); assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


def right_beside_the_fallback():
    for scheme in SCHEMES:
        mine = layer(scheme)
        for rows in (1, 3, 16, 64, 300):
            x = inputs(rows)
            with torch.no_grad(), qcore.using("torch"):
                expected = qcore.linear(x, mine.weight, mine.bias, activation=mine.scheme.activation)
            with torch.no_grad():
                close(mine(x), expected)


def graph_capture():
    for scheme in SCHEMES:
        mine = layer(scheme)
        for rows in (1, 64, 300):
            x = inputs(rows)
            with torch.no_grad():
                expected = mine(x)  # compiles
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    found = mine(x)
            x.mul_(0)
            graph.replay()
            x.copy_(inputs(rows))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(found, expected), f"{scheme}, {rows} rows"


def embedding_in_a_graph():
    table = qcore.nn.QuantizedEmbedding.from_float(torch.nn.Embedding(500, 256), "w4a16-g64").to("cuda")
    assert table.decision.kernel.name == "cuda.embedding", str(table.decision)
    indices = torch.arange(12, device="cuda").view(3, 4)
    expected = table(indices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = table(indices)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


def experts_in_a_graph():
    for scheme in ("w4a16-g128", "w8a8", "w8a16-g32-asym"):
        made = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(6, N, K, dtype=torch.bfloat16), scheme).to("cuda")
        for rows in (5, 90, 700):
            x, ends = inputs(rows), offsets(rows, 1)
            assert made.decision.kernel.name.startswith("cuda.grouped"), str(made.decision)
            with torch.no_grad():
                made(x, ends)  # compiles
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    found = made(x, ends)
                for seed in range(3):
                    ends.copy_(offsets(rows, seed))
                    graph.replay()
                    torch.cuda.synchronize()
                    assert torch.equal(found, made(x, ends.clone())), f"{scheme}, {rows} rows"
                    with qcore.using("torch"):
                        close(found, qcore.grouped_linear(x, made.weight, ends, activation=made.scheme.activation))


def offsets(rows, seed):
    """Ends of the rows of six experts."""
    ends = torch.randint(0, rows + 1, (6,), generator=torch.Generator().manual_seed(seed)).sort().values
    return ends.to("cuda", torch.int32)


def streams():
    mine, x = layer("w4a16-g128"), inputs(3)
    with torch.no_grad():
        expected = mine(x)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            y = x * 1
            found = mine(y)
        stream.synchronize()
    assert torch.equal(found, expected)


def other_device():
    if torch.cuda.device_count() < 2:
        print("    one device only: not tried")
        return
    for scheme in SCHEMES:
        mine = layer(scheme)
        other = copy.deepcopy(mine).to("cuda:1")
        with torch.no_grad():
            expected, found = mine(inputs(5)), other(inputs(5, "cuda:1"))
        assert found.device == torch.device("cuda:1")
        assert torch.equal(found.cpu(), expected.cpu()), scheme
        assert torch.cuda.current_device() == 0


def odd_layouts_of_everything():
    """Strides, steps of 0, offsets that break 16 bytes and the negative bit; the second call may be a replay."""
    for contract, count in (("linear", 120), ("conv2d", 60), ("embedding", 60)):
        served, wrong = odd_layouts.wrong_layouts(contract, _kernel_for, seed=3, count=count, device="cuda:0")
        assert served >= count // 4, f"{contract}: {served}"
        assert not wrong, "\n".join(wrong[:5])


def _kernel_for(request):
    decision = qcore.resolve(request)
    return decision.kernel if decision.kernel.name.startswith("cuda.") else None


def zeros_give_zeros():
    for scheme in ("w8a8", "w8a8-aasym", "w4a8-g128-aasym", "w8a8-static(0.03,5)"):
        mine = layer(scheme)
        mine.bias = None
        for rows in (1, 16, 300):
            with torch.no_grad():
                y = mine(torch.zeros(rows, K, device="cuda", dtype=torch.bfloat16))
            assert not y.any(), f"{scheme}, {rows} rows: {float(y.abs().max()):.3g}"


def results_are_each_their_own():
    for scheme in SCHEMES:
        mine, x = layer(scheme), inputs(3)
        with torch.no_grad():
            results = [mine(x) for _ in range(6)]
            kept, _ = results[0].clone(), [y.fill_(9) for y in results[1:]]
            mine(inputs(3) * 2)
        assert torch.equal(results[0], kept), scheme
        assert len({y.data_ptr() for y in results}) == len(results), scheme


def tensors_elsewhere_are_named():
    elsewhere = ["cpu", *(["cuda:1"] if torch.cuda.device_count() > 1 else [])]
    for scheme in SCHEMES:
        mine = layer(scheme)
        kernel, packed, x = mine.decision.kernel, mine._primary.packed, inputs(3)
        bias = mine.bias.detach()
        with torch.no_grad():
            expected = kernel(x, packed, bias)
            for device in elsewhere:
                for args, said in (((x.to(device), packed, bias), "x"), ((x, packed, bias.to(device)), "bias")):
                    for _ in range(2):
                        told = _error(kernel, *args)
                        assert told.startswith(f"{said} is on {device}"), f"{scheme}: {said} on {device}: {told}"
            assert torch.equal(kernel(x, packed, bias), expected), scheme


def _error(kernel, *args):
    try:
        kernel(*args)
    except qcore.FormatError as error:
        return str(error)
    return "no error"


def autocast_changes_nothing():
    for rows in (1, 300):
        x = inputs(rows, dtype=torch.float32)
        weight = qcore.quantize(torch.randn(N, K), qcore.Format("int8")).to("cuda")
        with torch.no_grad():
            expected = qcore.linear(x, weight)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                found = qcore.linear(x, weight)
        assert torch.equal(found, expected)


def compiles():
    for scheme in SCHEMES:
        mine = layer(scheme)
        for mode in ("default", "reduce-overhead"):
            torch._dynamo.reset()
            compiled = torch.compile(mine, fullgraph=True, dynamic=mode == "default", mode=mode)
            with torch.no_grad():
                for rows in (11, 1, 300, 11, 11):
                    close(compiled(inputs(rows)).clone(), mine(inputs(rows)), 1e-3)


def gradients():
    mine, x = layer("w4a16-g128"), inputs(7).requires_grad_()
    mine(x).sum().backward()
    close(x.grad, mine.weight.dequantize(torch.float32).sum(0).expand(7, -1))


def threads():
    mine, x, wrong = layer("w4a8-g128-aasym"), inputs(5), []
    with torch.no_grad():
        expected = mine(x)

    def work():
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found = mine(x)
                torch.cuda.current_stream().synchronize()
                wrong.extend([1] if not torch.equal(found, expected) else [])

    workers = [threading.Thread(target=work) for _ in range(8)]
    torch.cuda.synchronize()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def index_out_of_range():
    run = subprocess.run([sys.executable, "-c", OUT_OF_RANGE], capture_output=True, text=True, check=False)
    assert run.returncode != 0, "nothing happened"
    assert "an index is out of range" in run.stdout + run.stderr, run.stderr[-2000:]
    print("    " + next(line for line in (run.stdout + run.stderr).splitlines() if "out of range" in line)[:150])


def offsets_that_descend():
    run = subprocess.run([sys.executable, "-c", DESCENDING], capture_output=True, text=True, check=False)
    assert run.returncode != 0, "nothing happened"
    assert "offsets must ascend" in run.stdout + run.stderr, run.stderr[-2000:]


def host_time():
    mine = qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(4096, 4096, False, dtype=torch.bfloat16), "w4a16-g128")
    plain = torch.nn.Linear(4096, 4096, False, dtype=torch.bfloat16).cuda()
    mine = mine.to("cuda")
    for shape in ((1, 4096), (1, 1, 4096)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        print(f"    x {shape}: " + ", ".join(f"{name} {_host(f, x):.1f} us" for name, f in _calls(mine, plain)))


def _calls(mine, plain):
    bound = mine._primary
    yield "module", mine
    yield "kernel", lambda x: bound.kernel(x, bound.packed, None)
    yield "torch", plain


def _host(call, x, calls=500):
    with torch.no_grad():
        for _ in range(50):
            call(x)
        best = float("inf")
        for _ in range(10):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call(x)
            best = min(best, (time.perf_counter() - start) / calls)
            torch.cuda.synchronize()
    return best * 1e6


CHECKS = (
    probe, probing_leaves_cuda_alone, right_beside_the_fallback, graph_capture, embedding_in_a_graph,
    experts_in_a_graph, streams, other_device, odd_layouts_of_everything, zeros_give_zeros, results_are_each_their_own,
    tensors_elsewhere_are_named,
    autocast_changes_nothing, compiles, gradients, threads, index_out_of_range, offsets_that_descend,
    host_time,
)  # fmt: skip


def main():
    chosen = [check for check in CHECKS if check.__name__ in sys.argv[1:]] or CHECKS
    failed = []
    for check in chosen:
        start = time.perf_counter()
        try:
            check()
            outcome = "ok"
        except Exception:  # noqa: BLE001 - the others are to run all the same
            outcome, _ = "FAILED", failed.append(check.__name__)
            traceback.print_exc()
        print(f"{outcome:6} {check.__name__} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{len(chosen) - len(failed)} passed, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
