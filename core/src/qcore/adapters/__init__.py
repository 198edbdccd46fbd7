"""LoRA adapters of peft over quantized layers; ``import qcore.adapters`` registers them with peft.

After the import `peft.get_peft_model` and `peft.PeftModel.from_pretrained` put LoRA over `qcore.nn.QuantizedLinear`,
`QuantizedEmbedding` and `QuantizedConv2d`; peft treats other layers as before. Needs the extra ``peft``.

The first quantized layer of a program that has imported peft imports this module, by its name.

May import: nn and the floors below it, and peft. Imported by: no package. Users import it.
"""

from .layers import LoraConv2d, LoraEmbedding, LoraLinear, adopt_
from .registration import register
from .training import prepare_model_for_kbit_training

__all__ = ["LoraConv2d", "LoraEmbedding", "LoraLinear", "adopt_", "prepare_model_for_kbit_training", "register"]

register()
