"""The modules of qcore-vllm that import vLLM, over what stands in for it."""

from __future__ import annotations

import engine_models
import pytest
import torch
import vllm_stand_in


@pytest.fixture
def glue():
    """Modules by name, with the plugin registered."""
    with vllm_stand_in.installed() as modules:
        import qcore_vllm

        qcore_vllm.register()
        qcore_vllm.register()  # vLLM may call it more than once
        yield modules


@pytest.fixture
def serve(glue):
    """``serve(folder, ranks, settings)``: the model of each rank, as the registered loader makes them."""

    def start(folder, ranks=1, settings=None, dtype=torch.float32, moe=False, tied=False, by_expert=False):
        made = []
        for rank in range(ranks):
            config = vllm_stand_in.METHODS["qcore"].from_config({"quant_method": "qcore", **(settings or {})})
            loader = vllm_stand_in.LOADERS["auto"](vllm_stand_in.LoadConfig())
            engine = vllm_stand_in.VllmConfig(
                config, lambda given: engine_models.EngineModel(given, moe, tied, by_expert, dtype)
            )
            with vllm_stand_in.placed(rank, ranks):
                made.append(loader.load_model(engine, vllm_stand_in.ModelConfig(str(folder), dtype)))
        return made

    return start
