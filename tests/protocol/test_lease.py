import math

import pytest

from kvferry.protocol.lease import Alarm, Leases


def test_defaults():
    leases = Leases()
    assert (leases.first_hold_s, leases.lease_s, leases.renew_s, leases.longest_hold_s) == (60, 30, 5, 600)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first_hold_s", 0),
        ("lease_s", -30.0),
        ("renew_s", math.nan),
        ("load_s", math.inf),
        ("parking_s", "5"),
        ("handshake_s", True),
        ("margin", 0.6),
        ("margin", -0.1),
        ("max_parked", 0),
        ("max_claims", 2.5),
        ("release_tries", True),
    ],
)
def test_nonsense_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} is {value!r}"):
        Leases(**{name: value})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"first_hold_s": 700}, "first_hold_s is 700, must not exceed longest_hold_s, which is 600"),
        ({"lease_s": 601}, "lease_s is 601, must not exceed longest_hold_s, which is 600"),
        ({"claim_reply_s": 61}, "claim_reply_s is 61, must not exceed load_s, which is 60"),
        ({"renew_s": 16}, "renew_s is 16, must be at most half of lease_s, which is 30"),
    ],
)
def test_times_that_contradict_each_other_are_named(values, text):
    with pytest.raises(ValueError, match=text):
        Leases(**values)


def test_a_lease_is_trusted_less_its_margin_and_only_early_in_it():
    leases = Leases()
    assert leases.may_accept(100.0, 126.99, 30.0)
    assert not leases.may_accept(100.0, 127.0, 30.0)
    assert leases.is_fresh(100.0, 115.0, 30.0)
    assert not leases.is_fresh(100.0, 115.01, 30.0)


@pytest.mark.parametrize("lease_s", [math.nan, -1.0, 0.0])
def test_a_senseless_lease_proves_nothing(lease_s):
    assert not Leases().is_fresh(100.0, 100.0, lease_s)


def test_an_alarm_is_never_late():
    alarm = Alarm()
    assert alarm.at is None
    alarm.by(7.0)
    alarm.by(9.0)
    assert alarm.at == 7.0
    assert not alarm.is_due(6.9)
    assert alarm.is_due(7.0)
    alarm.clear()
    assert alarm.at is None
