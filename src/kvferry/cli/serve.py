"""`kvferry up`: keeps a cluster serving until a signal comes or one of its servers ends."""

from __future__ import annotations

import json
import time

from kvferry.cli import api, logs
from kvferry.cli.errors import Problem
from kvferry.cli.report import Reporter
from kvferry.cli.servers import Cluster

_POLL_S = 0.5


def until_stopped(cluster: Cluster, reporter: Reporter) -> None:
    """Say how to use the API, then wait. Ends by the signal's exception; raises Problem if a server ends by itself."""
    reporter.say(f"the OpenAI API is at {cluster.router.url}/v1; the logs are in {cluster.log_dir}")
    reporter.say(f"try: {curl_line(cluster.router.url)}")
    reporter.say("Ctrl-C stops it")
    while True:
        for server in cluster.everything:
            if not server.alive():
                error = logs.last_error(server.log_lines(2000))
                raise Problem(
                    f"the {server.name} ended with status {server.child.exit_status()}"
                    + (f": {error}" if error else ""),
                    details="\n".join(["its last lines:", *server.log_lines(15)]),
                )
        time.sleep(_POLL_S)


def curl_line(url: str) -> str:
    """A command that sends a prompt to the router."""
    body = json.dumps({"model": api.MODEL_NAME, "prompt": "The capital of France is", "max_tokens": 24})
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
