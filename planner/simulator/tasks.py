"""The four tasks: what their prompts look like and how much they need. Assumed, and adjustable.

Lengths follow the tasks' usual forms (LongBench passage retrieval: 30 passages, 9,289 words;
RULER variable tracking; MuSiQue's 20 paragraphs, taken twice for the paper's 40). Popularity
follows RAGPulse: of 3,235 passages the top tenth takes 59% of the uses, which is Zipf's law with
an exponent of 0.84. What suits each task, `kv_dev` or `qci`, is a guess: a retrieval question names
what it looks for, a chain of variables is found from passage to passage.
"""

from pydantic import Field, model_validator

from planner.simulator.demand_truth import AssumedDemand
from planner.simulator.part import Count, NotNegative, Part, Positive


class TaskSpec(Part):
    """weight: of its requests in a mix. Ranges are uniform, both ends included."""

    name: str
    weight: Positive = 1.0
    num_chunks: tuple[Count, Count] = (30, 30)
    chunk_tokens: tuple[Count, Count] = (300, 500)
    prefix_tokens: int = Field(default=40, ge=0)
    suffix_tokens: tuple[Count, Count] = (40, 80)
    output_tokens: tuple[int, int] = (8, 32)
    corpus_chunks: Count = 3_235
    zipf: NotNegative = 0.84
    demand: AssumedDemand = AssumedDemand()

    @model_validator(mode="after")
    def _ranges_rise(self) -> "TaskSpec":
        for name in ("num_chunks", "chunk_tokens", "suffix_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise ValueError(f"{name} must not fall, got {low} to {high}")
        if self.num_chunks[1] > self.corpus_chunks:
            raise ValueError(f"corpus_chunks must be {self.num_chunks[1]} or more")
        return self

    @property
    def mean_prompt_tokens(self) -> int:
        chunks = sum(self.num_chunks) / 2 * sum(self.chunk_tokens) / 2
        return round(self.prefix_tokens + chunks + sum(self.suffix_tokens) / 2)


PR = TaskSpec(
    name="pr",
    num_chunks=(24, 36),
    suffix_tokens=(150, 250),
    output_tokens=(4, 8),
    demand=AssumedDemand(qci_share=0.8),
)
VT = TaskSpec(
    name="vt",
    num_chunks=(12, 20),
    chunk_tokens=(400, 600),
    suffix_tokens=(60, 80),
    output_tokens=(20, 40),
    demand=AssumedDemand(qci_share=0.2, hardness=0.4),
)
MHQA = TaskSpec(
    name="mhqa",
    num_chunks=(30, 50),
    chunk_tokens=(100, 200),
    suffix_tokens=(20, 60),
    output_tokens=(8, 32),
    demand=AssumedDemand(qci_share=0.5, hardness=0.0),
)

TASKS: dict[str, tuple[TaskSpec, ...]] = {
    "pr": (PR,),
    "vt": (VT,),
    "mhqa": (MHQA,),
    "mix": (PR, VT, MHQA),
}
