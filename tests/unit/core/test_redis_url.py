from __future__ import annotations

import pytest

from baton.core.redis_url import RedisUrl


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://u:p@h:1/3", RedisUrl("redis://u:p@h:1/3")),
        ("unix:///run/redis.sock", RedisUrl("unix:///run/redis.sock")),
        ("redis+cluster://a:7000,b", RedisUrl("redis://a:7000/", (("a", 7000), ("b", 6379)))),
        (
            "rediss+cluster://u:p@[::1]:7000,b:1/0?ssl_ca_certs=/ca.pem",
            RedisUrl("rediss://u:p@[::1]:7000/0?ssl_ca_certs=/ca.pem", (("::1", 7000), ("b", 1))),
        ),
        (
            "redis+sentinel://:p@s1,s2:1/queues/2",
            RedisUrl("redis://:p@s1:26379/2", (("s1", 26379), ("s2", 1)), "queues"),
        ),
    ],
)
def test_what_a_url_says(url, expected):
    assert RedisUrl.parse(url) == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h", "begins with redis://"),
        ("redis://", "name a host or a path"),
        ("redis://h:0", "port from 1 to 65535"),
        ("redis://h:65536", "[Pp]ort"),
        ("redis+cluster://a:1,,b:2", "hosts as host:port"),
        ("redis+cluster://a:0", "hosts as host:port"),
        ("redis+cluster://a/1", "no databases but 0"),
        ("redis+sentinel://s1:26379", "name the service"),
        ("redis+sentinel:///queues", "hosts as host:port"),
    ],
)
def test_what_is_no_address_says_why(url, message):
    with pytest.raises(ValueError, match=message):
        RedisUrl.parse(url)
