import msgspec
import pytest

from kvferry.protocol import messages as m

REF = m.TransferRef("P", "p1", "ab" * 16, 3)
EVERY = [
    m.Hello(m.PROTOCOL_VERSION, "P", "d1", 1),
    m.Record(1, m.PROTOCOL_VERSION, "P", "p1", b"\x00\xff"),
    m.Claim(REF, "c", "D", "d1", 1, 2, 7, 100, b"d" * 16, b"b" * 16, b"t" * 16),
    m.Grant("c", 1, 7, 3, 29.5),
    m.Refused("c", 1, 7, "digest", "claimed 00, held 01"),
    m.Renew("D", "d1", 8, (m.RenewEntry(REF, "c", 2),)),
    m.Renewed(8, (m.RenewedEntry("c", False, m.CLAIM_OVER, 0.0),)),
    m.Release(REF, "c", "D", "d1", 9, (0, 1), 2, "failed", "a read failed"),
    m.Release(REF, "c", "D", "d1", 9, None, 2, "unused", ""),
    m.Released("c", 9),
    m.Nudge("p1"),
    m.Quiesced("d1", "l", 1, 4),
    m.QuiescedAck("l", 1, 4),
]


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_what_is_sent_is_what_comes(message):
    assert m.decode(m.encode(message)) == message


def test_every_message_is_tried():
    assert {type(message) for message in EVERY} == set(m.Message.__args__)


def test_a_newer_peers_keys_are_ignored():
    frame = msgspec.msgpack.encode({"type": "released", "claim_id": "c", "seq": 9, "colour": "blue"})
    assert m.decode(frame) == m.Released("c", 9)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1\x00\xff",
        b"GET / HTTP/1.1\r\n\r\n",
        b"cmpl-plain-transfer-id",
        b"\x93" * 100_000,  # arrays in arrays, deeper than any stack
        msgspec.msgpack.encode({"type": "free_everything"}),
        msgspec.msgpack.encode({"claim_id": "c", "seq": 9}),
        msgspec.msgpack.encode({"type": "released", "claim_id": "c", "seq": "9"}),
        msgspec.msgpack.encode({"type": "released", "seq": 9}),
        b"\x82\xa4type\xa8released\xa8claim_id\xa2\xff\xfe",  # not UTF-8, and cut short
        m.encode(EVERY[0]) + b"\x00",
    ],
    ids=lambda frame: repr(frame[:12]),
)
def test_garbage_is_a_bad_message(frame):
    with pytest.raises(m.BadMessage, match=f"frame of {len(frame)} bytes"):
        m.decode(frame)
