"""The reason of a failed load reaches the client through vLLM's own error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.exceptions import GenerationError

from kvferry.vllm import client_errors
from kvferry.vllm.metrics import FerryStats, KVFerryStats


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    method = GenerateBaseServing._raise_if_error
    yield
    GenerateBaseServing._raise_if_error = method
    client_errors._reasons.clear()


def failed(request_id: str) -> str:
    with pytest.raises(GenerationError) as error:
        GenerateBaseServing._raise_if_error(object(), "error", request_id)
    assert error.value.status_code == 500
    return str(error.value)


def test_vllm_still_has_the_method_and_its_bare_text() -> None:
    assert failed("cmpl-1") == "Internal server error"


@pytest.mark.parametrize(
    ("internal", "known_as"),
    [
        ("cmpl-abc-0-1234abcd", "cmpl-abc"),
        ("chatcmpl-abc-1234abcd", "chatcmpl-abc"),
        ("2_cmpl-abc-0-1234abcd", "cmpl-abc"),
    ],
)
def test_the_reason_joins_the_error(internal: str, known_as: str) -> None:
    client_errors.install()
    client_errors.install()  # a second time changes nothing
    client_errors.remember({internal: "model: consumer has a, producer has b"})
    expected = "Internal server error: the prompt's KV could not be loaded: model: consumer has a, producer has b"
    assert failed(known_as) == expected
    assert failed("cmpl-other") == "Internal server error"


@pytest.mark.parametrize("other", ["cmpl-1", "cmpl-10-0", "cmpl-10.", "chatcmpl-10"])
def test_an_id_that_only_begins_alike_is_another_request(other: str) -> None:
    client_errors.remember({"cmpl-10-abc-0-1234abcd": "somebody else's"})
    assert client_errors.reason_for(other) == ""
    assert client_errors.reason_for("cmpl-10-abc") == "somebody else's"


def test_of_an_id_used_again_the_newest_reason_counts() -> None:
    client_errors.remember({"cmpl-1-0-00000000": "old"})
    client_errors.remember({"cmpl-1-0-11111111": "new"})
    assert client_errors.reason_for("cmpl-1") == "new"


def test_what_is_no_error_stays_none() -> None:
    client_errors.install()
    assert GenerateBaseServing._raise_if_error(object(), "stop", "cmpl-1") is None


def test_reasons_are_bounded() -> None:
    client_errors.remember({f"cmpl-{number}-0-1234abcd": "why" for number in range(client_errors.REMEMBERED + 5)})
    assert client_errors.reason_for("cmpl-4") == ""
    assert client_errors.reason_for("cmpl-5") == "why"


def test_reasons_ride_with_the_figures_and_are_not_in_the_log_line() -> None:
    stats = FerryStats()
    stats.tell_client("cmpl-1-0-x", "why")
    taken = stats.take()
    assert taken is not None
    other = KVFerryStats()
    other.aggregate(taken)
    assert (other.data["reasons"], other.is_empty()) == ({"cmpl-1-0-x": "why"}, False)
    assert "why" not in str(other.reduce())
