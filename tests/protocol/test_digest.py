import numpy as np
import pytest

from kvferry.protocol.digest import DIGEST_BYTES, blocks_digest, prompt_digest

PLAIN = {"model": "m", "lora": "", "cache_salt": "", "mm_hashes": (), "weights_epoch": "0"}
TOKENS = [1, 2, 300_000, -1]


def test_a_digest_is_the_same_everywhere():
    assert prompt_digest(TOKENS, **PLAIN).hex() == "efd89565761dfe3408d67c95a3bd5a4d"
    assert blocks_digest([[1, 2], [7]]).hex() == "a1eea2ff8d0365a7a71dcf92f8aefd98"
    assert len(prompt_digest([], **PLAIN)) == DIGEST_BYTES


def test_lists_and_arrays_of_any_width_are_equal():
    for width in (np.int32, np.int64, ">i8"):
        assert prompt_digest(np.array(TOKENS, dtype=width), **PLAIN) == prompt_digest(TOKENS, **PLAIN)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m2"},
        {"lora": "a"},
        {"cache_salt": "a"},
        {"weights_epoch": "1"},
        {"mm_hashes": [("h", 0, 2)]},
        {"model": "", "lora": "m"},  # the same letters in another field
    ],
)
def test_everything_that_decides_the_kv_is_in_it(change):
    assert prompt_digest(TOKENS, **(PLAIN | change)) != prompt_digest(TOKENS, **PLAIN)


def test_tokens_their_order_and_their_number_are_in_it():
    variants = [TOKENS, TOKENS[::-1], TOKENS[:-1], [*TOKENS, 0], []]
    assert len({prompt_digest(tokens, **PLAIN) for tokens in variants}) == len(variants)


def test_an_items_place_is_in_it():
    variants = [[("h", 0, 2)], [("h", 1, 2)], [("h", 0, 3)], [("h", 0, 2), ("h", 0, 2)]]
    assert len({prompt_digest(TOKENS, **(PLAIN | {"mm_hashes": items})) for items in variants}) == len(variants)


def test_blocks_are_told_apart_by_group():
    variants = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2, 3], []], [[2, 1], [3]]]
    assert len({blocks_digest(groups) for groups in variants}) == len(variants)


def test_a_prompt_is_never_taken_for_blocks():
    assert blocks_digest([]) != prompt_digest([], model="", lora="", cache_salt="", mm_hashes=(), weights_epoch="")


def test_a_table_is_no_list():
    with pytest.raises(ValueError, match="2 dimensions"):
        blocks_digest([np.zeros((2, 2))])
