"""What may be forwarded and published, as texts."""

import pytest

from elsewhere.errors import UsageError
from elsewhere.network.ports import Forward, Publish


@pytest.mark.parametrize(
    ("text", "meant", "shown"),
    [
        ("5432", Forward(5432, "127.0.0.1", 5432), "5432"),
        ("127.0.0.1:5432", Forward(5432, "127.0.0.1", 5432), "5432"),
        ("DB.example.org:5432", Forward(5432, "db.example.org", 5432), "db.example.org:5432"),
        ("15432=localhost:5432", Forward(15432, "localhost", 5432), "15432=localhost:5432"),
        ("15432=5432", Forward(15432, "127.0.0.1", 5432), "15432=5432"),
        ("[::1]:5432", Forward(5432, "::1", 5432), "[::1]:5432"),
        ("5432=61080", Forward(5432, "127.0.0.1", 61080), "5432=61080"),
        ("unix:/run//db/../db.sock", Forward(path="/run/db.sock"), "unix:/run/db.sock"),
        ("unix://run/a=b:1", Forward(path="/run/a=b:1"), "unix:/run/a=b:1"),
    ],
)
def test_a_forward_is_what_it_says_and_says_what_it_is(text: str, meant: Forward, shown: str) -> None:
    found = Forward.parse(text)
    assert found == meant
    assert str(found) == shown
    assert Forward.parse(shown) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("0", "no number from 1"),
        ("65536", "no number from 1"),
        ("db.example.org", "has no port"),
        ("http://db.example.org:80", "alone"),
        ("::1:5432", "brackets"),
        ("127.1:5432", "read differently"),
        ("x=5432", "no number from 1"),
        ("=5432", "no number from 1"),
        ("61080", "its own way out"),
        ("unix:db.sock", "begin with /"),
        ("unix:", "begin with /"),
        ("unix:/", "no socket can have"),
        ("unix:/run/", "no socket can have"),
        ("unix:/run/a\nb", "no socket can have"),
        ("unix:/" + "a" * 107, "more than 107 bytes"),
        (5432, "is no text"),
    ],
)
def test_what_cannot_be_forwarded_is_refused_with_the_reason(text: object, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        Forward.parse(text)
    assert caught.value.code == "bad_forward"
    assert why in caught.value.message


@pytest.mark.parametrize(
    ("text", "meant", "shown"),
    [
        ("8080", Publish(8080, 8080), "8080"),
        (8080, Publish(8080, 8080), "8080"),
        ("8000:80", Publish(80, 8000), "8000:80"),
        ("0:80", Publish(80, 0), "0:80"),
        ("80:80", Publish(80, 80), "80"),
    ],
)
def test_a_published_port_is_what_it_says_and_says_what_it_is(text: object, meant: Publish, shown: str) -> None:
    assert Publish.parse(text) == meant
    assert str(meant) == shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0", "names no port of the sandbox"),
        ("80:0", "no number from 1"),
        ("0.0.0.0:80", "127.0.0.1 alone"),
        ("127.0.0.1:8000:80", "127.0.0.1 alone"),
        (":80", "127.0.0.1 alone"),
        ("99999:80", "no number from 1"),
        ("٣:80", "no number from 1"),
        ("", "no number from 1"),
        (True, "neither"),
        (None, "neither"),
    ],
)
def test_what_cannot_be_published_is_refused_with_the_reason(text: object, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        Publish.parse(text)
    assert caught.value.code == "bad_publish"
    assert why in caught.value.message
