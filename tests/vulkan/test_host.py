"""What the host keeps beside weights: biases by their values, programs by their form. No device is needed."""

from __future__ import annotations

import pytest
import torch

from qcore.errors import FormatError
from qcore_vulkan.bias import Biases
from qcore_vulkan.programs import Programs


class Device:
    """Takes uploads."""

    def __init__(self):
        self.uploads = []

    def upload(self, tensor):
        assert tensor.dtype == torch.float32
        self.uploads.append(tensor)
        return object()


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def biases(device):
    return Biases(device, 4)


class TestBiases:
    def test_one_upload_as_long_as_the_numbers_stay(self, biases, device):
        bias = torch.arange(4.0)
        first = biases.buffer(bias)
        assert biases.buffer(bias) is first
        assert biases.buffer(bias.clone()) is first
        assert biases.buffer(bias.view(2, 2).view(4)) is first
        assert len(device.uploads) == 1

    def test_a_change_in_place_is_noticed(self, biases, device):
        bias = torch.arange(4.0)
        first = biases.buffer(bias)
        bias.add_(1)
        second = biases.buffer(bias)
        assert second is not first
        assert device.uploads[-1].tolist() == [1, 2, 3, 4]
        bias.sub_(1)
        assert biases.buffer(bias) is first

    def test_inference_tensors_carry_no_version(self, biases, device):
        with torch.inference_mode():
            bias = torch.arange(4.0)
            first = biases.buffer(bias)
            assert biases.buffer(bias) is first
            bias.add_(1)
            assert biases.buffer(bias) is not first

    def test_equal_numbers_of_another_dtype_are_another_bias(self, biases, device):
        assert biases.buffer(torch.ones(4)) is not biases.buffer(torch.ones(4, dtype=torch.bfloat16))
        assert [upload.tolist() for upload in device.uploads] == [[1.0] * 4] * 2

    def test_few_are_kept(self, biases, device):
        for value in range(20):
            biases.buffer(torch.full((4,), float(value)))
        assert len(biases._known) == 4

    def test_what_is_kept_does_not_follow_the_tensor(self, biases, device):
        bias = torch.nn.Parameter(torch.arange(4.0))
        biases.buffer(bias)
        assert not device.uploads[0].requires_grad
        assert device.uploads[0].data_ptr() != bias.data_ptr()

    def test_another_shape_is_an_error(self, biases):
        with pytest.raises(FormatError, match=r"\(5,\).*needs \(4,\)"):
            biases.buffer(torch.zeros(5))

    def test_what_is_written_past_the_version_is_noticed(self, biases, device):
        bias = torch.nn.Parameter(torch.arange(4.0))
        first = biases.buffer(bias)
        bias.data.add_(1)
        assert biases.buffer(bias) is not first
        bias.data = torch.arange(4.0)
        assert biases.buffer(bias) is first
        bias.detach().numpy()[0] = 7
        assert device.uploads[-1][0] == 1
        biases.buffer(bias)
        assert device.uploads[-1][0] == 7

    def test_nan_is_told_by_its_bits(self, biases, device):
        bias = torch.nn.Parameter(torch.tensor([1.0, float("nan"), 2.0, 3.0]))
        assert biases.buffer(bias) is biases.buffer(bias.detach().clone())
        assert len(device.uploads) == 1


class TestPrograms:
    def test_made_once(self):
        programs, made = Programs(2), []
        for _ in range(3):
            assert programs.get("a", lambda: made.append(1) or "program") == "program"
        assert made == [1]

    def test_the_least_recently_used_goes_first(self):
        programs = Programs(2)
        for key in "abac":
            programs.get(key, lambda key=key: key)
        assert programs.get("a", lambda: "anew") == "a"
        assert programs.get("b", lambda: "anew") == "anew"
        assert len(programs) == 2

    def test_put_replaces(self):
        programs = Programs(2)
        programs.put("a", 1)
        programs.put("a", 2)
        assert programs.get("a", lambda: 3) == 2
        programs.clear()
        assert not len(programs)
