import pytest

from kvferry.protocol.fanin import ReleaseSet


def test_fan_in_counts_ranks_not_messages():
    """C3: prefill TP 4 to decode TP 8; producer rank 0 waits for consumer ranks 0 and 1."""
    releases = ReleaseSet([0, 1])
    assert releases.add([0])
    assert not releases.add([0])
    assert not releases.is_complete
    assert releases.add([1])
    assert releases.is_complete
    assert not releases.add([1])
    assert releases.is_complete


def test_none_is_every_rank():
    releases = ReleaseSet(range(3))
    assert releases.add(None)
    assert releases.is_complete
    assert not releases.add([2])


def test_a_rank_that_is_not_expected_is_refused_and_nothing_of_its_message_counts():
    releases = ReleaseSet([2, 3])
    with pytest.raises(ValueError, match=r"ranks \[0\] are not among the 2 expected"):
        releases.add([2, 0])
    assert 2 not in releases


def test_nobody_can_not_release():
    with pytest.raises(ValueError, match="empty"):
        ReleaseSet(range(0))


def test_every_order_ends_at_the_last_rank():
    releases = ReleaseSet(range(8))
    for rank in [5, 5, 0, 7, 1, 1, 2, 6, 3, 0]:
        releases.add([rank])
        assert not releases.is_complete
    releases.add([4])
    assert releases.is_complete
