"""Compiles for TPUs with libtpu, which the session `xla_aot` tells JAX about; there is nothing to do without it."""

from __future__ import annotations

import os

from qcore_xla import aot

if "TPU_LIBRARY_PATH" not in os.environ:
    collect_ignore_glob = ["*"]
else:
    os.environ.update(aot.ENVIRONMENT)
