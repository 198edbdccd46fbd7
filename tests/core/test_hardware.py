from __future__ import annotations

import pluggy
import pytest

from qcore.discovery import hardware


def _pci(root, name, vendor, kind):
    device = root / "sys/bus/pci/devices" / name
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


def test_nothing_on_a_bare_machine(tmp_path):
    assert hardware.look(tmp_path) == ()


@pytest.mark.parametrize(
    ("vendor", "kind", "name", "first"),
    [
        ("0x10de", "0x030200", "NVIDIA GPU", "cuda"),
        ("0x1002", "0x030000", "AMD GPU", "cuda"),
        ("0x8086", "0x030000", "Intel GPU", "xpu"),
        ("0x1ae0", "0x120000", "Google TPU", "xla"),
    ],
)
def test_pci_devices(tmp_path, vendor, kind, name, first):
    _pci(tmp_path, "0000:01:00.0", vendor, kind)
    (found,) = hardware.look(tmp_path)
    assert (found.name, found.plugins[0], found.seen) == (name, first, "PCI 0000:01:00.0")
    assert found.hint(set()) == f"{name} present (PCI 0000:01:00.0), but no plugin for it: pip install qcore-{first}"
    assert found.hint({"torch", found.plugins[-1]}) is None


def test_other_functions_of_a_vendor_do_not_count(tmp_path):
    _pci(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # the card's sound
    _pci(tmp_path, "0000:02:00.0", "0x8086", "0x020000")  # a network card
    _pci(tmp_path, "0000:00:0b.0", "0x8086", "0x120000")  # the NPU of a processor
    assert hardware.look(tmp_path) == ()


def test_unreadable_files_are_passed_over(tmp_path):
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0/vendor").mkdir(parents=True)
    assert hardware.look(tmp_path) == ()


@pytest.mark.parametrize(("file", "name"), [("nvidia0", "NVIDIA GPU"), ("kfd", "AMD GPU"), ("accel0", "Google TPU")])
def test_device_files_where_the_pci_tree_is_hidden(tmp_path, file, name):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / file).touch()
    (found,) = hardware.look(tmp_path)
    assert (found.name, found.seen) == (name, f"/dev/{file}")


def test_one_entry_per_kind(tmp_path):
    for slot in ("0000:01:00.0", "0000:02:00.0"):
        _pci(tmp_path, slot, "0x10de", "0x030200")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert [found.seen for found in hardware.look(tmp_path)] == ["PCI 0000:01:00.0"]


def test_looked_for_once_per_process():
    assert hardware.present() is hardware.present()


def test_the_version_of_a_distribution():
    assert hardware.installed_version("pluggy") == pluggy.__version__
    assert hardware.installed_version("no-such-distribution-at-all") == ""


def test_a_word_from_a_file(tmp_path):
    (tmp_path / "vendor").write_bytes(b" 0x10de\xff\n")
    assert hardware.word(tmp_path / "vendor") == "0x10de\N{REPLACEMENT CHARACTER}"
    assert hardware.word(tmp_path / "missing") == hardware.word(tmp_path) == ""
