import math

import msgspec
import pytest

from kvferry.protocol import messages as m

REF = m.TransferRef("P", "p1", "ab" * 16, 3)
LANDING = m.Landing("c", "l", 1, 3)
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
    m.PlainRelease("tx-1", 2),
    m.Nudge("p1"),
    m.Quiesced("d1", "l", 1, 4),
    m.QuiescedAck("l", 1, 4),
    m.RemoteBlocks(
        LANDING,
        REF,
        "p1",
        "D",
        "d1",
        "tcp://d:1",
        "",
        "nixl",
        2,
        100,
        b"d" * 16,
        b"t" * 16,
        16,
        100,
        (0, 64),
        ((-1, 7), (9,)),
    ),
    m.WriteDone(LANDING, 4096, 3, "nixl"),
    m.Failed(LANDING, "the transport failed", False),
    m.Failed(LANDING, "no transport in common", True, True),
    m.CancelWrite(LANDING, REF, "p1", 2),
    m.OpenWrite(LANDING, m.TransferRef("", "", "R", 0), "D", 2, 5, 100, b"d" * 16, b"t" * 16),
    m.WriteOpened(LANDING, 5, "ab" * 16, ((1, 2), ())),
    m.StopWrite(LANDING, "the claim lapsed"),
    m.CloseWrite(LANDING, 6),
    m.WriteClosed(LANDING, 6),
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


LARGEST = [
    m.Released("c" * 128, 2**63 - 1),
    m.Refused("c", 1, 7, "digest", "d" * 500),
    m.Claim(REF, "c", "D", "d1", 1, 2, 7, 100, b"d" * 64, b"b" * 64, b"t" * 64),
    m.Renew("D", "d1", 8, (m.RenewEntry(REF, "c", 2),) * 4096),
    m.Renewed(8, (m.RenewedEntry("c", False, "", 0.0),) * 4096),
    m.Release(REF, "c", "D", "d1", 9, (0,) * 4096, 2, "failed", "r" * 500),
    m.Grant("c", 1, 7, 3, 86400.0),
    m.Failed(m.Landing("c" * 128, "l" * 128, 2**63 - 1, 0), "r" * 500, True),
    m.WriteOpened(LANDING, 5, "x", (tuple(range(100_000)), (-1, 2**31 - 1))),
]
TOO_LARGE = [
    m.Released("c" * 129, 9),
    m.Released("c", 2**63),
    m.Released("c", -1),
    m.Refused("c", 1, 7, "digest", "d" * 501),
    m.Claim(REF, "c", "D", "d1", 1, 2, 7, 100, b"d" * 65, b"", b""),
    m.Renew("D", "d1", 8, (m.RenewEntry(REF, "c", 2),) * 4097),
    m.Renewed(8, (m.RenewedEntry("c", False, "", 0.0),) * 4097),
    m.Renewed(8, (m.RenewedEntry("c", True, "", math.nan),)),
    m.Release(REF, "c", "D", "d1", 9, (0,) * 4097, 2, "done", ""),
    m.Release(REF, "c", "D", "d1", 9, (-1,), 2, "done", ""),
    m.Failed(LANDING, "r" * 501, True),
    m.CloseWrite(m.Landing("c" * 129, "l", 0, 0), 1),
    m.CloseWrite(m.Landing("c", "l", -1, 0), 1),
    m.WriteOpened(LANDING, 5, "x", ((-2,),)),
    m.WriteOpened(LANDING, 5, "x", ((2**31,),)),
    m.WriteOpened(LANDING, 5, "x", ((),) * 4097),
    *(m.Grant("c", 1, 7, 3, lease_s) for lease_s in (math.nan, math.inf, -math.inf, -1.0, 86401.0)),
]


@pytest.mark.parametrize("message", LARGEST, ids=lambda message: type(message).__name__)
def test_the_largest_of_everything_is_taken(message):
    assert m.decode(m.encode(message)) == message


@pytest.mark.parametrize("message", TOO_LARGE, ids=lambda message: repr(message)[:40])
def test_what_is_out_of_bounds_is_a_bad_message(message):
    with pytest.raises(m.BadMessage):
        m.decode(m.encode(message))


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_every_text_and_digest_has_a_bound(message):
    for name, value in msgspec.structs.asdict(message).items():
        if isinstance(value, str | bytes) and name not in ("payload", "outcome"):
            vast = msgspec.structs.replace(message, **{name: (value[:1] or "x") * 1001})
            with pytest.raises(m.BadMessage):
                m.decode(m.encode(vast))


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("plain, and \u00e9", "plain, and \u00e9"),
        ("a\nb\x1b[31m\u202e", "a\\nb\\x1b[31m\\u202e"),
        ("x" * 500, "x" * 500),
        ("x" * 501, "x" * 497 + "..."),
        ("\n" * 400, "\\n" * 248 + "\\..."),
        ("\udc80", "\\udc80"),
    ],
)
def test_shortened_text_is_bounded_and_prints(text, short):
    assert m.shorten(text) == short
    assert m.shorten(short) == short


@pytest.mark.parametrize(
    ("frame", "transfer_id", "size"),
    [
        (b"tx-00112233445566778899aabbccddeeff", "tx-00112233445566778899aabbccddeeff", 1),
        (b"sidecar-cmpl-7", "sidecar-cmpl-7", 1),
        (msgspec.msgpack.encode({"type": "release", "transfer_id": "tx-1", "consumer_tp_size": 4}), "tx-1", 4),
        (msgspec.msgpack.encode({"type": "release", "transfer_id": "tx-1"}), "tx-1", 1),
    ],
)
def test_the_older_wire_format_is_understood(frame, transfer_id, size):
    assert m.decode(frame) == m.PlainRelease(transfer_id=transfer_id, consumer_tp_size=size)


@pytest.mark.parametrize(
    "frame",
    [
        b"short",
        b"with a space in it",
        b"tx-" + b"1" * 126,
        msgspec.msgpack.encode({"type": "release", "transfer_id": "tx-1", "consumer_tp_size": 0}),
        msgspec.msgpack.encode({"type": "release", "transfer_id": "tx-1", "consumer_tp_size": -1}),
        msgspec.msgpack.encode({"type": "release", "transfer_id": 7}),
        msgspec.msgpack.encode({"type": "release", "transfer_id": ""}),
        msgspec.msgpack.encode({"type": "release"}),
    ],
)
def test_what_only_looks_like_it_is_a_bad_message(frame):
    with pytest.raises(m.BadMessage):
        m.decode(frame)
