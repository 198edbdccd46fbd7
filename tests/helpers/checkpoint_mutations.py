"""Seeded mutations of checkpoints: of their bytes, their JSON, their offsets, shapes and dtypes, their shards."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

Files = dict[str, bytes]
INDEX = "model.safetensors.index.json"

_DTYPES = [
    "BOOL",
    "U8",
    "I8",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "I16",
    "F16",
    "BF16",
    "I32",
    "F32",
    "C64",
    "F64",
    "I64",
    "U64",
    "F4",
    "F6_E2M3",
]
_FORMATS = [
    "int8/plain",
    "int4/plain",
    "int4-g8-asym/plain_int32",
    "int4-g8-fzp",
    "int4-g4-asym",
    "int9",
    "int4-g0/plain",
    "fp8/plain",
    "fp8_e5m2/plain",
    "fp4-g8-e4m3/plain",
    "fp4-g8-e4m3d/plain",
    "fp4-g8-e8m0/plain",
    "nf4-g8/plain",
]
_SCHEMES = [
    "w8a16",
    "w4a16-g8-asym",
    "w4a8-g8-asym-token",
    "w8a8-token",
    "w8a8-static-o8",
    "w8a8-o8t",
    "w8a8-static(1,1)",
    "wfp8a16",
    "wfp8afp8-static",
    "wfp8_e5m2afp8",
    "wfp4a16-g8-e4m3",
    "wfp4a16-g8-e4m3d",
    "wfp4a16-g8-e8m0",
    "wnf4a16-g8",
]


def hostile(r: random.Random) -> Any:
    """A value that no checkpoint should hold at most places."""
    plain = [
        None,
        True,
        False,
        0,
        1,
        -1,
        1.5,
        2**31,
        2**48,
        2**63,
        2**64 - 1,
        10**300,
        "",
        "x",
        "\0",
        "\ud800",
        "\x1b]0;\x07",
    ]
    plain += [
        [],
        {},
        [0],
        [1, 1],
        [-1, 2],
        [2**40, 2**40],
        [[1]],
        [None],
        {"a": 1},
        {"dtype": "F32"},
        "../../etc/passwd",
    ]
    plain += ["model.safetensors", "1", "99999999", "nan", "é" * 10, *_FORMATS, *_SCHEMES, *_DTYPES]
    if r.random() < 0.03:
        deep: Any = []
        for _ in range(r.choice((50, 300))):
            deep = [deep]
        big = [
            "y" * 200_000,
            "w4a16" + "-g8" * 30_000,
            list(range(20_000)),
            [0] * 100,
            {str(i): i for i in range(5000)},
            deep,
        ]
        return r.choice(big)
    return r.choice(plain)


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON tree: the container and the key."""
    found, containers = [], [tree]
    while containers:
        holder = containers.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                containers.append(holder[key])
    return found


class _Pairs(dict[str, Any]):
    """An object that is written with one of its keys twice."""


def to_json(tree: Any) -> str:
    """The text of a tree; a `_Pairs` has its first key twice."""
    if isinstance(tree, _Pairs) and tree:
        pairs = [*tree.items(), next(iter(tree.items()))]
        return "{" + ",".join(f"{json.dumps(key)}:{to_json(value)}" for key, value in pairs) + "}"
    if isinstance(tree, dict) and any(isinstance(value, _Pairs) for value in tree.values()):
        return "{" + ",".join(f"{json.dumps(key)}:{to_json(value)}" for key, value in tree.items()) + "}"
    return json.dumps(tree)


def mutate_tree(tree: Any, r: random.Random) -> None:
    """One change somewhere in a tree of JSON."""
    places = nodes(tree)
    if not places:
        return
    holder, key = r.choice(places)
    other, other_key = r.choice(places)
    action = r.randrange(6)
    if action == 0 and isinstance(holder, dict):
        holder[r.choice([*holder, "x", "__metadata__", "qcore"])] = holder.pop(key)
    elif action == 1:
        del holder[key]
    elif action == 2:
        holder[key] = json.loads(json.dumps(other[other_key]))
    elif action == 3 and isinstance(holder[key], int):
        holder[key] += r.choice((-8, -1, 1, 2, 8, 2**20))
    elif action == 4 and isinstance(holder[key], dict):
        holder[key] = _Pairs(holder[key])
    else:
        holder[key] = hostile(r)


def split(blob: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", blob[:8])
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def join(tree: Any, data: bytes, padding: int = 0) -> bytes:
    text = to_json(tree).encode() + b" " * padding
    return struct.pack("<Q", len(text)) + text + data


# Mutators of one safetensors file.


def flip(blob: bytes, r: random.Random) -> bytes:
    changed = bytearray(blob)
    for _ in range(r.choice((1, 1, 1, 2, 8))):
        changed[r.randrange(len(changed))] ^= 1 << r.randrange(8)
    return bytes(changed)


def cut(blob: bytes, r: random.Random) -> bytes:
    start = r.randrange(len(blob))
    return blob[:start] if r.random() < 0.5 else blob[:start] + blob[start + r.randrange(1, 20) :]


def insert(blob: bytes, r: random.Random) -> bytes:
    start = r.randrange(len(blob) + 1)
    return blob[:start] + r.randbytes(r.randrange(1, 20)) + blob[start:]


def length(blob: bytes, r: random.Random) -> bytes:
    (old,) = struct.unpack("<Q", blob[:8])
    values = (0, 1, old - 1, old + 1, len(blob), len(blob) - 8, 2**31, 2**63, 2**64 - 1, r.randrange(2**64))
    return struct.pack("<Q", r.choice(values) % 2**64) + blob[8:]


def header(blob: bytes, r: random.Random) -> bytes:
    tree, data = split(blob)
    for _ in range(r.choice((1, 1, 2))):
        mutate_tree(tree, r)
    return join(tree, data, r.choice((0, 0, 3)))


def deep(blob: bytes, r: random.Random) -> bytes:
    """Brackets within brackets, deeper than any stack."""
    tree, data = split(blob)
    text, depth = json.dumps(tree), r.choice((900, 20_000))
    start = r.choice([i for i, letter in enumerate(text) if letter in "0123456789"])
    changed = (text[:start] + "[" * depth + "]" * r.choice((0, depth)) + text[start + 1 :]).encode()
    return struct.pack("<Q", len(changed)) + changed + data


def records(blob: bytes, r: random.Random) -> bytes:
    tree, data = split(blob)
    notes = tree.get("__metadata__", {})
    key = r.choice(("qcore.tensors", "qcore.tensors", "qcore.aliases"))
    inner = json.loads(notes.get(key, "{}"))
    if not inner:
        inner = {str(hostile(r))[:50]: r.choice([*tree, hostile(r)])}
    mutate_tree(inner, r)
    notes[key] = to_json(inner)
    return join(tree, data)


def record(blob: bytes, r: random.Random) -> bytes:
    """A format or scheme that exists, where another belongs."""
    tree, data = split(blob)
    inner = json.loads(tree.get("__metadata__", {}).get("qcore.tensors", "{}"))
    for name in r.sample(list(inner), min(1, len(inner))):
        inner[name]["format"] = r.choice([inner[name]["format"], *_FORMATS])
        inner[name]["scheme"] = r.choice([inner[name]["scheme"], *_SCHEMES])
        shape = inner[name]["shape"]
        inner[name]["shape"] = r.choice([shape, shape, shape[::-1], [4, 14], [0, 13], [2, 26], [1, *shape], [2, 1, 13]])
        inner[name].update(r.choice([{}, {}, {}, {"order": True}, {"order": False}]))
        tree["__metadata__"]["qcore.tensors"] = json.dumps(inner)
    return join(tree, data)


def layout(blob: bytes, r: random.Random) -> bytes:
    """Offsets, shapes and dtypes that are nearly right."""
    tree, data = split(blob)
    entries = [entry for name, entry in tree.items() if name != "__metadata__"]
    if not entries:
        return blob
    one, other = r.choice(entries), r.choice(entries)
    action = r.randrange(6)
    if action == 0:
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    elif action == 1:
        one["data_offsets"][r.randrange(2)] += r.choice((-4, -1, 1, 4))
    elif action == 2:
        one["shape"] = r.choice(
            [one["shape"][::-1], [*one["shape"], 1], [1, *one["shape"]], one["shape"][1:], [0], [2**48]]
        )
    elif action == 3:
        one["dtype"] = r.choice(_DTYPES)
    elif action == 4:
        one["shape"], other["shape"] = other["shape"], one["shape"]
    else:
        tree[str(r.random())] = {"dtype": "F32", "shape": [0, r.choice((0, 2**40))], "data_offsets": [len(data)] * 2}
    return join(tree, data)


def values(blob: bytes, r: random.Random) -> bytes:
    """The header stays, the values do not."""
    tree, data = split(blob)
    changed = bytearray(data)
    start = r.randrange(len(changed) + 1)
    stop = min(len(changed), start + r.choice((1, 4, 16)))
    changed[start:stop] = r.choice((b"\xff", b"\x7f", b"\0", b"\x80")) * (stop - start)
    return join(tree, bytes(changed))


OF_FILES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(flip, cut, insert, length, header, header, header, deep, records, records, record, layout, layout, values),
)


def mutate_file(blob: bytes, r: random.Random) -> bytes:
    """One mutation of a safetensors file, or two."""
    changed = r.choice(OF_FILES)(blob, r)
    if r.random() < 0.15:
        try:
            changed = r.choice(OF_FILES)(changed, r)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
            return changed  # it was broken beyond reading
    return changed


def mutate_directory(files: Files, stranger: Files, r: random.Random) -> Files:
    """Mutate one file of a sharded directory, or exchange files. ``stranger``: those of another save."""
    shards = [name for name in files if name != INDEX]
    name, action = r.choice(shards), r.randrange(8)
    changed = dict(files)
    if action <= 2:
        changed[name] = mutate_file(files[name], r)
    elif action <= 4:
        tree = json.loads(files[INDEX])
        mutate_tree(tree, r)
        changed[INDEX] = to_json(tree).encode()
    elif action == 5:
        changed[INDEX] = r.choice((flip, cut, insert))(files[INDEX], r)
    elif action == 6:
        changed[name] = r.choice(
            [files[r.choice(shards)], stranger[r.choice([n for n in stranger if n != INDEX])], b""]
        )
    else:
        del changed[r.choice(list(changed))]
    return changed
