"""The parameters and attributes of an experts module of transformers 5."""

import torch
from torch import nn


class FusedParameters(nn.Module):
    """Random weights of ``experts`` experts with ``h`` features outside and ``inner`` inside; without a gate."""

    def __init__(self, experts: int, h: int, inner: int, *, transposed: bool, biased: bool) -> None:
        super().__init__()
        for which, (n, k) in (("gate_up_proj", (2 * inner, h)), ("down_proj", (h, inner))):
            shape = (experts, *((k, n) if transposed else (n, k)))
            self.register_parameter(which, nn.Parameter(torch.randn(shape)))
            if biased:
                self.register_parameter(f"{which}_bias", nn.Parameter(torch.randn(experts, n)))
        self.num_experts, self.is_transposed, self.has_bias, self.has_gate = experts, transposed, biased, True
