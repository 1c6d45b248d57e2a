"""Keys from secrets, where secrets come from, and when open is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from kvferry.control import security
from kvferry.control.addresses import AddressError
from kvferry.control.security import ClusterKeys, Security, SecurityError, load_secret

SECRET = b"sixteen bytes ok"
OTHER = b"another sixteen!"

RFC_5869_VECTORS = {
    # Name: (input key, salt, info, length, output), from RFC 5869, appendix A.
    "basic": (
        "0b" * 22,
        "000102030405060708090a0b0c",
        "f0f1f2f3f4f5f6f7f8f9",
        42,
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    "longer": (
        bytes(range(0x50)).hex(),
        bytes(range(0x60, 0xB0)).hex(),
        bytes(range(0xB0, 0x100)).hex(),
        82,
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
        "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    "no salt, no info": (
        "0b" * 22,
        "",
        "",
        42,
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
}


@pytest.mark.parametrize("name", RFC_5869_VECTORS)
def test_hkdf_gives_the_outputs_of_its_rfc(name: str) -> None:
    secret, salt, info, length, expected = RFC_5869_VECTORS[name]
    output = security.hkdf_sha256(bytes.fromhex(secret), bytes.fromhex(salt), bytes.fromhex(info), length)
    assert output.hex() == expected


def test_hkdf_gives_no_more_than_it_can() -> None:
    assert len(security.hkdf_sha256(SECRET, b"", b"", 8160)) == 8160
    with pytest.raises(ValueError, match="8161"):
        security.hkdf_sha256(SECRET, b"", b"", 8161)


def test_keys_are_the_same_on_every_host_and_differ_by_use_and_secret() -> None:
    keys, again, other = ClusterKeys(SECRET), ClusterKeys(SECRET), ClusterKeys(OTHER)
    assert (keys.server_secret, keys.client_public, keys.key_id) == (
        again.server_secret,
        again.client_public,
        again.key_id,
    )
    values = {getattr(one, name) for one in (keys, other) for name in ClusterKeys.__slots__}
    assert len(values) == 2 * len(ClusterKeys.__slots__)


def test_derived_keys_never_change_between_releases() -> None:
    # Hosts of one cluster may run different releases.
    keys = ClusterKeys(SECRET)
    assert keys.key_id == "78cefe1e6a53d3c9"
    assert keys.server_public == b"zm-Csl:NsK9#ZPfTb$e@Vc=%X}6zvGprF2C@OTq5"
    assert keys.client_public == b"*@ZQ?l70[k]vXBhD?h3ZL+g-B](C.MD:Gi*N&ea7"


def test_public_keys_belong_to_the_secret_ones() -> None:
    keys = ClusterKeys(SECRET)
    assert zmq.curve_public(keys.server_secret) == keys.server_public
    assert zmq.curve_public(keys.client_secret) == keys.client_public


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(SecurityError, match="15 bytes; at least 16"):
        ClusterKeys(SECRET[:15])


def test_no_representation_or_log_shows_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    chosen = Security.choose("10.0.0.1", [SECRET, OTHER])
    keys = ClusterKeys(SECRET)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").info("%s %r %s %r %s", chosen, chosen, keys, keys, [keys])
    hidden = [SECRET, OTHER, keys.server_secret, keys.client_secret, z85.decode(keys.server_secret)]
    assert keys.key_id in caplog.text
    assert not [
        value for value in hidden if value.decode(errors="replace") in caplog.text or value.hex() in caplog.text
    ]


def test_errors_do_not_show_a_secret() -> None:
    for environ in ({"KVFERRY_SECRET": f"{SECRET.decode()},tooshort"}, {"KVFERRY_SECRET": "tooshort"}):
        with pytest.raises(SecurityError) as refused:
            load_secret(None, environ)
        assert "tooshort" not in str(refused.value)
        assert SECRET.decode() not in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.1"])
def test_a_secret_always_means_curve(host: str) -> None:
    chosen = Security.choose(host, [SECRET, OTHER], allow_open=True)
    assert chosen.mode == "curve"
    assert chosen.key_id == ClusterKeys(SECRET).key_id


@pytest.mark.parametrize("secrets", [None, []])
def test_without_a_secret_loopback_is_open(secrets: list[bytes] | None) -> None:
    chosen = Security.choose("127.0.0.1", secrets)
    assert chosen.mode == "open"
    assert chosen.key_id == ""


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "node7"])
def test_without_a_secret_other_hosts_need_a_setting(host: str) -> None:
    with pytest.raises(SecurityError) as refused:
        Security.choose(host, None)
    for told in (host, "KVFERRY_SECRET", "KVFERRY_SECRET_FILE", "allow_open"):
        assert told in str(refused.value)
    assert Security.choose(host, None, allow_open=True).mode == "open"


def test_clients_of_any_accepted_secret_are_admitted_and_no_others() -> None:
    chosen = Security.choose("10.0.0.1", [SECRET, OTHER])
    for secret in (SECRET, OTHER):
        assert chosen.admits(b"CURVE", [z85.decode(ClusterKeys(secret).client_public)])
    keys = ClusterKeys(SECRET)
    assert not chosen.admits(b"CURVE", [z85.decode(keys.server_public)])
    assert not chosen.admits(b"CURVE", [z85.decode(ClusterKeys(b"a third secret ..").client_public)])
    assert not chosen.admits(b"CURVE", [])
    assert not chosen.admits(b"NULL", [])
    assert not chosen.admits(b"PLAIN", [b"user", b"password"])


def test_a_key_that_we_do_not_have_is_named() -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dialler:
        with pytest.raises(AddressError, match=f"0123456789abcdef.*{ClusterKeys(SECRET).key_id}"):
            Security.choose("127.0.0.1", [SECRET]).secure_dialler(dialler, "0123456789abcdef")
        with pytest.raises(AddressError, match="no secret is set"):
            Security.choose("127.0.0.1", None).secure_dialler(dialler, "0123456789abcdef")


def test_nothing_set_means_no_secret() -> None:
    assert load_secret(None, {}) == ()


def test_secrets_from_the_settings_or_the_environment() -> None:
    environ = {"KVFERRY_SECRET": " sixteen bytes ok, another sixteen! "}
    assert load_secret(None, environ) == (SECRET, OTHER)
    assert load_secret("another sixteen!", environ) == (OTHER,)


def test_secrets_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("sixteen bytes ok\n\nanother, with a comma \n")
    path.chmod(0o640)
    assert load_secret(None, {"KVFERRY_SECRET_FILE": str(path)}) == (SECRET, b"another, with a comma")


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o666])
def test_a_file_open_to_others_is_refused_with_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text("sixteen bytes ok\n")
    path.chmod(mode)
    with pytest.raises(SecurityError, match=f"{mode:04o}"):
        load_secret(None, {"KVFERRY_SECRET_FILE": str(path)})


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"KVFERRY_SECRET": ""}, "KVFERRY_SECRET: secret 1 has 0 bytes"),
        ({"KVFERRY_SECRET": "sixteen bytes ok,"}, "secret 2 has 0 bytes"),
        ({"KVFERRY_SECRET": "sixteen bytes o"}, "secret 1 has 15 bytes"),
        ({"KVFERRY_SECRET": "sixteen bytes ok", "KVFERRY_SECRET_FILE": "/x"}, "both set"),
        ({"KVFERRY_SECRET_FILE": "/nowhere/secret"}, "/nowhere/secret can't be read: No such file"),
    ],
)
def test_a_secret_that_is_set_but_unusable_is_never_taken_for_none(environ: dict[str, str], told: str) -> None:
    with pytest.raises(SecurityError, match=told):
        load_secret(None, environ)


@pytest.mark.parametrize(("content", "told"), [(b"\n \n", "holds no secret"), (b"\xff\xfe" * 16, "not UTF-8")])
def test_a_file_without_a_usable_secret(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SecurityError, match=told):
        load_secret(None, {"KVFERRY_SECRET_FILE": str(path)})
