"""The table of the page on checkpoints of other tools, made by reading every frozen layer; run this to print it."""

import json
import tempfile
import warnings
from pathlib import Path

import torch
from foreign_layers import FOLDER, frozen

import qcore
from qcore.checkpoint.exporters import EXPORTERS
from qcore.checkpoint.opening import open_checkpoint

TOOLS = {
    "ao": "torchao", "awq": "AWQ", "bnb": "bitsandbytes", "ct": "compressed-tensors", "fp8": "fp8 blocks",
    "gguf": "GGUF", "gptoss": "gpt-oss", "gptq": "GPTQ", "hqq": "HQQ", "modelopt": "modelopt", "quanto": "quanto",
}  # fmt: skip
WRITTEN = {"AWQ": "awq", "compressed-tensors": "compressed-tensors", "GPTQ": "gptq"}


def rows():
    """One row per frozen layer: tool, layer, versions, how it is held, whether it is exact, whether it is written."""
    for path in sorted(FOLDER.glob("*.safetensors")):
        layer = frozen(path.stem)
        tool = TOOLS[path.stem.split("_")[0]]
        versions = {
            k: v for k, v in json.loads(layer.metadata["versions"]).items() if k not in ("torch", "transformers")
        }
        made = ", ".join(f"{k} {v}" for k, v in versions.items()) or "transformers 5.23.0"
        held, exact = read(path, layer)
        written = "yes" if WRITTEN.get(tool) in EXPORTERS else ""
        yield tool, f"`{path.stem}`", made, held, exact, written


def read(path, layer):
    """The format that holds a layer, and how its dense weight compares with the tool's."""
    gguf = path.with_suffix(".gguf")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", qcore.QcoreWarning)
        source = gguf if gguf.exists() else layer.write(Path(folder))
        try:
            with open_checkpoint(source) as archive:
                name = next(name for name in archive.records if name.startswith(layer.layer))
                weight = archive.quantized(name)
        except qcore.CheckpointError:
            return "", "refused"
    dense = weight.dequantize(torch.float32)
    try:
        same = layer.is_dense(dense)
    except AssertionError:
        same = False
    unit = 2**-23 * float(dense.abs().max())
    close = float((dense.flatten(0, -2)[:2] - layer.rows).abs().max()) <= unit
    return f"`{weight.format}`".replace(
        "/plain", ""
    ), "yes" if same else "to 1 unit in the last place" if close else "no"


def table():
    """The Markdown table."""
    head = ("tool", "layer", "made by", "held as", "exact", "written")
    lines = [head, ["---"] * len(head), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
