"""DeepSeek V3 and R1, and Kimi K2: attention of latents, experts chosen by sigmoids with a bias from the best groups,
and an MLP beside them. DeepSeek V2 (deepseek_v2.py) and GLM 4.5 (glm4_moe.py) build on it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from octavo.errors import ModelError
from octavo.layers.moe import ExpertsSpec, Routing
from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.description import rotary_spec
from octavo.models.family import BlockSpec, Family, LatentSpec, Names, SharedNames, Tensors, block_spec

LATENT_EPS = 1e-6
"""Of the latents' norms, whatever the config says of others."""


def latent_block(config: NormalConfig, layer: int) -> BlockSpec:
    """Llama's block with attention of latents."""
    spec, reader = block_spec(config, layer), Reader(config.raw)
    plain, rotated = reader.integer("qk_nope_head_dim"), reader.integer("qk_rope_head_dim")
    rope, scale = rotary_spec(config.rope, rotated), (plain + rotated) ** -0.5
    if config.rope.type != "default" and config.rope.mscale_all_dim and config.rope.factor > 1:
        scale *= (0.1 * config.rope.mscale_all_dim * math.log(config.rope.factor) + 1.0) ** 2
    latent = LatentSpec(
        query_rank=reader.integer("q_lora_rank") if reader.get("q_lora_rank") else 0,
        rank=config.value_dim,
        plain_dim=plain,
        rotated_dim=rotated,
        value_dim=reader.integer("v_head_dim"),
        norm=NormSpec(LATENT_EPS),
    )
    attention = replace(spec.attention, scale=scale, value_dim=config.value_dim)
    return replace(spec, attention=attention, latent=latent, rope=replace(rope, is_interleaved=True))


def with_shared(config: NormalConfig, spec: BlockSpec) -> BlockSpec:
    """Experts chosen by sigmoids, and the MLP beside them, where the layer has any."""
    if spec.experts is None:
        return spec
    reader = Reader(config.raw)
    groups, top_groups = expert_groups(reader, spec.experts)
    routing = Routing(
        score="sigmoid",
        renormalize=bool(reader.get("norm_topk_prob")),
        scale=reader.number("routed_scaling_factor"),
        groups=groups,
        top_groups=top_groups,
        group_score="best two",
        has_choice_bias=True,
        is_exact=True,
    )
    return replace(spec, experts=replace(spec.experts, routing=routing), shared_size=shared_size(reader, spec.experts))


def expert_groups(reader: Reader, experts: ExpertsSpec) -> tuple[int, int]:
    """(groups of experts, how many of them are chosen from). ModelError where experts do not divide so."""
    groups, top_groups = reader.integer("n_group"), reader.integer("topk_group")
    size = experts.num_experts // groups
    if experts.num_experts % groups or (groups > 1 and size < 2) or not experts.top_k <= top_groups * size:
        raise ModelError(
            f"config.json: {experts.num_experts} experts in n_group {groups} groups, of which topk_group {top_groups} "
            f"give num_experts_per_tok {experts.top_k}: they don't divide so"
        )
    return groups, top_groups


def shared_size(reader: Reader, experts: ExpertsSpec) -> int:
    """Of the MLP beside the experts, which counts as so many of them."""
    return reader.integer("n_shared_experts") * experts.intermediate_size if reader.get("n_shared_experts") else 0


def without_drafters(config: NormalConfig, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Layers past the last one predict tokens further ahead, and are not run."""
    for name, tensor in tensors:
        found = re.match(r"model\.layers\.(\d+)\.", name)
        if found is None or int(found[1]) < config.num_layers:
            yield name, tensor


def deepseek_block(config: NormalConfig, layer: int) -> BlockSpec:
    """Of V3 and its kin."""
    spec = latent_block(config, layer)
    assert spec.rope is not None
    is_interleaved = bool(Reader(config.raw).get("rope_interleave"))
    return with_shared(config, replace(spec, rope=replace(spec.rope, is_interleaved=is_interleaved)))


V3 = {
    "max_position_embeddings": 4096,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
}
DEFAULTS = {"deepseek_v3": V3, "kimi_k2": V3}
"""model_type -> what its config.json means where it is silent."""

NAMES = Names(shared=SharedNames(mlp="mlp.shared_experts", gate=""))
FAMILY = Family(names=NAMES, block=deepseek_block, convert=without_drafters)
