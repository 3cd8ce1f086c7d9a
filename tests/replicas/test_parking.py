"""The first token that is sampled here, and the count of what has room."""

import pytest
import torch

from replicas.kv_room import KvRoom
from replicas.parking import FirstTokenSampling, sample_first

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01]))


def drawn(**options):
    torch.manual_seed(0)
    return {sample_first(LOGITS, FirstTokenSampling(**options)) for _ in range(400)}


def test_greedy_takes_the_likeliest():
    assert drawn(temperature=0.0) == {0}


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.8}, {0, 1}),  # 0.5 + 0.3 reach it
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.5}, {0}),
    ],
)
def test_filters_leave_what_they_should(options, possible):
    assert drawn(**options) == possible


def test_temperature_changes_the_odds():
    torch.manual_seed(1)
    cold = [sample_first(LOGITS, FirstTokenSampling(temperature=0.3)) for _ in range(400)]
    hot = [sample_first(LOGITS, FirstTokenSampling(temperature=2.0)) for _ in range(400)]
    assert cold.count(0) > 300 > hot.count(0)


def test_a_prompt_is_parked_when_it_has_no_blocks_but_memory():
    room = KvRoom(capacity_tokens=100, parking_tokens=120, block_size=10)
    assert not room.has_to_park(70)
    with room.resident(50) as held:
        assert not room.has_to_park(30)
        assert room.has_to_park(40)  # two partly filled blocks more
        held.grow_to(65)
        assert room.has_to_park(30)
        assert not room.has_to_park(90)  # it would never have blocks
        with room.parked(80):
            assert not room.has_to_park(50)  # host memory is full, too
    assert (room.resident_tokens, room.parked_tokens, room.num_resident) == (0, 0, 0)
