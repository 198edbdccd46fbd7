"""Recognize files that are not safetensors, and suggest how to convert them, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileKind:
    """A kind of file. ``what``: its name in an error; ``remedy``: how to convert or replace it."""

    what: str
    remedy: str


_PICKLE = FileKind(
    "a pickle or zip archive of torch.save",
    "qcore never unpickles. Load it with torch.load(path, weights_only=True) and save it with safetensors.",
)
_GGUF = FileKind(
    "GGUF, the format of llama.cpp",
    "It is quantized: qcore.load_ and qcore convert read it. To quantize it differently, let transformers convert it:\n"
    "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(OUT), then quantize OUT.",
)
_GGML = FileKind(
    "GGML, an old format of llama.cpp", "Get the model as safetensors: llama.cpp itself no longer reads it."
)
_KERAS = FileKind("HDF5, the format of Keras", "Load it in its framework and save the weights with safetensors.")
_ONNX = FileKind("an ONNX model", "qcore quantizes weights of torch models: get the model as safetensors.")
_ARRAYS = FileKind(
    "a numpy array or archive", "Load it with numpy and save its arrays with safetensors.numpy.save_file."
)
_FLAX = FileKind("msgpack, the format of Flax", "Load it in its framework and save the weights with safetensors.")
_POINTER = FileKind("a Git LFS pointer", "The file itself was not downloaded: run `git lfs pull` in its repository.")
_TEXT = FileKind("a JSON text", "Pass the directory that holds the weights, or a .safetensors file.")

_MAGIC = {
    b"GGUF": _GGUF,
    b"PK\x03\x04": _PICKLE,
    b"\x80\x02": _PICKLE,
    b"\x80\x03": _PICKLE,
    b"\x80\x04": _PICKLE,
    b"\x80\x05": _PICKLE,
    b"\x89HDF": _KERAS,
    b"\x93NUMPY": _ARRAYS,
    b"version ": _POINTER,
    b"lmgg": _GGML,
    b"fmgg": _GGML,
    b"tjgg": _GGML,
    b"{": _TEXT,
}
_SUFFIX = {
    ".gguf": _GGUF,
    ".ggml": _GGML,
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"), _PICKLE),
    **dict.fromkeys((".h5", ".hdf5", ".keras"), _KERAS),
    **dict.fromkeys((".onnx", ".onnx_data"), _ONNX),
    **dict.fromkeys((".npy", ".npz"), _ARRAYS),
    ".msgpack": _FLAX,
}


def kind_of(head: bytes, path: Path) -> FileKind | None:
    """Determine the kind of a file that is not safetensors, by its first bytes or by its suffix."""
    found = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    return found or _SUFFIX.get(path.suffix.lower())


def first_foreign(files: Iterable[Path]) -> tuple[Path, FileKind] | None:
    """Return the first file with a known foreign suffix and its kind, or None."""
    found = ((file, _SUFFIX[file.suffix.lower()]) for file in files if file.suffix.lower() in _SUFFIX)
    return next(found, None)
