"""Run by tests: an endpoint that sends every frame back. Prints its address; ends when its stdin does."""

from __future__ import annotations

import sys
import threading

from kvferry.control.addresses import AllowedRanges
from kvferry.control.endpoint import Endpoint, Received
from kvferry.control.security import Security


def main(secret: str, port: str) -> None:
    security = Security.choose("127.0.0.1", [secret.encode()])
    with Endpoint("127.0.0.1", security, AllowedRanges(), port=int(port)) as endpoint:
        print(endpoint.address, flush=True)
        ended = threading.Event()

        def wait_for_end() -> None:
            sys.stdin.read()
            ended.set()
            endpoint.wake()

        threading.Thread(target=wait_for_end, daemon=True).start()
        while not ended.is_set():
            for event in endpoint.receive(None):
                if isinstance(event, Received):
                    endpoint.send(event.source, event.frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
