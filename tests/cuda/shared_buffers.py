"""Read Triton's intermediate code for buffers in shared memory that asynchronous copies overwrite too early.

Triton's pipeliner keeps a slot of a buffer until the registers that were loaded from it are used. Tensor core products
that read the same slot may then still be running: with as many slots as stages are in flight, the next copy overwrites
what they read. Hopper gave wrong sums in this way, another one each time, for a kernel that summed up its activations
beside the product.
"""

from __future__ import annotations

import re

_VALUE = r"%[\w.]+(?::\d+)?"
_VIEW = re.compile(rf"({_VALUE}) = ttg\.memdesc_\w+ ({_VALUE})")
_ALLOC = re.compile(rf"({_VALUE}) = ttg\.local_alloc\b")
_LOAD = re.compile(rf"ttg\.local_load ({_VALUE})")
_DOT = re.compile(rf"ttng\.warp_group_dot ({_VALUE}), ({_VALUE}), .*isAsync = true")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")
_COPY = re.compile(rf"ttg\.async_copy_global_to_local {_VALUE}, ({_VALUE})")


def overwritten_too_early(ttgir: str) -> list[str]:
    """Names of buffers read into registers and by running products, and copied into before those have ended."""
    root: dict[str, str] = {}
    loaded, running, found = set[str](), set[str](), set[str]()
    for line in ttgir.splitlines():
        if match := _ALLOC.search(line):
            root[match[1]] = match[1]
        elif match := _VIEW.search(line):
            root[match[1]] = root.get(match[2], match[2])
        elif match := _LOAD.search(line):
            loaded.add(root.get(match[1], match[1]))
        elif match := _DOT.search(line):
            running.update(root.get(name, name) for name in match.groups())
        elif (match := _WAIT.search(line)) and match[1] == "0":
            running.clear()
        elif match := _COPY.search(line):
            buffer = root.get(match[1], match[1])
            if buffer in running and buffer in loaded:
                found.add(buffer)
    return sorted(found)
