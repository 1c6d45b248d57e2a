"""The harness itself, on real servers: it reaches the servers that it started, and reads them right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import PLAIN

from kvferry.cli import api, proc
from kvferry.cli.servers import Cluster

pytestmark = pytest.mark.parametrize("pair", [PLAIN], indirect=True)


def test_each_url_is_answered_by_a_process_of_that_server(pair: Cluster) -> None:
    for server in pair.everything:
        assert server.ready()
        assert proc.listeners(server.port) <= server.child.pids()
    assert len({server.port for server in pair.everything}) == 3


def test_both_servers_alone_give_the_same_text(pair: Cluster, new_salt: Callable[[], str]) -> None:
    answers = [api.complete(s.url, "The ferry leaves at", cache_salt=new_salt()) for s in (pair.prefill, pair.decode)]
    assert len(set(map(tuple, map(api.tokens, answers)))) == 1
    assert len(api.tokens(answers[0])) == 16


def test_the_text_depends_on_every_part_of_the_prompt(pair: Cluster, new_salt: Callable[[], str]) -> None:
    """Or else tests that compare texts would not see a block that is missing."""
    prompt = [index * 7 % 250 for index in range(300)]
    changed_early = [prompt[0] + 1, *prompt[1:]]
    changed_late = [*prompt[:-20], prompt[-20] + 1, *prompt[-19:]]
    outputs = {
        tuple(api.tokens(api.complete(pair.decode.url, each, cache_salt=new_salt(), max_tokens=24)))
        for each in (prompt, changed_early, changed_late)
    }
    assert len(outputs) == 3


def test_no_blocks_are_in_use_after_requests(pair: Cluster) -> None:
    api.complete(pair.decode.url, "x" * 300)
    assert pair.decode.used_blocks() == 0
    assert pair.decode.num_blocks() > 100


def test_the_prefill_leg_answers_parameters_for_the_decode_leg(pair: Cluster) -> None:
    legs = pair.two_legs("The ferry leaves at nine. " * 8)
    params = legs.prefill["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert api.tokens(legs.decode) == api.tokens(api.complete(pair.decode.url, "The ferry leaves at nine. " * 8))


def test_tokens_and_text_go_both_ways(pair: Cluster) -> None:
    ids = api.tokenize(pair.decode.url, "ferry")
    assert len(ids) == 5  # one for each byte
    assert api.detokenize(pair.decode.url, ids) == "ferry"
