"""A decoder on a mesh of simulated devices against one device; in a process of its own: ``SCHEME DEVICES [local]``."""

import copy
import sys
import warnings

import jax
import torch
from tiny_models import Decoder

import qcore
import qcore_xla
from qcore import graphs
from qcore_xla.graphs.backend import qcore_xla as backend
from qcore_xla.graphs.program import Program

ON_MESH = []
"""Of each call of a program: whether it ran on the mesh."""


def watched(self, values, run=Program._call):
    ON_MESH.append(self.placement.whole is not None)
    return run(self, values)


@torch.no_grad()
def main(scheme, devices, scales="global"):
    torch.manual_seed(0)
    dense = Decoder(width=128, heads=8, kv_heads=8, inner=256, layers=2).eval()
    single = copy.deepcopy(dense)
    qcore.quantize_(single, scheme)
    spread = copy.deepcopy(single)
    cuts = qcore_xla.shard_(spread, jax.make_mesh((devices,), ("model",)), scales=scales)
    assert len(cuts) == 14, cuts
    # torch captures both models once: what one compiles must not decide how the other runs, in any order.
    one, many = (torch.compile(each, backend=backend) for each in (single, spread))
    Program._call = watched
    if scales == "local":
        check_local(one, many, dense)
        assert ON_MESH == [False, True]
    else:
        check_equal(one, many, single, spread)
        assert ON_MESH == [True, False] * 4
    assert not graphs.explain(many).host
    print("equal", len(jax.devices()))


def check_local(one, many, dense):
    """Other numbers than on one device, as close to the float model's: scales of fewer features are finer."""
    ids, place = torch.randint(0, 96, (1, 24)), torch.arange(24)
    alone, y, exact = one(ids, place), many(ids, place), dense(ids, place)
    assert not torch.allclose(y, alone, rtol=1e-4, atol=1e-4)
    assert (y - exact).norm() < 1.05 * (alone - exact).norm() < 0.1 * exact.norm()


def check_equal(one, many, single, spread):
    start = 0
    for length in (5, 1, 1):
        ids = torch.randint(0, 96, (1, length), generator=torch.Generator().manual_seed(length))
        place = torch.arange(start, start + length)
        torch.testing.assert_close(many(ids, place), one(ids, place), rtol=1e-4, atol=1e-4)
        start += length
    keys = [each.layers[1].attention.keys for each in (single, spread)]
    torch.testing.assert_close(*keys, rtol=1e-4, atol=1e-4)
    assert keys[0].abs().sum() > 0
    spread.reset()  # a write of torch
    single.reset()
    torch.testing.assert_close(many(ids, place), one(ids, place), rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
