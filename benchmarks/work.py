"""How much of full prefill's work a configuration does, counted as the walk does it.

The unit is one token through all matrix products of one layer. A token that only gets its queries,
keys and values at a layer counts `projection_share` of one.
"""

from dataclasses import dataclass
from pathlib import Path

from cluster.prompt import Prompt
from planner import RecomputeConfig, Signal
from replicas.selection import kept_candidates, selection_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptShape:
    """A prompt whose prefix and chunks are stored."""

    num_prefix: int
    num_context: int
    num_suffix: int

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + self.num_context + self.num_suffix


def token_layers(
    config: RecomputeConfig,
    shape: PromptShape,
    *,
    num_layers: int,
    projection_share: float,
    filters: bool = True,
) -> float:
    """Token-layers of a prefill and of the engine's step for the prompt's last token.

    filters: False where every Probe layer of `kv_dev` walks all candidates
    """
    w, p = config.depths(num_layers)
    projected, rest = projection_share, 1.0 - projection_share
    every = float(num_layers)  # the last token, by the engine itself
    if w == num_layers:  # nobody reads what follows the last layer's keys and values
        return every + shape.num_tokens * (num_layers - rest)
    every += shape.num_tokens * w
    is_ranked = 0.0 < config.coverage < 1.0 and shape.num_context > 0
    if is_ranked and config.signal is Signal.KV_DEV:
        walking = shape.num_tokens
        for step in range(1, p + 1):
            every += projected * walking
            if step < p:
                kept = shape.num_context
                if filters:
                    kept = kept_candidates(config.coverage, shape.num_context, step, p)
                walking = kept + shape.num_suffix
                every += rest * walking
    elif is_ranked and config.signal is Signal.QCI and p > 0:
        every += shape.num_suffix * (p - rest)
    elif is_ranked and config.signal is Signal.QCI_FINAL:
        every += shape.num_suffix * (num_layers - rest)
    patched = selection_size(config.coverage, shape.num_context) + shape.num_suffix - 1
    return every + patched * (num_layers - w - rest)


def prompt_share(
    config: RecomputeConfig,
    prompt: Prompt,
    *,
    num_layers: int,
    projection_share: float,
    filters: bool = True,
) -> float:
    """Token-layers of a configuration over those of full prefill."""
    shape = PromptShape(
        num_prefix=len(prompt.prefix_ids),
        num_context=sum(map(len, prompt.chunks)),
        num_suffix=len(prompt.suffix_ids),
    )

    def work(one: RecomputeConfig) -> float:
        return token_layers(
            one,
            shape,
            num_layers=num_layers,
            projection_share=projection_share,
            filters=filters,
        )

    return work(config) / work(RecomputeConfig(warmup_depth=None, probe_len=0))


def projection_share(model_dir: Path) -> float:
    """Share of a layer's weights that make its queries, keys and values."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    hidden, num_heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // num_heads
    qkv = hidden * head_dim * (num_heads + 2 * config.num_key_value_heads)
    others = hidden * head_dim * num_heads + 3 * hidden * config.intermediate_size
    return float(qkv / (qkv + others))
