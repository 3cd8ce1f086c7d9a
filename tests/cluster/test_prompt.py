"""Prompts: what the model sees, and that chunks do not depend on what is around them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.api_types import Document, Message
from cluster.config import PromptConfig
from cluster.errors import ApiError, ChatTemplateError
from cluster.prompt import Prompt, PromptBuilder, fill
from cluster.token_cache import TokenCache
from cluster.tokenizer import HfTokenizer
from tests.fakes.byte_tokenizer import write_model_dir


@pytest.fixture
def builder(tokenizer: HfTokenizer) -> PromptBuilder:
    return PromptBuilder(tokenizer, PromptConfig(intro="Read:\n", max_chunk_tokens=100))


def user(text: str) -> Message:
    return Message(role="user", content=text)


def docs(*texts: str) -> list[Document]:
    return [Document(text=text) for text in texts]


def text_of(tokenizer: HfTokenizer, ids: tuple[int, ...]) -> str:
    return tokenizer._tokenizer.decode(list(ids))


def whole(prompt: Prompt) -> tuple[int, ...]:
    return prompt.prefix_ids + sum(prompt.chunks, ()) + prompt.suffix_ids


def test_documents_stand_at_the_start_of_the_last_user_message(builder, tokenizer):
    messages = [
        Message(role="system", content="Be brief."),
        user("Hello"),
        Message(role="assistant", content="Hi"),
        user("Why?"),
    ]
    prompt = builder.chat(messages, [Document(title="T", text="one"), Document(text="two")])
    assert text_of(tokenizer, whole(prompt)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\nRead:\nT\none\n\ntwo\n\n"
        "Why?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [text_of(tokenizer, chunk) for chunk in prompt.chunks] == ["T\none\n\n", "two\n\n"]
    assert text_of(tokenizer, prompt.suffix_ids).startswith("Why?")


def test_a_chunk_never_depends_on_its_neighbours(builder):
    alone = builder.chat([user("a")], docs("same")).chunks
    among = builder.chat([user("other question")], docs("x", "same", "y", "same")).chunks
    assert among[1] == among[3] == alone[0]


class CountingTokenizer:
    """Notes what it is asked to encode."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self.encoded: list[str] = []
        self.render_chat = tokenizer.render_chat

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        self.encoded += texts
        return self._tokenizer.encode(texts, add_special_tokens=add_special_tokens)


def test_a_document_is_tokenised_once(tokenizer):
    counting = CountingTokenizer(tokenizer)
    builder = PromptBuilder(counting, PromptConfig(untitled_template="{text}", max_chunk_tokens=3))
    first = builder.document_chunks(docs("abcd", "", "abcd", "xy"))
    assert counting.encoded == ["abcd", "xy"]
    assert builder.document_chunks(docs("xy", "new", "abcd")) == [
        first[3],
        builder.document_chunks(docs("new"))[0],
        first[0],
    ]
    assert counting.encoded == ["abcd", "xy", "new"] and first[1] == []
    assert [len(chunk) for chunk in first[0]] == [3, 1]
    titled = builder.document_chunks([Document(title="abcd", text="xy")])
    assert titled != [first[3]]


def test_how_much_is_still_to_tokenise(builder):
    documents = docs("one", "two", "two", "")
    size = len("one\n\n") + len("two\n\n")
    assert builder.num_new_chars(documents) == size
    builder.document_chunks(documents[:1])
    assert builder.num_new_chars(documents) == size / 2
    builder.document_chunks(documents)
    assert builder.num_new_chars(documents) == 0


@pytest.mark.parametrize("max_tokens", [0, 1, 4, 7, 1000])
def test_a_small_token_cache_changes_nothing_but_the_work(tokenizer, max_tokens):
    rng = random.Random(max_tokens)
    config = PromptConfig(max_chunk_tokens=3, untitled_template="{text}")
    plain = PromptBuilder(tokenizer, replace(config, token_cache_tokens=0))
    caching = PromptBuilder(tokenizer, replace(config, token_cache_tokens=max_tokens))
    for _ in range(50):
        documents = docs(*("x" * rng.randrange(6) for _ in range(rng.randrange(5))))
        assert caching.document_chunks(documents) == plain.document_chunks(documents)
        assert caching._cache.num_tokens <= max_tokens


def test_the_least_recently_used_document_leaves_the_token_cache():
    cache = TokenCache(4)
    cache.put("a", ((1, 2),))
    cache.put("b", ((3,), (4,)))
    assert cache.get("a") == ((1, 2),)
    cache.put("c", ((5,),))
    assert "b" not in cache and "a" in cache and cache.num_tokens == 3
    cache.put("too long", ((1, 2, 3, 4, 5),))
    assert "too long" not in cache and cache.num_tokens == 3
    for i in range(10):
        cache.put(f"empty {i}", ())
    assert cache.num_tokens == 4 and cache.get("empty 9") == ()


def test_without_documents_the_prompt_is_the_plain_template(builder, tokenizer):
    prompt = builder.chat([user("Why?")], [])
    assert prompt.prefix_ids == () and prompt.chunks == ()
    assert text_of(tokenizer, prompt.suffix_ids) == (
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("empty", ["", "  \n", None])
def test_empty_documents_give_no_chunk(builder, empty):
    prompt = builder.chat([user("Why?")], [Document(text=empty), Document(text="a")])
    assert len(prompt.chunks) == 1
    assert builder.chat([user("Why?")], [Document(text=empty)]).chunks == ()


def test_long_documents_are_cut_into_chunks_in_order(builder, tokenizer):
    text = "0123456789" * 10_000
    chunks = builder.chat([user("Why?")], docs(text)).chunks
    assert [len(c) for c in chunks] == [100] * 1000 + [2]
    assert text_of(tokenizer, sum(chunks, ())) == text + "\n\n"


def test_emoji_and_one_character_documents(tokenizer):
    builder = PromptBuilder(tokenizer, PromptConfig(untitled_template="{text}"))
    prompt = builder.chat([user("😀?")], docs("😀", "a"))
    assert [len(chunk) for chunk in prompt.chunks] == [4, 1]


def test_braces_and_placeholders_in_texts_stay_as_they_are(builder, tokenizer):
    prompt = builder.chat([user("{text}")], [Document(title="{text}", text="{title} {x}")])
    assert text_of(tokenizer, prompt.chunks[0]) == "{text}\n{title} {x}\n\n"
    assert fill("{a}{b}", a="{b}", b="1") == "{b}1"


def test_content_parts_are_joined(builder):
    parts = Message.model_validate(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    )
    assert builder.chat([parts], []) == builder.chat([user("ab")], [])


def test_the_marker_can_not_be_forged(builder):
    with pytest.raises(ApiError, match="marker"):
        builder.chat([user(builder._sentinel)], docs("a"))
    # one that is guessed wrong is only text
    assert builder.chat([user("[documents:0000]")], docs("a")).chunks


def test_documents_need_a_user_message(builder):
    with pytest.raises(ApiError) as error:
        builder.chat([Message(role="system", content="x")], docs("a"))
    assert error.value.param == "messages" and error.value.status == 400


def test_plain_prompts(builder, tokenizer):
    prompt = builder.plain("Why?", docs("one"))
    assert text_of(tokenizer, whole(prompt)) == "Read:\none\n\nWhy?"
    assert builder.plain("Why?", []).chunks == ()


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path):
    folder = write_model_dir(tmp_path, chat_template=None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        HfTokenizer.load(folder)


def test_a_template_that_drops_user_text_is_refused(tmp_path: Path):
    folder = write_model_dir(tmp_path, chat_template="hello")
    with pytest.raises(ChatTemplateError, match="0 times"):
        PromptBuilder(HfTokenizer.load(folder), PromptConfig())


def test_templates_may_refuse_a_conversation(tmp_path: Path):
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    builder = PromptBuilder(
        HfTokenizer.load(write_model_dir(tmp_path, chat_template=template)), PromptConfig()
    )
    with pytest.raises(ApiError, match="no system role") as error:
        builder.chat([Message(role="system", content="x"), user("y")], [])
    assert error.value.status == 400


@pytest.mark.parametrize(
    "wrong",
    [
        {"document_template": "{title}"},
        {"untitled_template": "{title}{text}"},
        {"question_template": ""},
        {"max_chunk_tokens": 0},
    ],
)
def test_impossible_prompt_configs(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PromptConfig(**wrong)
