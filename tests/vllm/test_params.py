"""The request contract, as routers really carry it."""

import json

import pytest

from kvferry.protocol.messages import TransferRef
from kvferry.vllm.params import (
    BadParams,
    Offer,
    from_params,
    not_offered,
    to_params,
    wants_remote_decode,
    wants_remote_prefill,
    why_not_offered,
)

REF = TransferRef("engine-1", "ab" * 16, "cd" * 16, 7)
OFFER = Offer(REF, "10.0.0.5", 40001, "key1", 300, ((5, 6, 9), (0, 0, 12)))


OWN = {"version": 1, "transfer_id": "cd" * 16, "generation": 7, "incarnation": "ab" * 16, "key_id": "key1"}


def params() -> dict:
    return to_params(OFFER, request_id="cmpl-1", tp_size=2, pp_size=1)


def test_an_offer_survives_the_way_through_a_router() -> None:
    assert from_params(json.loads(json.dumps(params())), num_groups=2) == OFFER


def test_integers_that_became_floats_are_read_as_integers() -> None:
    def floats(value):
        if isinstance(value, dict):
            return {key: floats(item) for key, item in value.items()}
        if isinstance(value, list):
            return [floats(item) for item in value]
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    assert from_params(floats(params()), num_groups=2) == OFFER


def test_which_leg_is_meant() -> None:
    first = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
    assert wants_remote_decode(first)
    assert not wants_remote_prefill(first)
    assert wants_remote_prefill(params())
    assert not wants_remote_decode(params())
    assert not wants_remote_decode(None)
    assert not wants_remote_prefill({"do_remote_prefill": "yes"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kvferry": None}, "kvferry"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 70000}, "remote_port"),
        ({"remote_port": "40001"}, "remote_port"),
        ({"remote_num_tokens": 0}, "remote_num_tokens"),
        ({"remote_num_tokens": -4}, "remote_num_tokens"),
        ({"remote_block_ids": [[1, 2]]}, "groups"),
        ({"remote_block_ids": [[1, "x"], [2]]}, "remote_block_ids"),
        ({"remote_block_ids": [[1, 2.5], [2]]}, "remote_block_ids"),
        ({"remote_host": None}, "remote_host"),
        ({"kvferry": {"version": 99, "transfer_id": "a", "generation": 1, "incarnation": "b"}}, "version"),
        ({"kvferry": {"version": 1}}, "transfer_id"),
        ({"kvferry": {**OWN, "generation": 1e30}}, "generation"),
        ({"kvferry": {**OWN, "generation": 2**64}}, "generation"),
        ({"kvferry": {**OWN, "generation": True}}, "generation"),
        ({"kvferry": {**OWN, "transfer_id": "\ud800" * 32}}, "transfer_id"),
        ({"kvferry": {**OWN, "incarnation": "AB" * 16}}, "incarnation"),
        ({"kvferry": {**OWN, "key_id": "k" * 65}}, "key_id"),
        ({"remote_engine_id": "e" * 129}, "remote_engine_id"),
        ({"remote_engine_id": "an\nengine"}, "remote_engine_id"),
        ({"remote_block_ids": [[1, 2**31], [2]]}, "remote_block_ids"),
        ({"remote_block_ids": [[1, -1], [2]]}, "remote_block_ids"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(BadParams, match=named):
        from_params({**params(), **change}, num_groups=2)


def test_parameters_of_another_connector_are_refused_by_name() -> None:
    foreign = {key: value for key, value in params().items() if key != "kvferry"}
    with pytest.raises(BadParams, match="does not run kvferry"):
        from_params(foreign, num_groups=2)


def test_the_reason_for_no_offer_reaches_the_second_leg() -> None:
    answer = json.loads(json.dumps(not_offered("too many blocks wait")))
    assert not wants_remote_prefill(answer)
    assert why_not_offered(answer) == "too many blocks wait"
    assert why_not_offered(params()) == ""
    assert why_not_offered(None) == ""


def test_an_ipv6_host_gets_brackets() -> None:
    assert Offer(REF, "fd00::1", 5, "", 1, ()).address == "tcp://[fd00::1]:5"


@pytest.mark.parametrize("junk", ["text", 5, [], ["do_remote_prefill"], True])
def test_what_is_no_map_asks_for_nothing(junk: object) -> None:
    assert not wants_remote_decode(junk)
    assert not wants_remote_prefill(junk)
    assert why_not_offered(junk) == ""


def test_junk_beside_the_contract_is_passed_over_however_deep() -> None:
    junk: list = []
    for _ in range(100_000):
        junk = [junk]
    assert from_params({**params(), "junk": junk, "echo": False}, num_groups=2) == OFFER
    with pytest.raises(BadParams, match="remote_block_ids"):
        from_params({**params(), "remote_block_ids": junk}, num_groups=2)
