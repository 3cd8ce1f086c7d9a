"""Chunk keys: what changes them, what does not, and that no two inputs share one."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_tier import KeySpace, content_id

SPACE = KeySpace(fingerprint="ab12", kv_dtype="bfloat16", anchor_ids=(1, 2))
TOKENS = [5, 6, 7]

PRINT_KEYS = """
from kv_tier import KeySpace, content_id
space = KeySpace(fingerprint="ab12", kv_dtype="bfloat16", anchor_ids=(1, 2))
print(space.key([5, 6, 7], cache_salt="tenant").hex(), content_id([5, 6, 7]))
"""


def test_every_part_changes_the_key() -> None:
    keys = [
        SPACE.key(TOKENS),
        replace(SPACE, fingerprint="ab13").key(TOKENS),
        replace(SPACE, kv_dtype="float16").key(TOKENS),
        replace(SPACE, anchor_ids=(1, 3)).key(TOKENS),
        replace(SPACE, anchor_ids=()).key(TOKENS),
        replace(SPACE, layout_version=2).key(TOKENS),
        SPACE.key(TOKENS, cache_salt="tenant"),
        SPACE.key(TOKENS, anchored=False),
        SPACE.key([5, 6, 8]),
        SPACE.key([5, 6]),
        SPACE.key([6, 5, 7]),
    ]
    assert all(len(key) == 32 for key in keys)
    assert len(set(keys)) == len(keys)


def test_fields_can_not_run_into_each_other() -> None:
    assert SPACE.key([], cache_salt="ab") != replace(SPACE, kv_dtype="bfloat16a").key(
        [], cache_salt="b"
    )
    assert replace(SPACE, anchor_ids=(1,)).key([2, 5]) != replace(SPACE, anchor_ids=(1, 2)).key([5])
    # the salt's bytes are those of one token
    assert content_id([5], cache_salt="\x05\0\0\0") != content_id([5, 5])


def test_content_id_is_not_the_model_s() -> None:
    assert content_id(TOKENS) == content_id(TOKENS)
    assert content_id(TOKENS) != content_id(TOKENS, cache_salt="tenant")
    assert content_id(TOKENS) != content_id([*TOKENS, 0])


def test_any_sequence_of_integers_gives_one_key() -> None:
    for same in (tuple(TOKENS), np.array(TOKENS), np.array(TOKENS, dtype=np.uint32)):
        assert SPACE.key(same) == SPACE.key(TOKENS)


def test_any_text_is_a_salt() -> None:
    salts = ["", "é", "e\u0301", "\ud800", "a\0b"]
    assert len({content_id(TOKENS, cache_salt=salt) for salt in salts}) == len(salts)


@pytest.mark.parametrize("token_ids", [[-1], [2**32]])
def test_a_number_that_is_no_token_is_refused(token_ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        SPACE.key(token_ids)


@given(st.lists(st.tuples(st.text(max_size=4), st.lists(st.integers(0, 300), max_size=4))))
def test_different_chunks_have_different_ids(cases: list[tuple[str, list[int]]]) -> None:
    distinct = {(salt, tuple(token_ids)) for salt, token_ids in cases}
    assert len({content_id(ids, cache_salt=salt) for salt, ids in distinct}) == len(distinct)


def test_fresh_interpreters_agree() -> None:
    root = Path(__file__).parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PRINT_KEYS],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    expected = f"{SPACE.key(TOKENS, cache_salt='tenant').hex()} {content_id(TOKENS)}\n"
    assert outputs == {expected}
