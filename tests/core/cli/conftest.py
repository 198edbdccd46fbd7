"""What the tests of the command share: ways to run it, plugins made of text files."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes import installed_plugins, unmeasured
from safetensors.torch import save_file

from qcore.checkpoint import quantize_checkpoint
from qcore.cli import main


@pytest.fixture
def run(capsys):
    """Run the command in this process: (exit code, standard output, standard error)."""

    def call(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def run_json(run):
    """Run with ``--json`` in this process: (exit code, the document)."""

    def call(*arguments):
        code, out, _ = run(*arguments, "--json")
        return code, json.loads(out)

    return call


@pytest.fixture
def spawn(tmp_path):
    """Run commands in processes of their own, two at a time, without the plugins that are installed here."""

    def call(*commands, **environment):
        env = {**unmeasured(), "QCORE_DISABLE": installed_plugins(), **environment}

        def one(arguments):
            command = [sys.executable, "-m", "qcore", *map(str, arguments)]
            return subprocess.run(
                command, check=False, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=300
            )

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, commands))

    return call


@pytest.fixture
def model(tmp_path):
    """A folder with the checkpoints that the examples of --help name: two float ones, and one that is quantized."""
    torch.manual_seed(0)
    tensors = {
        "layers.0.weight": torch.randn(64, 128),
        "layers.0.bias": torch.randn(64),
        "layers.1.weight": torch.randn(64, 128),
        "lm_head.weight": torch.randn(32, 64),
        "norm.weight": torch.randn(64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "folder-of-shards").mkdir()
    save_file(tensors, tmp_path / "folder-of-shards" / "model.safetensors")
    quantize_checkpoint(tmp_path / "model.safetensors", tmp_path / "quantized", "w4a16-g32-asym", exclude=["lm_head"])
    return tmp_path


@pytest.fixture
def install(tmp_path):
    """Install a plugin that is one module: its text, and the metadata that pip would write. Returns the folder."""
    folder = tmp_path / "site"
    folder.mkdir()

    def write(name, code, dist="", group="qcore.plugins.v1"):
        dist = dist or f"qcore-{name}"
        module = dist.replace("-", "_")
        (folder / f"{module}.py").write_text(code)
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")
        return folder

    return write
