"""Saves that die at every step they take with files, or are killed at any time while others load and save.

Run in a process of its own, which forks the savers: ``crashing.py DIRECTORY steps``, ``... "one saver" SECONDS`` or
``... "two savers" SECONDS``. Prints counts as JSON; a failed assertion says what was wrong.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import torch

from qcore import CheckpointError
from qcore.checkpoint import inspect, quantize_checkpoint, save, writing
from qcore.checkpoint.archive import Archive

_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "fcntl.flock", "os.chmod", "os.chown"}
_armed: list[int] = []


def _step(event: str, args: tuple[object, ...]) -> None:
    if _armed and event in _EVENTS and (event != "open" or _in_reach(args[0])):
        _armed[0] -= 1
        if _armed[0] < 0:
            os._exit(9)


def _in_reach(path: object) -> bool:
    return isinstance(path, (str, bytes)) and os.fsdecode(path).startswith(sys.argv[1])


def state(value: float, names: str = "abcd") -> dict[str, torch.Tensor]:
    """Tensors that all hold one value."""
    return {f"{name}.weight": torch.full((4, 8), value) for name in names}


def content(path: Path) -> tuple[float, ...] | None:
    """The values in a checkpoint, one for each that differs; None where there is none."""
    try:
        with Archive.open(path) as archive:
            tensors = [archive.read(name) for name in archive.plain_names()]
            tensors += [archive.quantized(name).dequantize() for name in archive.records]
    except CheckpointError:
        heads = [path, path / "model.safetensors", path / "model.safetensors.index.json"]
        if any(head.is_file() for head in heads):
            raise
        return None
    return tuple(sorted({round(float(value), 3) for tensor in tensors for value in tensor.unique()}))


def saving(value: float, limit: int | None, names: str = "abcd") -> Callable[[Path], None]:
    return lambda path: save(state(value, names), path, max_shard_size=limit)


def quantizing(value: float, limit: int | None, **lacks: bool) -> Callable[[Path], None]:
    """``lacks``: functions of `writing` that answer that the system cannot do what they are for."""

    def run(path: Path) -> None:
        with contextlib.ExitStack() as stack:
            for name in lacks:
                stack.enter_context(mock.patch.object(writing, name, return_value=False))
            source = path.parent / f"float{value:.0f}"
            quantize_checkpoint(source, path, "w8a16", max_shard_size=limit, overwrite=True)

    return run


def belongs(path: Path, value: float) -> bool:
    """Whether the configuration in a directory is that of these weights, or there is none: other tools need one."""
    config = path / "config.json"
    return not config.exists() or json.loads(config.read_bytes())["value"] == value


def empty(path: Path) -> None:
    path.mkdir()


SCENARIOS: dict[str, tuple[list[Callable[[Path], None]], Callable[[Path], None]]] = {
    "shards to shards": ([saving(1, 200)], saving(2, 300)),
    "shards twice to shards": ([saving(3, 200), saving(1, 200)], saving(2, 200, "abcde")),
    "shards to one file": ([saving(1, 200)], saving(2, None)),
    "one file to shards": ([saving(1, None)], saving(2, 200)),
    "one file to one file": ([saving(1, None)], saving(2, None)),
    "to a new directory": ([], saving(2, 200)),
    "to an empty directory": ([empty], saving(2, 200)),
    "quantized over shards": ([quantizing(1, 100)], quantizing(2, 100)),
    "quantized over one file": ([quantizing(1, None)], quantizing(2, 100)),
    "quantized in place": ([quantizing(1, 100)], quantizing(2, 100, can_be_replaced=False)),
    "quantized in place over one file": ([quantizing(1, None)], quantizing(2, None, can_be_replaced=False)),
    "quantized without an exchange": ([quantizing(1, 100)], quantizing(2, None, exchange=False)),
}


def crash(path: Path, act: Callable[[Path], None], step: int) -> bool:
    """Run ``act`` in a child that dies before its file operation number ``step``; whether it did."""
    child = os.fork()
    if not child:
        _armed.append(step)
        act(path)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), status
    return status == 9


def leftovers(root: Path, path: Path) -> list[str]:
    """Files that the checkpoint at ``path`` does not need."""
    needed = {path / name for name in inspect(path).shards} if path.is_dir() else {path}
    weights = [file for file in root.rglob("*") if file.suffix == ".safetensors" and "float" not in file.parts[-2]]
    return [str(f) for f in [*weights, *root.rglob("*.tmp")] if f not in needed]


def run(root: Path, name: str, target: str) -> int:
    """Crash before each step of a scenario in turn; how many steps there are."""
    before, act = SCENARIOS[name]
    clear(root)
    for earlier in before:
        earlier(root / target)
    old_state = content(root / target)
    shutil.move(root, root.with_name("before"))
    for step in range(1000):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(root.with_name("before"), root)
        path = root / target
        died = crash(path, act, step)
        found = content(path)
        assert found in (old_state, (2.0,)), (step, found)
        if name.startswith("quantized"):
            assert found is not None
            assert belongs(path, *found), step
        if not died:
            assert found == (2.0,), found
            assert not leftovers(root, path), leftovers(root, path)
            assert (path / "config.json").exists() is name.startswith("quantized")
            shutil.rmtree(root.with_name("before"))
            return step
        saving(5, 200 if not target.endswith(".safetensors") else None)(path)
        assert content(path) == (5.0,), (step, content(path))
        assert not leftovers(root, path), (step, leftovers(root, path))
    raise AssertionError("it never ends")


def clear(root: Path) -> None:
    for old in root.iterdir():
        if not old.name.startswith("float"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def fork(act: Callable[[], None]) -> int:
    child = os.fork()
    if not child:
        try:
            act()
        except BaseException:  # noqa: BLE001 - nothing may get back into the copy of the parent's stack
            traceback.print_exc()
        os._exit(1)
    return child


@contextlib.contextmanager
def killed(acts: Iterable[Callable[[], None]]) -> Iterator[None]:
    """Run ``acts`` in children, which are killed at the end of the block."""
    children = [fork(act) for act in acts]
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [-signal.SIGKILL] * len(ends), "a saver raised"


def save_forever(path: Path, values: tuple[int, ...]) -> None:
    limits = {1: 100, 2: 200, 3: None, 4: 300, 5: 100, 6: None}
    for value in itertools.cycle(values):
        save(state(value), path, max_shard_size=limits[value])


def disturbed(root: Path, seconds: float, savers: tuple[tuple[int, ...], ...]) -> dict[str, int]:
    """Load for some time while others save to the same place and are killed again and again."""
    path, generator = root / "busy", random.Random(0)
    save(state(1), path, max_shard_size=100)
    counts = {"loads": 0, "kills": 0, "values": 0}
    seen = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with killed(functools.partial(save_forever, path, values) for values in savers):
            life = time.monotonic() + generator.choice((0.01, 0.05, 0.2))
            while time.monotonic() < life:
                found = content(path)
                assert found is not None, "nothing was there"
                assert len(found) == 1, found
                seen.add(found)
                counts["loads"] += 1
        counts["kills"] += len(savers)
        found = content(path)
        assert found is not None, "nothing is left"
        assert len(found) == 1, found
    save(state(7), path, max_shard_size=100)
    assert content(path) == (7.0,)
    assert not leftovers(root, path), leftovers(root, path)
    return {**counts, "values": len(seen)}


def every_step(root: Path) -> dict[str, int]:
    for value in (1, 2):
        save(state(value), root / f"float{value}", max_shard_size=200)
        (root / f"float{value}" / "config.json").write_text(json.dumps({"value": value}))
    inspect(root / "float1")
    sys.addaudithook(_step)
    steps = {name: run(root, name, "d") for name in SCENARIOS}
    SCENARIOS["a file to a file"] = ([saving(1, None)], saving(2, None))
    return {**steps, "a file to a file": run(root, "a file to a file", "m.safetensors")}


def main() -> None:
    warnings.simplefilter("ignore")  # newer Pythons warn of forks beside torch's threads
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # it is processes that die here, not disks
    root, what = Path(sys.argv[1]) / "here", sys.argv[2]
    root.mkdir()
    if what == "steps":
        print(json.dumps(every_step(root)))
    else:
        savers = ((1, 2, 3, 4),) if what == "one saver" else ((1, 2, 3), (4, 5, 6))
        print(json.dumps(disturbed(root, float(sys.argv[3]), savers)))


if __name__ == "__main__":
    main()
