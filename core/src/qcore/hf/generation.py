"""What `generate` of transformers needs to run decoding steps on a graph backend."""

from __future__ import annotations

from transformers import CompileConfig


def compile_config(backend: str) -> CompileConfig:
    """The ``compile_config`` with which `generate` runs each new token as one program of ``backend``.

    ``backend``: what `torch.compile` takes, such as ``"qcore_cpu"``. Prompts run as without it, so that texts
    of all lengths share programs. The cache has to be a static one: ``cache_implementation="static"``. Each call
    that needs a longer cache than all before compiles anew: begin with the longest.

    ```python
    config = qcore.hf.compile_config("qcore_cpu")
    text = model.generate(ids, max_new_tokens=64, cache_implementation="static", compile_config=config)
    ```

    Raises `ValueError` for a backend that is not installed.
    """
    from torch._dynamo import list_backends

    known = list_backends(exclude_tags=())
    if backend not in known:
        own = [name for name in known if name.startswith("qcore_")]
        installed = f"installed ones of qcore are {', '.join(own)}" if own else "no plugin of qcore that has one is"
        raise ValueError(f"there is no backend {backend!r} of torch.compile: {installed}.")
    config = CompileConfig(backend=backend, mode=None)
    config._compile_all_devices = True  # noqa: SLF001 - else transformers compiles on some devices only
    return config
