"""A small client of the OpenAI API, of the two legs that a router makes of a request, and of the metrics page."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

MODEL_NAME = "default"  # the name under which every server serves its model
PREFILL_PARAMS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Json = dict[str, Any]

# Prometheus' text format: NAME{LABEL="VALUE",...} NUMBER
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


class HttpError(RuntimeError):
    """A server answered with an error status, or not at all (status 0). body is its text."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url}: {f'HTTP {status}' if status else 'no answer'}: {body[:500]}")
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Legs:
    """What the two legs of a request answered; `decode` holds the text."""

    prefill: Json
    decode: Json


def get(url: str, timeout_s: float = 30.0) -> str:
    """The body of a GET. Raises HttpError."""
    return _send(urllib.request.Request(url), timeout_s)


def post(url: str, body: Mapping[str, Any], timeout_s: float = 300.0, headers: Mapping[str, str] | None = None) -> Json:
    """POST a JSON object, return the JSON object answered ({} for an empty answer). Raises HttpError."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    text = _send(request, timeout_s)
    answer: Json = json.loads(text) if text.strip() else {}
    return answer


def completion_body(prompt: str | Sequence[int], **fields: Any) -> Json:
    """The body of a greedy completion request; `fields` (max_tokens, cache_salt, n, ...) win over the defaults."""
    defaults = {"model": MODEL_NAME, "max_tokens": 16, "temperature": 0.0, "return_token_ids": True}
    return {**defaults, "prompt": prompt, **fields}


def complete(url: str, prompt: str | Sequence[int], *, timeout_s: float = 300.0, **fields: Any) -> Json:
    """POST /v1/completions and return the answer. Greedy and 16 tokens, unless told otherwise. Raises HttpError."""
    return post(f"{url}/v1/completions", completion_body(prompt, **fields), timeout_s)


def prefill_leg(url: str, body: Mapping[str, Any], timeout_s: float = 300.0, request_id: str = "") -> Json:
    """What a router does first: run `body` on the prefill server for one token. Its answer has kv_transfer_params."""
    leg = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    leg.update(max_tokens=1, min_tokens=1, kv_transfer_params=dict(PREFILL_PARAMS))
    return post(f"{url}/v1/completions", leg, timeout_s, _request_id_header(request_id))


def decode_leg(
    url: str, body: Mapping[str, Any], params: Mapping[str, Any] | None, timeout_s: float = 300.0, request_id: str = ""
) -> Json:
    """What a router does second: run `body` on the decode server with the kv_transfer_params that prefill answered."""
    leg = {**body, "kv_transfer_params": dict(params)} if params else dict(body)
    return post(f"{url}/v1/completions", leg, timeout_s, _request_id_header(request_id))


def two_legs(
    prefill_url: str, decode_url: str, prompt: str | Sequence[int], *, timeout_s: float = 300.0, **fields: Any
) -> Legs:
    """One request by way of both servers, as the router does it. Raises HttpError of the leg that failed."""
    body = completion_body(prompt, **fields)
    request_id = uuid.uuid4().hex
    first = prefill_leg(prefill_url, body, timeout_s, request_id)
    second = decode_leg(decode_url, body, first.get("kv_transfer_params"), timeout_s, request_id)
    return Legs(first, second)


def both_legs_at_once(
    prefill_url: str,
    decode_url: str,
    body: Mapping[str, Any],
    address: Mapping[str, Any],
    *,
    first: str = "",
    timeout_s: float = 300.0,
) -> Legs:
    """As a router of the concurrent contract does it: both legs under one name. Raises HttpError.

    address: `remote_host`, `remote_port` of the prefill engine's rendezvous. first: "prefill" runs that leg to its end
    before the other.
    """
    name = f"tx-{uuid.uuid4().hex}"
    first_leg = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    first_leg.update(max_tokens=1, min_tokens=1, kv_transfer_params={**PREFILL_PARAMS, "transfer_id": name})
    params = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": name, **address}
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(post, f"{prefill_url}/v1/completions", first_leg, timeout_s)
        if first == "prefill":
            prefill.result()
        second = post(f"{decode_url}/v1/completions", {**body, "kv_transfer_params": params}, timeout_s)
        return Legs(prefill.result(), second)


class Stream:
    """A streaming completion, line by line. It may be dropped at any moment, as a client that goes away drops it."""

    def __init__(self, url: str, body: Mapping[str, Any], timeout_s: float = 300.0) -> None:
        """Sends the request and does not wait for the answer. Raises HttpError if nobody listens."""
        self._url = url
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
        self._response: http.client.HTTPResponse | None = None
        try:
            self._connection.request(
                "POST",
                "/v1/completions",
                json.dumps({**body, "stream": True}),
                {"Content-Type": "application/json"},
            )
        except OSError as error:
            raise HttpError(url, 0, str(error)) from error

    def read_event(self) -> str:
        """The next line of data, waiting for it; empty at the end. Raises HttpError for an error status."""
        if self._response is None:
            self._response = self._connection.getresponse()
            if self._response.status != 200:
                raise HttpError(self._url, self._response.status, self._response.read().decode(errors="replace"))
        while True:
            line = self._response.readline().decode(errors="replace")
            if not line or line.startswith("data:"):
                return line

    def drop(self) -> None:
        """Closes the connection."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


def text(answer: Json) -> str:
    """The text of the first choice of a completion."""
    first: str = answer["choices"][0]["text"]
    return first


def tokens(answer: Json) -> list[int]:
    """The generated token ids of the first choice. Compare these: bytes that are no text look alike."""
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def transfer_report(answer: Json) -> Json:
    """What kvferry says about a request's transfer (path, transport, bytes, ...); {} if it says nothing."""
    params = answer.get("kv_transfer_params") or {}
    report: Json = params.get("kvferry") or {}
    return report


def tokenize(url: str, prompt: str) -> list[int]:
    """The token ids of a prompt."""
    ids: list[int] = post(f"{url}/tokenize", {"model": MODEL_NAME, "prompt": prompt})["tokens"]
    return ids


def detokenize(url: str, ids: Sequence[int]) -> str:
    """The text of token ids."""
    prompt: str = post(f"{url}/detokenize", {"model": MODEL_NAME, "tokens": list(ids)})["prompt"]
    return prompt


@dataclass(frozen=True)
class Sample:
    """One line of a metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metrics:
    """A Prometheus page, read once."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name whose labels agree. Raises KeyError if there is none."""
        values = [
            sample.value
            for sample in self.samples
            if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
        ]
        if not values:
            raise KeyError(f"no sample {name} with {labels}")
        return sum(values)

    def get(self, name: str, default: float = 0.0, **labels: str) -> float:
        """As value, with a default where there is no such sample (a labelled counter that never counted)."""
        try:
            return self.value(name, **labels)
        except KeyError:
            return default

    def label(self, name: str, label: str) -> str:
        """A label of the first sample of this name, as vllm:cache_config_info keeps its values. Raises KeyError."""
        for sample in self.samples:
            if sample.name == name and label in sample.labels:
                return sample.labels[label]
        raise KeyError(f"no sample {name} with a label {label}")

    def names(self, prefix: str = "") -> list[str]:
        """The names that start with `prefix`, sorted."""
        return sorted({sample.name for sample in self.samples if sample.name.startswith(prefix)})


def metrics(url: str, timeout_s: float = 30.0) -> Metrics:
    """Read URL/metrics. Raises HttpError."""
    return parse_metrics(get(f"{url}/metrics", timeout_s))


def parse_metrics(page: str) -> Metrics:
    """Read the text of a Prometheus page; lines that are no samples are passed over."""
    found = filter(None, map(_SAMPLE.match, page.splitlines()))
    return Metrics([Sample(match["name"], _labels(match["labels"] or ""), float(match["value"])) for match in found])


def _labels(text: str) -> dict[str, str]:
    return {name: _ESCAPE.sub(_unescaped, value) for name, value in _LABEL.findall(text)}


def _unescaped(escape: re.Match[str]) -> str:
    return "\n" if escape[1] == "n" else escape[1]


def is_healthy(url: str, timeout_s: float = 2.0) -> bool:
    """Whether GET URL/health answers 200."""
    try:
        get(f"{url}/health", timeout_s)
    except HttpError:
        return False
    return True


def is_routable(router_url: str) -> bool:
    """Whether a router has a prefill and a decode server for a request."""
    try:
        complete(router_url, "x", max_tokens=1)
    except HttpError:
        return False
    return True


def _request_id_header(request_id: str) -> dict[str, str]:
    return {"X-Request-Id": request_id} if request_id else {}


# Loopback is never reached through a proxy, whatever the environment says.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _send(request: urllib.request.Request, timeout_s: float) -> str:
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            body: bytes = response.read()
            return body.decode(errors="replace")
    except urllib.error.HTTPError as error:
        raise HttpError(request.full_url, error.code, error.read().decode(errors="replace")) from None
    except (OSError, http.client.HTTPException) as error:
        raise HttpError(request.full_url, 0, str(error) or type(error).__name__) from error
