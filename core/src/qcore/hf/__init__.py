"""qcore inside transformers: `QcoreConfig` for ``from_pretrained``, `adopt` for the checkpoints of other tools.

`compile_config` lets ``generate`` run its steps on a graph backend.

Importing this module registers the quantization method ``"qcore"`` with transformers 5, and lets ``save_pretrained``
write quantized layers; the first quantized layer of a program that has imported transformers imports it, by its
name. May import: everything below the command line. Imported by: no package. Users import it.

```python
import qcore.hf
from transformers import AutoModelForCausalLM

config = qcore.hf.QcoreConfig("w4a16-g128", exclude=["lm_head"])
model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)  # quantized while it is loaded
model.save_pretrained(out)
model = AutoModelForCausalLM.from_pretrained(out)  # the same bits
```
"""

from importlib import metadata

try:
    from .config import QcoreConfig
    from .generation import compile_config
    from .quantizer import QcoreQuantizer, adopt
    from .saving import install
except ImportError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    try:
        here = f"transformers {metadata.version('transformers')} is installed"
    except metadata.PackageNotFoundError:
        here = "transformers is not installed"
    raise ImportError(
        f"qcore.hf cannot be imported: it needs transformers 5.23 or later, and {here}.\npip install 'qcore[hf]'"
    ) from error

__all__ = ["QcoreConfig", "QcoreQuantizer", "adopt", "compile_config"]

install()
