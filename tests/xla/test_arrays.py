"""Packed weights as arrays, for users of JAX: `qcore_xla.load` and the pure functions."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from foreign_writers import write_directory
from torch import nn
from torch.nn import functional as F

import qcore
import qcore_xla

SCHEMES = [
    "w8a16",
    "w4a16-g32-asym",
    "w4a16-g32-fzp",
    "w8a8",
    "w4a8-g32-asym-aasym",
    "w8a8-static(0.03,5)",
    "wfp8a16-g32",
    "mxfp4",
    "nvfp4",
    "wnf4a16-g64",
    "wfp8afp8",
    "wfp8afp8-g32",
    "wfp8afp8-static(0.01)",
]


def packed(scheme, n=20, k=77, **options):
    torch.manual_seed(0)
    form = qcore.Scheme.parse(scheme)
    weight = qcore.quantize(torch.randn(n, k), form.weight)
    return weight, form, qcore_xla.pack(weight, scheme, **options)


def close(y, expected, tolerance=1e-4):
    y = torch.from_numpy(np.array(y.astype(jnp.float32)))
    assert (y - expected.float()).norm() <= tolerance * expected.float().norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_under_jit(scheme, dtype):
    weight, form, own = packed(scheme)
    x, bias = torch.randn(2, 3, 77), torch.randn(20)
    x = x.to(getattr(torch, dtype))
    y = jax.jit(qcore_xla.linear)(jnp.asarray(x.float().numpy(), dtype), own, jnp.asarray(bias.numpy()))
    assert y.dtype == dtype
    expected = qcore.linear(x.float(), weight, bias, activation=form.activation)
    close(y, expected, 1e-4 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_of_linear(scheme):
    weight, _, own = packed(scheme)
    x, dy = torch.randn(3, 77), torch.randn(3, 20)

    def loss(x, bias):
        return jnp.sum(qcore_xla.linear(x, own, bias) * dy.numpy())

    dx, db = jax.jit(jax.grad(loss, argnums=(0, 1)))(x.numpy(), np.zeros(20, np.float32))
    close(dx, dy @ weight.dequantize(torch.float32))
    close(db, dy.sum(0))
    each = jax.vmap(jax.grad(lambda x, dy: jnp.sum(qcore_xla.linear(x, own) * dy)))(x.numpy(), dy.numpy())
    close(each, dy @ weight.dequantize(torch.float32))


def test_a_gradient_keeps_no_dequantized_weight():
    _, _, own = packed("w4a16-g128", 1024, 1024)

    def grad(x, weight):
        return jax.grad(lambda x: qcore_xla.linear(x, weight).sum())(x)

    made = jax.jit(grad).lower(jax.ShapeDtypeStruct((2, 1024), jnp.float32), own).compile()
    assert made.memory_analysis().temp_size_in_bytes < 1024 * 1024 * 4 / 2


def test_results_of_codes_have_no_gradient():
    _, _, own = packed("w8a8-static(0.03,5)-o8(0.05,-3)")
    assert qcore_xla.linear(jnp.ones((2, 77)), own).dtype == jnp.int8
    with pytest.raises(qcore.FormatError, match="no gradient"):
        jax.grad(lambda x: qcore_xla.linear(x, own).astype(jnp.float32).sum())(jnp.ones((2, 77)))


def test_vmap_over_rows_and_over_weights():
    parts = [packed("w4a16-g32")[2], packed("w4a16-g32")[2]]
    parts[1] = jax.tree.map(lambda a: a[..., ::-1] if a.dtype == jnp.float32 else a, parts[1])
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *parts)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 77)), jnp.float32)
    y = jax.vmap(qcore_xla.linear)(x, stacked)
    for i in (0, 1):
        np.testing.assert_allclose(y[i], qcore_xla.linear(x[i], parts[i]), rtol=1e-5, atol=1e-5)
    over_rows = jax.vmap(qcore_xla.linear, in_axes=(0, None))(x, parts[0])
    np.testing.assert_allclose(over_rows, qcore_xla.linear(x, parts[0]), rtol=1e-5, atol=1e-5)
    scanned = jax.lax.scan(lambda x, w: (x, qcore_xla.linear(x, w)), x[0], stacked)[1]
    np.testing.assert_allclose(scanned[0], y[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32-asym", "wfp8_e5m2a16", "nvfp4", "wnf4a16-g32"])
def test_embedding(scheme):
    weight, _, own = packed(scheme, 50, 96, table=True)
    indices = torch.randint(0, 50, (2, 3))
    rows = jax.jit(qcore_xla.embedding)(indices.numpy(), own)
    close(rows, weight.dequantize(torch.float32)[indices], 1e-6)
    assert qcore_xla.embedding(indices.numpy(), own, dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize(("scheme", "groups"), [("w8a16", 1), ("w4a8-g16", 2), ("wnf4a16-g16", 2)])
def test_conv2d(scheme, groups):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, stride=(2, 1), padding=1, groups=groups)
    layer, x = qcore.nn.QuantizedConv2d.from_float(conv, scheme), torch.randn(2, 4, 7, 6)
    own = qcore_xla.pack(layer.weight, scheme, groups=groups)

    def call(x):
        bias = conv.bias.detach().numpy()
        return qcore_xla.conv2d(x, own, bias, kernel_size=3, stride=(2, 1), padding=1)

    close(jax.jit(call)(x.numpy()), layer(x).detach())
    dense = layer.weight.dequantize(torch.float32).view(6, 3, 3, 4 // groups).permute(0, 3, 1, 2)
    probe = x.clone().requires_grad_()
    F.conv2d(probe, dense, stride=(2, 1), padding=1, groups=groups).sum().backward()
    close(jax.grad(lambda x: call(x).sum())(jnp.asarray(x.numpy())), probe.grad)


@pytest.mark.parametrize(("scheme", "rows"), [("w4a16-g32", 5), ("w4a16-g32", 30), ("mxfp4", 30)])
def test_grouped_linear(scheme, rows):
    torch.manual_seed(0)
    layer = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 8, 40), scheme, bias=torch.randn(3, 8))
    own, x = qcore_xla.pack(layer.weight), torch.randn(rows, 40)
    ends = torch.tensor([2, 2, rows - 1], dtype=torch.int32)
    y = jax.jit(qcore_xla.grouped_linear)(x.numpy(), ends.numpy(), own, layer.bias.detach().numpy())
    close(y, layer(x, ends).detach())

    def loss(x, bias):
        return qcore_xla.grouped_linear(x, ends.numpy(), own, bias).sum()

    dx, db = jax.grad(loss, argnums=(0, 1))(x.numpy(), layer.bias.detach().numpy())
    dense, expert = layer.weight.dequantize(torch.float32), [0] * 2 + [2] * (rows - 3)
    close(dx[:-1], dense[expert].sum(1))
    assert not dx[-1].any()  # belongs to no expert
    np.testing.assert_allclose(db[:, 0], [2, 0, rows - 3])


def test_a_weight_says_what_it_is():
    _, _, own = packed("w4a16-g32")
    assert own.shape == (20, 77)
    assert own.scheme == "w4a16-g32"
    assert own.nbytes == sum(a.nbytes for a in jax.tree.leaves(own))
    assert "linear (20, 77), w4a16-g32" in repr(own)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(own)]
    assert paths == ["['data']", "['scale']"]


def test_wrong_calls():
    weight, _, own = packed("w4a16-g32")
    with pytest.raises(qcore.FormatError, match=r"needs \(\.\.\., 77\)"):
        qcore_xla.linear(jnp.ones((2, 76)), own)
    with pytest.raises(qcore.FormatError, match="float32, bfloat16 or float16"):
        qcore_xla.linear(jnp.ones((2, 77), jnp.int32), own)
    with pytest.raises(qcore.FormatError, match="packed for linear"):
        qcore_xla.embedding(jnp.ones(2, jnp.int32), own)
    with pytest.raises(qcore.FormatError, match="KH"):
        qcore_xla.conv2d(jnp.ones((1, 3, 4, 4)), own, kernel_size=3)
    with pytest.raises(TypeError, match="PackedWeight"):
        qcore_xla.linear(jnp.ones((2, 77)), jnp.ones((20, 77)))
    with pytest.raises(qcore.FormatError, match="the scheme w8a16"):
        qcore_xla.pack(weight, "w8a16")
    with pytest.raises(qcore.FormatError, match="per token"):
        qcore_xla.pack(qcore.quantize(torch.randn(4, 8), "int8"), "w8a8-token")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.proj = nn.Embedding(50, 64), nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids):
        return self.lm_head(self.proj(self.embed_tokens(ids)))


@torch.no_grad()
def test_load_reads_what_qcore_saves(tmp_path):
    torch.manual_seed(0)
    model = Tied().eval()
    qcore.quantize_(model, {"*": "w4a16-g32", "proj": "w8a8"})
    qcore.save(model, tmp_path / "model")
    weights = qcore_xla.load(tmp_path / "model")
    assert set(weights) == {"embed_tokens.weight", "lm_head.weight", "proj.weight", "proj.bias"}

    @jax.jit
    def call(weights, ids):
        x = qcore_xla.embedding(ids, weights["embed_tokens.weight"])
        x = qcore_xla.linear(x, weights["proj.weight"], weights["proj.bias"])
        return qcore_xla.linear(x, weights["lm_head.weight"])

    ids = torch.randint(0, 50, (2, 7))
    close(call(weights, ids.numpy()), model(ids))
    only = qcore_xla.load(tmp_path / "model", only=["proj.*"], tables=())
    assert set(only) == {"proj.weight", "proj.bias"}
    elsewhere = qcore_xla.load(tmp_path / "model", only="proj.*", tables="embed*", plan={"lm_head*": "column"})
    assert set(elsewhere) == set(only)  # patterns of tensors that are not read
    for what, given in {"only": ["proj*", "porj.weight"], "tables": "porj.weight", "groups": {"porj.weight": 4},
                        "plan": {"porj.weight": "row"}}.items():  # fmt: skip
        with pytest.raises(qcore.FormatError, match=f"of {what} matches no tensor. Did you mean 'proj.weight'"):
            qcore_xla.load(tmp_path / "model", **{what: given})


@pytest.mark.parametrize("format", ["gptq", "awq", "compressed-tensors W4A16", "compressed-tensors W8"])
def test_load_reads_other_tools(tmp_path, format):
    torch.manual_seed(0)
    state = {"proj.weight": torch.randn(64, 128), "norm.weight": torch.randn(64)}
    dense = write_directory(tmp_path / "model", {}, state, ["proj"], format)
    weights, x = qcore_xla.load(tmp_path / "model"), torch.randn(3, 128)
    close(qcore_xla.linear(x.numpy(), weights["proj.weight"]), x @ dense["proj.weight"].T)
    np.testing.assert_array_equal(weights["norm.weight"], state["norm.weight"].numpy())


def test_load_says_which_file_is_missing(tmp_path):
    with pytest.raises(qcore.CheckpointError, match="no such file"):
        qcore_xla.load(tmp_path / "nothing")


def test_integers_of_64_bits_fit_or_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"small": torch.tensor([-5, 1 << 30])}, tmp_path / "small.safetensors")
    assert qcore_xla.load(tmp_path / "small.safetensors")["small"].tolist() == [-5, 1 << 30]
    save_file({"large": torch.tensor([1 << 40])}, tmp_path / "large.safetensors")
    with pytest.raises(OverflowError, match="32 bits"):
        qcore_xla.load(tmp_path / "large.safetensors")


LIGHT = """
import sys, qcore_xla
assert not {"jax", "safetensors"} & sys.modules.keys()
assert {"load", "linear", "PackedWeight"} <= set(dir(qcore_xla)) and "jax" not in sys.modules
from qcore_xla import linear
import qcore_xla.kernels.linear, qcore_xla.plugin
assert callable(qcore_xla.linear) and qcore_xla.linear is linear and "jax" in sys.modules
"""


def test_importing_the_package_imports_no_jax():
    subprocess.run([sys.executable, "-c", LIGHT], check=True, cwd=Path(__file__).parent)


def test_a_name_that_is_none():
    with pytest.raises(AttributeError, match="nothing"):
        qcore_xla.nothing  # noqa: B018
