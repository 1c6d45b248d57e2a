"""Tells a client why its request failed, where vLLM's answer to a failed load is "Internal server error" and no more.

Under policy "fail" the scheduler's process knows the reason, the API server answers. The reason rides with the figures
of the same step, which the API server reads before it answers; there the one method of vLLM that makes the error is
wrapped. If a later vLLM has no such method, or no figures come (--disable-log-stats), its own text stays.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

REMEMBERED = 1024
"""Reasons kept for requests that have not been answered yet."""

_reasons: OrderedDict[str, str] = OrderedDict()


def remember(reasons: Mapping[str, str]) -> None:
    """Reasons by vLLM's internal request id."""
    _reasons.update(reasons)
    while len(_reasons) > REMEMBERED:
        _reasons.popitem(last=False)


def reason_for(request_id: str) -> str:
    """The newest reason for the request that a client knows by this id; empty if there is none.

    vLLM's internal id is the client's, then the prompt's number and eight random digits, and "<n>_" before it for one
    of several choices. Clients choose ids, so one that only begins alike is another request.
    """
    internal = re.compile(rf"(\d+_)?{re.escape(request_id)}(-\d+)?(-[0-9a-f]{{8}})?")
    return next((reason for known, reason in reversed(_reasons.items()) if internal.fullmatch(known)), "")


def install() -> None:
    """Wraps vLLM's method, once. Called in the API server only."""
    try:
        from vllm.entrypoints.generate.base.serving import GenerateBaseServing as Serving

        raise_if_error: Callable[..., None] = Serving._raise_if_error
    except (ImportError, AttributeError) as error:
        logger.info("kvferry: clients will not be told why a load failed: %s", error)
        return
    if not hasattr(raise_if_error, "__wrapped__"):
        Serving._raise_if_error = with_reason(raise_if_error)


def with_reason(raise_if_error: Callable[..., None]) -> Callable[..., None]:
    """The same method, whose error says what kvferry knows of the request."""
    from vllm.exceptions import GenerationError

    @functools.wraps(raise_if_error)
    def wrapped(self: Any, finish_reason: str | None, request_id: str) -> None:
        try:
            raise_if_error(self, finish_reason, request_id)
        except GenerationError as error:
            reason = reason_for(request_id)
            if not reason:
                raise
            raise type(error)(f"{error}: the prompt's KV could not be loaded: {reason}") from error

    return wrapped
