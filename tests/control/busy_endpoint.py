"""A process whose endpoint is not served for a while, although a peer sends more than may wait and then is killed.

Its argument says who dialled whom: "listener" or "dialler" is what the busy side is.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

from kvferry.control.addresses import AllowedRanges
from kvferry.control.endpoint import Backlog, Endpoint, Limits, Received
from kvferry.control.security import Security

SECRET = b"a secret of this test, quite long enough"
MANY = 5000
LIMITS = Limits(heartbeat_s=1.0, routed_messages=MANY, high_water_messages=1000)


def endpoint() -> Endpoint:
    return Endpoint("127.0.0.1", Security.choose("127.0.0.1", (SECRET,)), AllowedRanges(), limits=LIMITS)


def first(of: Endpoint) -> Received:
    """Serves it until a frame has come."""
    while True:
        for event in of.receive(None):
            assert isinstance(event, Received)
            return event


def flood(pipe: Connection, busy: str) -> None:
    """Sends until nothing more is taken for a while."""
    with endpoint() as peer:
        pipe.send(peer.address)
        address = pipe.recv()
        to = address if busy == "listener" else first(peer).source
        sent, refused = 0, 0
        while sent < MANY and refused < 30:
            try:
                peer.send(to, b"x" * 400)
                sent, refused = sent + 1, 0
            except Backlog:
                refused += 1
                time.sleep(0.01)
        pipe.send(sent)
        time.sleep(60)


def main(busy: str) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    peer = context.Process(target=flood, args=(theirs, busy), daemon=True)
    with endpoint() as mine:
        peer.start()
        address = pipe.recv()
        pipe.send(mine.address)
        if busy == "dialler":
            mine.send(address, b"hello")
        first(mine)
        assert pipe.recv() > LIMITS.high_water_messages
        peer.kill()
        peer.join()
        time.sleep(LIMITS.silence_s)
        print("alive", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
