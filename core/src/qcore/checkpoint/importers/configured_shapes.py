"""Shapes of linear layers by their names, from the configuration of a transformers model of text.

For files that do not contain them. The number of elements is compared where the configuration tells N: layers of
several kinds have the same name, such as experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NOT_TEXT = re.compile(r"visi|visual|image|audio|speech|vit$|clip|tower|project|connector|aligner|resampler")
"""In parts of names of models beside that of text, which the configuration describes elsewhere."""
_TEXT_LAYER = re.compile(
    r"((model|language_model|transformer|decoder|encoder|gpt_neox)\.)*((layers|h|blocks)\.[0-9]+\..*)?"
)
"""Paths of layers of text models: their K is that of the table below even if their N is not."""
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Names of the configuration of the text model in one of several modalities."""


def shapes_by_name(config: Mapping[str, Any], layer: str, count: int) -> set[tuple[int, int]]:
    """The shapes ``(N, K)`` of ``count`` elements that a layer may have; none for names and models that are not known.

    ``config``: the values of ``config.json``; ``layer``: such as ``"model.layers.0.self_attn.q_proj"``.
    """
    *path, name = layer.split(".")
    if name not in _SHAPES or any(map(_NOT_TEXT.search, path)):
        return set()
    sizes = _Sizes(_of_text(config))
    shapes = [(n, k) for n, k in _SHAPES[name](sizes, path) if k and k > 0]
    found = {(n, k) for n, k in shapes if n and n > 0 and n * k == count}
    if found or name in _N_IS_HIDDEN or not _TEXT_LAYER.fullmatch(".".join((*path, ""))):
        return found
    return {(count // k, k) for _, k in shapes if count and count % k == 0}


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = next((config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), dict)), None)
    return config if inner is None else _of_text(inner)


class _Sizes:
    """Whole numbers of a configuration; None for what it does not contain, as for products with that."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __getitem__(self, name: str) -> int | None:
        value = self._config.get(name)
        return value if type(value) is int else None

    def first(self, *names: str) -> int | None:
        """The first of these that there is."""
        return next((value for name in names if (value := self[name]) is not None), None)

    @property
    def labels(self) -> int | None:
        found = self._config.get("id2label")
        return len(found) if isinstance(found, dict) else None

    @property
    def hidden(self) -> int | None:
        return self.first("hidden_size", "n_embd", "d_model")

    @property
    def heads(self) -> int | None:
        return self.first("num_attention_heads", "n_head")

    @property
    def kv_heads(self) -> int | None:
        names = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
        return self.heads if not any(name in self._config for name in names) else self.first(*names)

    @property
    def head(self) -> int | None:
        """Of queries and keys."""
        if self["head_dim"] is not None or not self.hidden or not self.heads:
            return self["head_dim"]
        return self.hidden // self.heads

    @property
    def latent_head(self) -> int | None:
        """Of queries and keys in latent attention."""
        plain, rope = self["qk_nope_head_dim"], self["qk_rope_head_dim"]
        return None if plain is None or rope is None else plain + rope

    @property
    def inner(self) -> int | None:
        return self.first("intermediate_size", "ffn_hidden_size")


_Shapes = Iterator[tuple["int | None", "int | None"]]


def _times(*values: int | None) -> int | None:
    product = 1
    for value in values:
        if value is None:
            return None
        product *= value
    return product


def _query(sizes: _Sizes, _path: list[str]) -> _Shapes:
    yield _times(sizes.heads, sizes.head), sizes.hidden
    if sizes.latent_head is not None:
        yield _times(sizes.heads, sizes.latent_head), sizes.hidden


def _key(sizes: _Sizes, _path: list[str]) -> _Shapes:
    yield _times(sizes.kv_heads, sizes.head), sizes.hidden


def _fused_qkv(sizes: _Sizes, _path: list[str]) -> _Shapes:
    query = _times(sizes.heads, sizes.head)
    for kv_heads in (sizes.kv_heads, 1):  # one in a model of multi-query attention
        key = _times(kv_heads, sizes.head)
        yield (None if query is None or key is None else query + 2 * key), sizes.hidden


def _attention_output(sizes: _Sizes, _path: list[str]) -> _Shapes:
    value = sizes["v_head_dim"]
    yield sizes.hidden, _times(sizes.heads, sizes.head if value is None else value)


def _inner(sizes: _Sizes, path: list[str]) -> Iterator[int | None]:
    """Widths of the feed-forward layer that ``path`` names."""
    if "experts" in path:
        own = sizes["moe_intermediate_size"]
        yield sizes.inner if own is None else own
    elif "shared_expert" in path:
        yield sizes["shared_expert_intermediate_size"]
    elif "shared_experts" in path:
        yield _times(sizes["moe_intermediate_size"], sizes.first("n_shared_experts", "num_shared_experts"))
    else:
        yield sizes.inner


def _up(sizes: _Sizes, path: list[str]) -> _Shapes:
    yield from ((inner, sizes.hidden) for inner in _inner(sizes, path))


def _gate_up(sizes: _Sizes, path: list[str]) -> _Shapes:
    yield from ((_times(2, inner), sizes.hidden) for inner in _inner(sizes, path))


def _down(sizes: _Sizes, path: list[str]) -> _Shapes:
    yield from ((sizes.hidden, inner) for inner in _inner(sizes, path))


def _gate(sizes: _Sizes, _path: list[str]) -> _Shapes:
    yield sizes.first("num_experts", "num_local_experts", "n_routed_experts"), sizes.hidden


def _shared_gate(sizes: _Sizes, _path: list[str]) -> _Shapes:
    yield 1, sizes.hidden


def _head(sizes: _Sizes, _path: list[str]) -> _Shapes:
    yield sizes["vocab_size"], sizes.hidden


def _score(sizes: _Sizes, _path: list[str]) -> _Shapes:
    yield sizes.labels, sizes.hidden


def _query_down(sizes: _Sizes, _path: list[str]) -> _Shapes:
    yield sizes["q_lora_rank"], sizes.hidden


def _key_value_down(sizes: _Sizes, _path: list[str]) -> _Shapes:
    rank, rope = sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]
    yield (None if rank is None or rope is None else rank + rope), sizes.hidden


def _query_up(sizes: _Sizes, _path: list[str]) -> _Shapes:
    yield _times(sizes.heads, sizes.latent_head), sizes["q_lora_rank"]


def _key_value_up(sizes: _Sizes, _path: list[str]) -> _Shapes:
    plain, value = sizes["qk_nope_head_dim"], sizes["v_head_dim"]
    if plain is not None and value is not None:
        yield _times(sizes.heads, plain + value), sizes["kv_lora_rank"]


_SHAPES = {
    "q_proj": _query,
    **dict.fromkeys(("k_proj", "v_proj"), _key),
    **dict.fromkeys(("qkv_proj", "W_pack", "wqkv", "query_key_value"), _fused_qkv),
    "o_proj": _attention_output,
    **dict.fromkeys(("gate_proj", "up_proj", "dense_h_to_4h"), _up),
    "gate_up_proj": _gate_up,
    "down_proj": _down,
    "gate": _gate,
    "shared_expert_gate": _shared_gate,
    "lm_head": _head,
    "score": _score,
    "q_a_proj": _query_down,
    "kv_a_proj_with_mqa": _key_value_down,
    "q_b_proj": _query_up,
    "kv_b_proj": _key_value_up,
}
_N_IS_HIDDEN = ("down_proj", "o_proj")
"""Layers whose K differs from model to model, and whose N is the hidden size."""
