"""Holds and quarantine on vLLM's own block pool."""

import pytest
from vllm.v1.core.block_pool import BlockPool

from kvferry.protocol.messages import TransferRef
from kvferry.vllm.ledger import Ledger, LedgerFull

NUM_BLOCKS = 11  # one of them is the null block


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=16)


def ref(number: int) -> TransferRef:
    return TransferRef("engine", "incarnation", f"{number:032x}", number)


def ledger(pool: BlockPool, max_held: float = 1.0, max_quarantined: float = 1.0) -> Ledger:
    return Ledger(pool, max_held, max_quarantined)


def test_held_blocks_outlive_their_request(pool: BlockPool) -> None:
    books = ledger(pool)
    blocks = pool.get_new_blocks(4)
    books.hold(ref(1), [blocks])
    pool.free_blocks(reversed(blocks))  # what vLLM does when the request has finished
    assert pool.get_num_free_blocks() == 6
    assert books.num_held_blocks == 4
    assert books.release(ref(1)) == 4
    assert pool.get_num_free_blocks() == 10
    assert books.num_held_blocks == 0


def test_a_hold_is_given_back_once(pool: BlockPool) -> None:
    books = ledger(pool)
    blocks = pool.get_new_blocks(2)
    books.hold(ref(1), [blocks])
    pool.free_blocks(reversed(blocks))
    assert books.release(ref(1)) == 2
    assert books.release(ref(1)) == 0
    assert books.release(ref(2)) == 0
    assert pool.get_num_free_blocks() == 10


def test_two_holds_on_one_prefix_count_apart(pool: BlockPool) -> None:
    books = ledger(pool)
    shared = pool.get_new_blocks(3)
    books.hold(ref(1), [shared])
    books.hold(ref(2), [shared])
    pool.free_blocks(reversed(shared))
    assert books.num_held_blocks == 3
    books.release(ref(1))
    assert pool.get_num_free_blocks() == 7
    assert books.num_held_blocks == 3
    books.release(ref(2))
    assert pool.get_num_free_blocks() == 10


def test_null_blocks_belong_to_nobody(pool: BlockPool) -> None:
    books = ledger(pool)
    blocks = pool.get_new_blocks(2)
    null_references = pool.null_block.ref_cnt
    books.hold(ref(1), [[pool.null_block, *blocks]])
    pool.free_blocks(reversed(blocks))
    assert books.release(ref(1)) == 2
    assert pool.null_block.ref_cnt == null_references
    assert pool.get_num_free_blocks() == 10


def test_holds_are_capped_with_a_reason_and_nothing_taken(pool: BlockPool) -> None:
    books = ledger(pool, max_held=0.5)  # 5 of 11 blocks
    first, second = pool.get_new_blocks(4), pool.get_new_blocks(2)
    books.hold(ref(1), [first])
    with pytest.raises(LedgerFull, match=r"4 blocks wait for readers, 2 more .*5 of 11"):
        books.hold(ref(2), [second])
    pool.free_blocks([*reversed(first), *reversed(second)])
    assert pool.get_num_free_blocks() == 6
    books.release(ref(1))
    assert pool.get_num_free_blocks() == 10


def test_blocks_held_already_do_not_count_twice_against_the_cap(pool: BlockPool) -> None:
    books = ledger(pool, max_held=0.5)
    shared = pool.get_new_blocks(4)
    books.hold(ref(1), [shared])
    books.hold(ref(2), [shared])
    assert books.num_held_blocks == 4


def test_the_same_transfer_is_not_held_twice(pool: BlockPool) -> None:
    books = ledger(pool)
    blocks = pool.get_new_blocks(1)
    books.hold(ref(1), [blocks])
    with pytest.raises(ValueError, match="held already"):
        books.hold(ref(1), [blocks])


def test_quarantine_ends_when_every_unquiet_rank_is_quiet(pool: BlockPool) -> None:
    books = ledger(pool)
    blocks = pool.get_new_blocks(3)
    books.quarantine("load", [blocks], ranks=[0, 2])
    pool.free_blocks(reversed(blocks))  # vLLM frees a failed load at once
    assert pool.get_num_free_blocks() == 7
    assert books.quiet("load", 0) == 0
    assert books.quiet("load", 0) == 0
    assert books.quiet("load", 1) == 0
    assert pool.get_num_free_blocks() == 7
    assert books.quiet("load", 2) == 3
    assert pool.get_num_free_blocks() == 10
    assert books.quiet("load", 2) == 0


def test_a_load_that_is_quiet_everywhere_needs_no_quarantine(pool: BlockPool) -> None:
    books = ledger(pool)
    blocks = pool.get_new_blocks(3)
    books.quarantine("load", [blocks], ranks=[])
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == 10


def test_a_full_quarantine_stops_new_loads_with_a_reason(pool: BlockPool) -> None:
    books = ledger(pool, max_quarantined=0.3)  # 3 of 11 blocks
    assert books.quarantine_is_full() == ""
    books.quarantine("load", [pool.get_new_blocks(3)], ranks=[0])
    assert "3 blocks are in quarantine" in books.quarantine_is_full()
    books.quiet("load", 0)
    assert books.quarantine_is_full() == ""
