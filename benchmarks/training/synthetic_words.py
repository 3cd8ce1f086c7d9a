"""The vocabulary of the synthetic model: 512 words, one token each, so that prompts are text.

Statements of variable tracking read `QVXJA = 17 ;` and `BLWEK = QVXJA ;`. A passage reads
`passage … QVXJA = here ; … next 31`: the id of a passage stands at the end of the one before it.
Questions are `value QVXJA` and `which QVXJA BLWEK TROIS id`.
"""

import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

PAD, BOS, EQUALS, SEMICOLON, VALUE, WHICH, ID, PASSAGE, NEXT, EOS, HERE, UNKNOWN = range(12)
SPECIAL_WORDS = (
    "<pad>", "<bos>", "=", ";", "value", "which", "id", "passage", "next", "<eos>", "here", "<unk>",
)  # fmt: skip
FIRST_NAME, NUM_NAMES = 16, 64
FIRST_NUMBER, NUM_NUMBERS = 80, 64
FIRST_FILLER, NUM_FILLERS = 144, 368
VOCAB_SIZE = 512

# A name and a number whose indices add up to a multiple of this are never a target in training:
# the questions of an evaluation are about such pairs only.
HELD_OUT_EVERY = 8

CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %} {{ message.content }}{% endfor %}"


def vocabulary() -> list[str]:
    """The word of every token id, always the same."""
    rng = random.Random("cachesmith synthetic vocabulary")
    words = list(SPECIAL_WORDS)
    words += [f"<reserved{i}>" for i in range(FIRST_NAME - len(words))]
    words += _distinct(lambda: "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)), NUM_NAMES)
    words += [str(10 + i) for i in range(NUM_NUMBERS)]
    words += _distinct(lambda: _syllable(rng) + _syllable(rng), NUM_FILLERS)
    assert len(words) == VOCAB_SIZE
    return words


def build_tokenizer() -> Tokenizer:
    """Words apart by white space, `<bos>` before a text; what is not a word becomes `<unk>`."""
    ids = {word: i for i, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL_WORDS[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>", "<unk>"])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def is_held_out(name_indices, number_indices):
    """Whether pairs of a name and a number are for evaluation alone; ints or arrays."""
    return (name_indices + number_indices) % HELD_OUT_EVERY == 0


def _syllable(rng: random.Random) -> str:
    return rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") + rng.choice(["", "", "n", "r", "s"])


def _distinct(make, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[make()] = None
    return list(found)
