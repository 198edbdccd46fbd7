"""What users would pick instead on a CPU, where it is installed: ONNX Runtime's MatMulNBits and torchao."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor, nn

Call = Callable[[Tensor], object]
Make = Callable[[], Call]
GROUP = 128


def peers(n: int, k: int, dtype: torch.dtype) -> dict[str, tuple[Make, int]]:
    """Name to (maker of one copy, bytes of its weight)."""
    found: dict[str, tuple[Make, int]] = {}
    if find_spec("onnxruntime") and find_spec("onnx") and dtype == torch.float32:
        for level in (0, 4):
            name = f"ONNX Runtime MatMulNBits int4 g{GROUP}, accuracy_level {level}"
            found[name] = (lambda level=level: matmul_nbits(n, k, level), n * k // 2)
    if find_spec("torchao"):
        found["torchao Int8WeightOnly, eager"] = (lambda: torchao("Int8WeightOnlyConfig", n, k, dtype), n * k)
        name = "Int8DynamicActivationInt8WeightConfig"
        found["torchao Int8DynamicActivationInt8Weight, eager"] = (lambda: torchao(name, n, k, dtype), n * k)
    return found


def missing() -> list[str]:
    """The peers that are not installed."""
    return [name for name in ("onnx", "onnxruntime", "torchao") if not find_spec(name)]


def matmul_nbits(n: int, k: int, level: int) -> Call:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (n, k // GROUP, GROUP // 2), dtype=np.uint8)
    scales = rng.random(n * k // GROUP, dtype=np.float32)
    sizes = {"K": k, "N": n, "bits": 4, "block_size": GROUP, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **sizes)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["m", size]) for name, size in (("x", k), ("y", n))]
    weights = [numpy_helper.from_array(packed, "w"), numpy_helper.from_array(scales, "s")]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # or it would slow the others down
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(["y"], {"x": x.numpy()})


def torchao(config: str, n: int, k: int, dtype: torch.dtype) -> Call:
    from torchao import quantization

    layer = nn.Sequential(nn.Linear(k, n, bias=False, dtype=dtype))
    quantization.quantize_(layer, getattr(quantization, config)())
    return copy.deepcopy(layer)
