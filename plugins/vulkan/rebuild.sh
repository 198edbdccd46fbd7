#!/usr/bin/env bash
# After an edit of shaders/ or native/: brings an editable install up to date in seconds. Needs an earlier `pip install -e`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
cmake --build build/editable
cmake --install build/editable --prefix "$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" >/dev/null
