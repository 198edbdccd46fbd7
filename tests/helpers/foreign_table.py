"""The table of the page on checkpoints of other tools, made by reading every frozen layer; run this to print it."""

import json
import tempfile
import warnings
from pathlib import Path

import torch
from foreign_layers import FOLDER, frozen

import qcore
from qcore.checkpoint.exporters import EXPORTERS
from qcore.checkpoint.exporters.gguf_blocks import block_type, pack
from qcore.checkpoint.importers.base import LayerRefused
from qcore.checkpoint.importers.gguf_blocks import BLOCK_TYPES
from qcore.checkpoint.opening import open_checkpoint
from qcore.formats import PLAIN

TOOLS = {
    "ao": "torchao", "awq": "AWQ", "bnb": "bitsandbytes", "ct": "compressed-tensors", "fp8": "fp8 blocks",
    "gguf": "GGUF", "gptoss": "gpt-oss", "gptq": "GPTQ", "hqq": "HQQ", "modelopt": "modelopt", "quanto": "quanto",
}  # fmt: skip


def rows():
    """One row per frozen layer: tool, layer, versions, how it is held, whether it is exact, whether it is written."""
    for path in sorted(FOLDER.glob("*.safetensors")):
        layer = frozen(path.stem)
        tool = TOOLS[path.stem.split("_")[0]]
        versions = {
            k: v for k, v in json.loads(layer.metadata["versions"]).items() if k not in ("torch", "transformers")
        }
        made = ", ".join(f"{k} {v}" for k, v in versions.items()) or "transformers 5.23.0"
        yield tool, f"`{path.stem}`", made, *read(path, layer)


def read(path, layer):
    """The format that holds a layer, how its dense weight compares with the tool's, and the targets that hold it."""
    gguf = path.with_suffix(".gguf")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", qcore.QcoreWarning)
        source = gguf if gguf.exists() else layer.write(Path(folder) / "source")
        try:
            with open_checkpoint(source) as archive:
                name = next(name for name in archive.records if name.startswith(layer.layer))
                weight = archive.quantized(name)
        except qcore.CheckpointError:
            return "", "refused", ""
        targets = [to for to in EXPORTERS if is_written(source, Path(folder) / to, to)]
        if weight.dim() == 2 and archive.records[name].scheme.activation is None and has_blocks(weight):
            targets.append("gguf")
    dense = weight.dequantize(torch.float32)
    try:
        same = layer.is_dense(dense)
    except AssertionError:
        same = False
    unit = 2**-23 * float(dense.abs().max())
    close = float((dense.flatten(0, -2)[:2] - layer.rows).abs().max()) <= unit
    exact = "yes" if same else "to 1 unit in the last place" if close else "no"
    return f"`{weight.format}`".replace("/plain", ""), exact, ", ".join(targets)


def is_written(source, target, to):
    """Whether `qcore.convert` writes a checkpoint as it is, and what it wrote is the same weight when it is read."""
    try:
        qcore.convert(source, target, to)
    except qcore.CheckpointError:
        return False
    with open_checkpoint(source) as before, open_checkpoint(target) as after:
        for name in before.records:
            one, other = (found.quantized(name).dequantize(torch.float32) for found in (before, after))
            assert torch.equal(one, other), f"{source} as {to}"
    return True


def has_blocks(weight):
    """Whether a type of GGUF's blocks holds a weight, and gives the same numbers."""
    weight = weight.convert(PLAIN)
    try:
        name = block_type(lambda: iter([weight]))
    except LayerRefused:
        return False
    again = BLOCK_TYPES[name].build(pack(weight, name))
    assert torch.equal(again.dequantize(torch.float32), weight.dequantize(torch.float32)), name
    return True


def table():
    """The Markdown table."""
    head = ("tool", "layer", "made by", "held as", "exact", "written as it is")
    lines = [head, ["---"] * len(head), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
