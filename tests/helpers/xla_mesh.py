"""A decoder on a mesh of simulated devices against one device; run in a process of its own: ``SCHEME DEVICES``."""

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


@torch.no_grad()
def main(scheme, devices):
    torch.manual_seed(0)
    model = Decoder(width=128, heads=8, kv_heads=8, inner=256, layers=2).eval()
    qcore.quantize_(model, scheme)
    single, spread = model, copy.deepcopy(model)
    cuts = qcore_xla.shard_(spread, jax.make_mesh((devices,), ("model",)))
    assert len(cuts) == 14, cuts
    one, many = (torch.compile(each, backend=backend) for each in (single, spread))
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
    assert not graphs.explain(many).host
    print("equal", len(jax.devices()))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(sys.argv[1], int(sys.argv[2]))
