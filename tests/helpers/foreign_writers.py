"""Whole models in the formats of other tools, written by the formats' formulas with numpy's packing of bits.

A writer takes a float32 weight ``(N, K)`` and returns the stored tensors by the last part of their names and the dense
weight that they stand for, float32.
"""

import json

import torch
from foreign_packing import minus_one, packed_words
from safetensors.torch import save_file

import qcore

GROUP = 64
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
CT = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


def _int4(weight, dtype):
    """Unsigned codes (N, K) and zero points (G, N), scales (G, N) in ``dtype``, dense weight."""
    q = qcore.quantize(weight, f"int4-g{GROUP}-asym", "minmax")
    q = qcore.QTensor.from_codes(q.codes(), q.scale.to(dtype), q.zero, q.format)
    u, z = ((part.to(torch.int16) + 8).to(torch.uint8) for part in (q.codes(), q.zero))
    return u, z, q.scale, q.dequantize(torch.float32)


def gptq(weight):
    u, z, scale, dense = _int4(weight, torch.float16)
    groups = (torch.arange(weight.shape[1]) // GROUP).int()
    zeros = minus_one(packed_words(z, 4, 1), 4)
    return {"qweight": packed_words(u.t(), 4, 0), "qzeros": zeros, "scales": scale, "g_idx": groups}, dense


def awq(weight):
    u, z, scale, dense = _int4(weight, torch.float16)
    words, zeros = (packed_words(c.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4, 1) for c in (u.t(), z))
    return {"qweight": words, "qzeros": zeros, "scales": scale}, dense


def pack_quantized(weight):
    u, z, scale, dense = _int4(weight, torch.bfloat16)
    tensors = {
        "weight_packed": packed_words(u, 4, 1),
        "weight_zero_point": packed_words(z.t(), 4, 0),
        "weight_scale": scale.t().contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, dense


def int_quantized(weight):
    q = qcore.quantize(weight, "int8", "absmax")
    return {"weight": q.codes(), "weight_scale": q.scale.t().contiguous()}, q.dequantize(torch.float32)


def fp8_block(weight):
    n, k = weight.shape
    rows, columns = -(-n // 128), -(-k // 128)
    padded = torch.nn.functional.pad(weight, (0, -k % 128, 0, -n % 128))
    scale = padded.abs().view(rows, 128, columns, 128).amax((1, 3)) / 448
    spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread


def _fp4(weight, format):
    q = qcore.quantize(weight, format, "absmax")
    codes = q.codes()
    return q, codes[:, ::2] | (codes[:, 1::2] << 4)


def nvfp4(weight):
    q, packed = _fp4(weight, "fp4-g16-e4m3")
    tensors = {"weight": packed, "weight_scale": q.scale.t().contiguous(), "weight_scale_2": q.global_scale.clone()}
    return tensors, q.dequantize(torch.float32)


def mxfp4(weight):
    q, packed = _fp4(weight, "fp4-g32-e8m0")
    return {"weight_packed": packed, "weight_scale": q.scale.t().contiguous()}, q.dequantize(torch.float32)


def nf4(weight):
    n, k = weight.shape
    q = qcore.quantize(weight, "nf4-g64", "absmax")
    codes = q.codes()
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [n, k]}
    tensors = {
        "weight": ((codes[:, ::2] << 4) | codes[:, 1::2]).reshape(-1, 1).contiguous(),
        "weight.absmax": q.scale.t().reshape(-1).contiguous(),
        "weight.quant_map": torch.tensor(q.format.element.values),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, q.dequantize(torch.float32)


def _ct(format, bits, kind, **weights):
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **weights}, "input_activations": None}
    return {**CT, "format": format, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FORMATS = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "checkpoint_format": "gptq"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "compressed-tensors W4A16": (pack_quantized, _ct("pack-quantized", 4, "int", strategy="group", group_size=GROUP)),
    "compressed-tensors W8": (int_quantized, _ct("int-quantized", 8, "int", strategy="channel")),
    "fp8": (fp8_block, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
    "modelopt NVFP4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "MXFP4": (mxfp4, _ct("mxfp4-pack-quantized", 4, "float", strategy="group", group_size=32)),
    "bitsandbytes NF4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}
"""Format to its writer and the settings of a directory."""


def write_directory(folder, config, state, linears, format):
    """Write a model's ``state`` with the weights of ``linears`` in a format. Returns the state with dense weights."""
    writer, settings = FORMATS[format]
    tensors, dense = dict(state), dict(state)
    for layer in linears:
        stored, dense[f"{layer}.weight"] = writer(tensors.pop(f"{layer}.weight").float())
        tensors |= {f"{layer}.{name}": tensor.contiguous() for name, tensor in stored.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return dense
