"""Tiny checkpoints with random weights and a real tokenizer, for tests and the testbed.

They say nothing sensible, but their logits lie far apart, so that two right computations of the
same model pick the same tokens. Both families take any Unicode text and speak ChatML.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKER = "tiny_model.json"  # written last; holds what the folder was made from
FORMAT = 1  # raised when this file makes other folders from the same arguments

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}
"""

# enough different words for a vocabulary of 512
TRAINING_TEXT = """
A question arrives together with the passages that were found for it. Most of those passages have
been read before, by the same model, for somebody else. Their keys and values are still in memory,
so the server puts them side by side and computes only what has to be new: the question itself, and
the few tokens whose meaning depends on a neighbour. What was saved is time. The first word of the
answer comes sooner, and the other people in the queue wait less.

You are a helpful assistant. Answer with the documents below and keep the answer short. Who built
the bridge, and in which year? Where does the river meet the sea? How many ships were lost that
winter? The keeper of the lighthouse wrote down the weather every two hours, the height of the water
and the names of the vessels that passed. On the third of March 1847 he noted: fog until noon, wind
from the west, nothing seen. Numbers such as 0, 12, 345, 6789 and 3.14 stand in the text as well,
and so do lists: apples, pears, plums, cherries; Monday, Tuesday, Wednesday; red, green, blue.

def mean(values): return sum(values) / len(values)  # for each value in values
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySpec:
    """Everything that decides a folder's content."""

    family: Literal["qwen3", "llama"]
    seed: int
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie: bool
    dtype: str
    rope_scaling: Mapping[str, Any] | None = None
    format: int = FORMAT


def make_tiny_qwen3(
    directory: Path | str,
    *,
    seed: int = 0,
    num_layers: int = 4,
    hidden: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    vocab_size: int = 512,
    max_position_embeddings: int = 8192,
    tie: bool = False,
    dtype: str = "float32",
) -> Path:
    """A Qwen3 folder (norms on queries and keys); returns it. Made once for the same arguments."""
    spec = TinySpec(
        family="qwen3",
        seed=seed,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        tie=tie,
        dtype=dtype,
    )
    return _make(Path(directory), spec)


def make_tiny_llama(
    directory: Path | str,
    *,
    seed: int = 0,
    num_layers: int = 4,
    hidden: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    vocab_size: int = 512,
    max_position_embeddings: int = 8192,
    tie: bool = False,
    dtype: str = "float32",
    rope_scaling: Mapping[str, Any] | None = None,
) -> Path:
    """A Llama folder with a BOS token; returns it. Made once for the same arguments.

    rope_scaling: as in a config.json, such as `{"rope_type": "linear", "factor": 2.0}`.
    """
    spec = TinySpec(
        family="llama",
        seed=seed,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        tie=tie,
        dtype=dtype,
        rope_scaling=rope_scaling,
    )
    return _make(Path(directory), spec)


def _make(directory: Path, spec: TinySpec) -> Path:
    made_from = json.dumps(asdict(spec), sort_keys=True)
    marker = directory / MARKER
    if marker.is_file() and marker.read_text() == made_from:
        return directory
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    tokenizer = _train_tokenizer(spec)
    tokenizer.save_pretrained(directory)
    _random_model(spec, tokenizer).save_pretrained(directory)
    marker.write_text(made_from)
    return directory


def _train_tokenizer(spec: TinySpec) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: nothing is unknown
        show_progress=False,
    )
    bpe.train_from_iterator(TRAINING_TEXT.splitlines(), trainer)
    if bpe.get_vocab_size() != spec.vocab_size:
        # a model must never sample an id that the tokenizer can not decode
        raise ValueError(
            f"the training text gives {bpe.get_vocab_size()} tokens, not {spec.vocab_size}"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT if spec.family == "llama" else None,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        model_max_length=spec.max_position_embeddings,
        chat_template=CHAT_TEMPLATE,
    )


def _random_model(
    spec: TinySpec, tokenizer: PreTrainedTokenizerFast
) -> Qwen3ForCausalLM | LlamaForCausalLM:
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[spec.family]
    config = config_class(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden,
        intermediate_size=3 * spec.hidden,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            **(spec.rope_scaling or {}),
        },
        tie_word_embeddings=spec.tie,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # the usual 0.02 leaves near-ties between the best tokens
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = model_class(config)
    return model.to(getattr(torch, spec.dtype))
