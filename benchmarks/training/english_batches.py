"""Token sequences of the English tasks: one context, and many question-and-answer turns behind it.

The turns do not see each other, and each stands at the positions it would have alone: one pass
teaches what as many prompts of the server would.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality.types import Question, RetrievedDocument, Split
from benchmarks.training.english_network import AdaptedLlama, BlockMask
from benchmarks.training.english_tasks import EnglishContext, english_context
from cluster.api_types import Document, Message
from cluster.prompt import ChatTokenizer, PromptBuilder

MAX_TURNS = 12
END_OF_TURN = "<|im_end|>"
NUM_STEP_PLACES = 3  # prompt tokens from the question's last one on: one for each hop
HELPER_WEIGHT = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """One context and some of its questions, as ids."""

    ids: Tensor  # [n] int64: the context, then turn after turn without their last answer token
    positions: Tensor  # [n]
    visible: Tensor  # [n, n] of bool
    asked_at: Tensor  # [answer tokens]: where each is predicted
    answers: Tensor  # [answer tokens]
    helpers_at: Tensor  # [helpers]: where a step on the way to an answer is to be predicted
    helpers: Tensor  # [helpers]: its first token
    questions: tuple[Question, ...]
    answer_lengths: tuple[int, ...]  # of the answers of these questions


class PromptIds:
    """The server's prompts, as ids; answers start with a space, as words of a document do."""

    def __init__(self, tokenizer: ChatTokenizer, builder: PromptBuilder) -> None:
        self._tokenizer, self._builder = tokenizer, builder

    def context(
        self, documents: Sequence[RetrievedDocument]
    ) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """The prefix, and the chunks of the documents."""
        prompt = self._builder.chat(
            [Message(role="user", content="?")],
            [Document(title=document.title, text=document.text) for document in documents],
        )
        return prompt.prefix_ids, prompt.chunks

    def question(self, text: str) -> tuple[int, ...]:
        """What follows the documents, whatever they are."""
        message = Message(role="user", content=text)
        return self._builder.chat([message], [Document(text="x")]).suffix_ids

    def answer(self, text: str) -> tuple[int, ...]:
        return (*self.encode(f" {text}"), *self.encode(END_OF_TURN))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode([text], add_special_tokens=False)[0]

    def question_helpers(self, suffix: Sequence[int], steps: Sequence[str]) -> dict[int, int]:
        """Place in a question's ids: first token of what is found at this hop, the last one on."""
        if not steps:
            return {}
        first = [self.encode(f" {step}")[0] for step in steps]
        [end] = self.encode(END_OF_TURN)
        last_token = suffix.index(end) - 1
        return {
            last_token + place: first[min(place, len(first) - 1)]
            for place in range(NUM_STEP_PLACES)
        }

    def statement_helpers(self, chunk: Sequence[int], source: str, number: str) -> dict[int, int]:
        """The number's first digit at the end of the variable that leads to it."""
        sought = self.encode(f" {source}")
        for start in range(len(chunk) - len(sought)):
            if list(chunk[start : start + len(sought)]) == sought:
                return {start + len(sought) - 1: self.encode(number[0])[0]}
        return {}


def lay_out(
    prompts: PromptIds, context: EnglishContext, *, max_tokens: int, isolated: bool = False
) -> Turns:
    """The context with as many turns as fit, at least one.

    isolated: a document's tokens see the prefix and their own document; questions see everything.
    """
    prefix, chunks = prompts.context(context.documents)
    ids = [*prefix, *(token for chunk in chunks for token in chunk)]
    num_context = len(ids)
    part_of = [0] * len(prefix)  # of context tokens: 0 for the prefix, then 1, 2, …
    for number, chunk in enumerate(chunks, start=1):
        part_of += [number] * len(chunk)
    positions, turn_of = list(range(num_context)), [0] * num_context
    helpers: dict[int, int] = {}
    start = len(prefix)
    for number, chunk in enumerate(chunks):
        if number in context.numbers:
            found = prompts.statement_helpers(chunk, *context.numbers[number])
            helpers |= {start + at: token for at, token in found.items()}
        start += len(chunk)
    asked_at: list[int] = []
    answers: list[int] = []
    lengths: list[int] = []
    for turn, question in enumerate(context.questions[:MAX_TURNS], start=1):
        suffix, answer = prompts.question(question.question), prompts.answer(question.answers[0])
        new = [*suffix, *answer[:-1]]
        if lengths and len(ids) + len(new) > max_tokens:
            break
        found = prompts.question_helpers(suffix, context.steps[turn - 1])
        helpers |= {len(ids) + at: token for at, token in found.items()}
        asked_at += range(len(ids) + len(suffix) - 1, len(ids) + len(new))
        ids += new
        positions += range(num_context, num_context + len(new))
        turn_of += [turn] * len(new)
        answers += answer
        lengths.append(len(answer))
    turns, parts = torch.tensor(turn_of), torch.tensor(part_of)
    visible = ((turns[:, None] == turns) | (turns == 0)).tril_()
    if isolated:
        visible[:num_context, :num_context] &= (parts[:, None] == parts) | (parts == 0)
    return Turns(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        visible=visible,
        asked_at=torch.tensor(asked_at),
        answers=torch.tensor(answers),
        helpers_at=torch.tensor(list(helpers), dtype=torch.int64),
        helpers=torch.tensor(list(helpers.values()), dtype=torch.int64),
        questions=context.questions[: len(lengths)],
        answer_lengths=tuple(lengths),
    )


def answer_all(model: AdaptedLlama, sequences: Sequence[Turns]) -> tuple[Tensor, list[bool]]:
    """The loss, and which questions are answered exactly.

    The loss is the mean over answer tokens and helpers, the latter with a smaller weight. An answer
    is exact if each of its tokens, the end included, is the most likely one after those before it:
    then greedy decoding writes it.
    """
    group = model.sizes.num_heads // model.sizes.num_kv_heads
    masks = [BlockMask(one.visible, group, model.dtype) for one in sequences]
    starts = [0]
    for one in sequences:
        starts.append(starts[-1] + len(one.ids))
    places = [one.asked_at + at for one, at in zip(sequences, starts, strict=False)]
    places += [one.helpers_at + at for one, at in zip(sequences, starts, strict=False)]
    logits = model.logits(
        torch.cat([one.ids for one in sequences]),
        torch.cat([one.positions for one in sequences]),
        masks,
        torch.cat(places),
    )
    targets = torch.cat([*(one.answers for one in sequences), *(one.helpers for one in sequences)])
    weights = torch.ones(len(targets))
    num_answers = sum(len(one.answers) for one in sequences)
    weights[num_answers:] = HELPER_WEIGHT
    losses = F.cross_entropy(logits, targets, reduction="none")
    right = (logits.argmax(-1) == targets)[:num_answers]
    lengths = [length for one in sequences for length in one.answer_lengths]
    exact = [bool(part.all()) for part in right.split(lengths)]
    return (losses * weights).sum() / weights.sum(), exact


def training_context(rng: random.Random, task: str, max_documents: int) -> EnglishContext:
    """A context of any size up to a length; when that is reached, a fifth are a little longer."""
    num_documents = rng.randint(min(5, max_documents), max_documents)
    if task == "vt":  # there are always some chains: fewer documents make no long ones
        num_documents = rng.randint(8, max_documents + 2)
    elif max_documents >= 12 and rng.random() < 0.2:
        num_documents = rng.randint(12, 16)
    return english_context(
        task,
        rng,
        Split.TRAIN,
        num_documents=num_documents,
        num_fillers=rng.choice([0, 1, 1, 2] if num_documents <= 12 else [0, 1]),
    )
