"""Rules: what may be written, what it opens, and what somebody who is refused is told to type."""

import pytest

from elsewhere.errors import UsageError
from elsewhere.network import presets
from elsewhere.network.ports import Forward
from elsewhere.network.rules import Rule, Rules, decide, parse, preset


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("example.org", Rule("example.org")),
        ("Example.ORG.", Rule("example.org")),
        ("example.org:8443", Rule("example.org", 8443)),
        ("*.example.org", Rule("*.example.org")),
        ("*.example.org:22", Rule("*.example.org", 22)),
        ("bücher.example", Rule("xn--bcher-kva.example")),
        ("*.bücher.example:80", Rule("*.xn--bcher-kva.example", 80)),
        ("_service.example.org", Rule("_service.example.org")),
        ("10.0.0.5:5432", Rule("10.0.0.5", 5432)),
        ("[::1]:5432", Rule("::1", 5432)),
        ("[2001:DB8:0:0::5]:443", Rule("2001:db8::5", 443)),
        ("[::ffff:10.0.0.5]:1", Rule("10.0.0.5", 1)),
        ("intranet:8443", Rule("intranet", 8443)),
        ("localhost:65535", Rule("localhost", 65535)),
        (" example.org ", Rule("example.org")),
    ],
)
def test_a_rule_is_understood(text: str, rule: Rule) -> None:
    assert parse(text) == rule
    assert parse(str(rule)) == rule


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("*", "every host"),
        ("*:443", "every host"),
        ("com", "top-level domain"),
        ("com:443", "top-level domain"),
        ("*.com", "whole top-level domain"),
        ("*.com:443", "whole top-level domain"),
        ("*.co.uk", "names are sold"),
        ("intranet", "top-level domain"),
        ("a*.example.org", "wildcard"),
        ("*.*.example.org", "wildcard"),
        ("example.*", "wildcard"),
        ("*example.org", "wildcard"),
        ("*.10.0.0.5:80", "wildcard in front of an address"),
        ("10.0.0.5", "without a port"),
        ("[::1]", "without a port"),
        ("::1", "brackets"),
        ("[::1", "brackets"),
        ("[::1]x", "brackets"),
        ("[fe80::1%eth0]:80", "brackets"),
        ("127.1:80", "read differently"),
        ("2130706433:80", "read differently"),
        ("0x7f000001:80", "read differently"),
        ("1.2.3.4.5:80", "read differently"),
        ("0.0.0.0:80", "unspecified"),
        ("224.0.0.1:80", "multicast"),
        ("example.org:0", "port"),
        ("example.org:65536", "port"),
        ("example.org:-1", "port"),
        ("example.org:", "port"),
        ("example.org:http", "port"),
        ("example.org:٣", "port"),
        ("https://example.org/", "no scheme"),
        ("example.org/path", "no scheme"),
        ("user@example.org", "no scheme"),
        ("", "empty"),
        (".", "empty"),
        ("a..b", "neither"),
        ("-a.example", "neither"),
        ("a b.example", "neither"),
        ("exam\x00ple.org", "neither"),
        ("exam\r\nple.org", "neither"),
        ("x" * 64 + ".example", "neither"),
        ("x." * 130 + "org", "characters"),
        ("\u2028.example", ""),
        ("ß\r\n\x1b.example", "neither"),
        ("\x1b.ß.example", "neither"),
        ("ß" * 300, "characters"),
        ("ß.1", "read differently"),
        ("\udcffß.example", ""),
        (443, "no text"),
        (None, "no text"),
    ],
)
def test_what_is_too_wide_or_nonsense_is_refused_with_the_reason_and_an_example(value: object, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(value)
    assert caught.value.code == "bad_rule"
    assert repr(value)[:20] in caught.value.message, caught.value.message
    assert reason in caught.value.message
    assert caught.value.hint


def test_a_denial_may_be_as_wide_as_it_likes() -> None:
    rules = Rules(
        allow=(parse("example.ru"), parse("10.0.0.5:80")), deny=(parse("*.ru", deny=True), parse("10.0.0.5", deny=True))
    )
    assert not decide(rules, "example.ru", 443).allowed
    assert not decide(rules, "10.0.0.5", 80).allowed
    with pytest.raises(UsageError, match=r"--deny '\*' would close every host; for that there is --network none"):
        parse("*", deny=True)
    with pytest.raises(UsageError, match="every host; for that there is --network none"):
        parse("*:443", deny=True)


def test_a_denied_name_is_denied_with_all_that_is_below_it() -> None:
    rules = Rules(deny=(parse("github.com", deny=True),))
    for host in ("github.com", "api.github.com", "codeload.github.com", "ssh.github.com", "a.b.github.com"):
        verdict = decide(rules, host, 443)
        assert (verdict.allowed, verdict.denied, verdict.rule) == (False, True, "--deny github.com"), host
    assert decide(Rules(allow=(parse("notgithub.com"),), deny=rules.deny), "notgithub.com", 443).allowed
    below = Rules(allow=(parse("example.org"), parse("a.example.org")), deny=(parse("*.example.org", deny=True),), presets=())
    assert decide(below, "example.org", 443).allowed  # a wildcard is still without the name itself
    assert not decide(below, "a.example.org", 443).allowed
    with_port = Rules(allow=(parse("a.example.org"),), deny=(parse("example.org:80", deny=True),), presets=())
    assert not decide(with_port, "a.example.org", 80).allowed
    assert decide(with_port, "a.example.org", 443).allowed


@pytest.mark.parametrize(
    ("rule", "host", "port", "allowed"),
    [
        ("example.org", "example.org", 443, True),
        ("example.org", "EXAMPLE.org.", 80, True),
        ("example.org", "example.org", 22, False),
        ("example.org", "example.org", 8443, False),
        ("example.org", "www.example.org", 443, False),
        ("example.org", "badexample.org", 443, False),
        ("example.org", "example.org.evil.test", 443, False),
        ("example.org:22", "example.org", 22, True),
        ("example.org:22", "example.org", 443, False),
        ("*.example.org", "www.example.org", 443, True),
        ("*.example.org", "a.b.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", ".example.org", 443, False),
        ("*.example.org", "badexample.org", 443, False),
        ("*.example.org:8080", "www.example.org", 8080, True),
        ("*.example.org:8080", "www.example.org", 443, False),
        ("10.0.0.5:80", "10.0.0.5", 80, True),
        ("10.0.0.5:80", "[::ffff:a00:5]", 80, True),
        ("10.0.0.5:80", "10.0.0.5", 443, False),
        ("bücher.example", "xn--bcher-kva.example", 443, True),
        ("bücher.example", "BÜCHER.example", 443, True),
    ],
)
def test_what_a_rule_opens(rule: str, host: str, port: int, allowed: bool) -> None:
    assert decide(Rules(allow=(parse(rule),), presets=()), host, port).allowed is allowed


def test_a_denial_wins_and_says_so() -> None:
    rules = Rules(
        allow=(parse("*.example.org"), parse("a.example.org:443")), deny=(parse("a.example.org", deny=True),), presets=()
    )
    verdict = decide(rules, "a.example.org", 443, "calm-otter")
    assert not verdict.allowed
    assert verdict.denied
    assert verdict.rule == "--deny a.example.org"
    assert "elsewhere network calm-otter" in verdict.how
    assert decide(rules, "b.example.org", 443).allowed


def test_a_denial_without_a_port_is_about_every_port() -> None:
    rules = Rules(allow=(parse("a.example.org:22"),), deny=(parse("a.example.org", deny=True),))
    assert not decide(rules, "a.example.org", 22).allowed
    assert decide(Rules(allow=rules.allow, deny=(parse("a.example.org:443", deny=True),)), "a.example.org", 22).allowed


@pytest.mark.parametrize(
    ("host", "port", "typed"),
    [
        ("evil.test", 443, "elsewhere network calm-otter --allow evil.test"),
        ("evil.test", 8443, "elsewhere network calm-otter --allow evil.test:8443"),
        ("10.0.0.5", 443, "elsewhere network calm-otter --allow 10.0.0.5:443"),
        ("fd00::5", 80, "elsewhere network calm-otter --allow [fd00::5]:80"),
        ("intranet", 80, "elsewhere network calm-otter --allow intranet:80"),
    ],
)
def test_what_to_type_is_something_that_works(host: str, port: int, typed: str) -> None:
    verdict = decide(Rules(), host, port, "calm-otter")
    assert not verdict.allowed
    assert verdict.how == typed
    assert decide(Rules(allow=(parse(typed.rpartition(" ")[2]),)), host, port).allowed


@pytest.mark.parametrize("mode", ["allow", "none"])
@pytest.mark.parametrize(
    ("host", "service"),
    [
        ("127.0.0.1", "5432"),
        ("localhost", "5432"),
        ("app.localhost", "5432"),
        ("::1", "[::1]:5432"),
        ("[::ffff:127.0.0.1]", "5432"),
        ("127.0.0.2", "127.0.0.2:5432"),
        ("127.255.255.254", "127.255.255.254:5432"),
        ("0.0.0.0", "5432"),
        ("::", "5432"),
    ],
)
def test_a_service_of_the_host_is_forwarded(host: str, service: str, mode: str) -> None:
    verdict = decide(Rules(mode=mode), host, 5432, "calm-otter")
    assert not verdict.allowed
    assert "loopback of its own" in verdict.rule
    assert ("127.0.0.1 is to be used" in verdict.rule) is (host in ("127.0.0.2", "127.255.255.254", "0.0.0.0", "::"))
    assert verdict.how == f"elsewhere network calm-otter --forward {service}"
    assert decide(Rules(mode=mode), host, 5432, "").how == f"--forward {service}"
    assert Forward.parse(service).inside == 5432


@pytest.mark.parametrize(
    ("text", "ascii_form"),
    [
        ("faß.example", "xn--fa-hia.example"),
        ("*.FAẞ.example:8443", "xn--fa-hia.example"),
        ("βόλος.example", "xn--nxasmm1c.example"),
        ("bücher.faß.example", "xn--bcher-kva.xn--fa-hia.example"),
        ("a\u200db.example", "xn--ab-m1t.example"),
        ("a\u200cb。example", "xn--ab-j1t.example"),
    ],
)
@pytest.mark.parametrize("deny", [True, False])
def test_a_name_that_is_another_one_to_other_programs_is_to_be_written_in_ascii(text: str, ascii_form: str, deny: bool) -> None:
    with pytest.raises(UsageError, match="has letters that programs read differently") as caught:
        parse(text, deny=deny)
    assert caught.value.code == "bad_rule"
    assert caught.value.message.endswith(f"write the name as {ascii_form}")
    assert parse(ascii_form, deny=deny).host == ascii_form
    assert not decide(Rules(allow=(parse("fass.example"),)), "faß.example", 443).allowed


@pytest.mark.parametrize("host", ["0.1.2.3", "224.0.0.1", "ff02::1"])
def test_nobody_is_told_to_allow_what_cannot_be_allowed(host: str) -> None:
    verdict = decide(Rules(), host, 80)
    assert verdict.rule.startswith(f"{host} is a")
    assert "--allow" not in verdict.how
    assert "nothing can be connected to there" in verdict.how


def test_an_address_that_was_made_up_is_asked_for_again() -> None:
    verdict = decide(Rules(), "198.18.7.9", 443)
    assert verdict.how == "ask for the address of the name again"
    assert "no name has" in verdict.rule


def test_where_credentials_are_given_out_this_is_said_before_what_to_type() -> None:
    verdict = decide(Rules(), "169.254.169.254", 80, "calm-otter")
    warning, _, typed = verdict.how.partition(": ")
    assert "a cloud gives out credentials there" in warning
    assert typed == "elsewhere network calm-otter --allow 169.254.169.254:80"


def test_modes() -> None:
    assert not decide(Rules(mode="none"), "pypi.org", 443).allowed
    assert "--network allow" in decide(Rules(mode="none"), "pypi.org", 443).how
    assert decide(Rules(mode="host"), "anything.test", 1).allowed
    with pytest.raises(UsageError, match="'open'"):
        Rules(mode="open")
    with pytest.raises(UsageError, match="'everything'"):
        Rules(presets=("everything",))


def test_nonsense_is_never_allowed() -> None:
    for host in ("", "a b", "127.1", "x" * 300, "ex\nample.org"):
        verdict = decide(Rules(), host, 443)
        assert not verdict.allowed
        assert verdict.how


def test_what_a_rule_was_written_for() -> None:
    def named(*allow: str, host: str = "example.org", port: int = 443, **more: object) -> str:
        return decide(Rules(allow=tuple(map(parse, allow)), presets=(), **more), host, port).named  # type: ignore[arg-type]

    assert named("example.org") == ""
    assert named("example.org:443") == "", "whoever owns it says where it leads"
    assert named("*.example.org:443", host="a.example.org") == ""
    assert named("10.0.0.5:443", host="10.0.0.5") == "address"
    for host in ("db", "db.internal", "a.b.local", "nas.lan", "nas.home", "db.corp", "db.test", "box.localdomain", "x.home.arpa",
                 "localhost", "app.localhost"):  # fmt: skip
        assert named(f"{host}:443", host=host) == "private", host
    assert named("db.internal", host="db.internal") == ""
    assert named("db.internal", "db.internal:443", host="db.internal") == "private"
    assert named("*.internal.example:443", host="db.internal.example") == ""
    for host in ("internal.example", "notlocal", "local.example.org", "arpa.home.example"):
        assert named(f"{host}:443", host=host) == ("private" if "." not in host else ""), host


def test_presets() -> None:
    usual = Rules()
    for host in ("pypi.org", "registry.npmjs.org", "deb.debian.org", "archive.ubuntu.com", "index.crates.io", "proxy.golang.org",
                 "github.com", "gitlab.com", "codeberg.org", "bitbucket.org"):  # fmt: skip
        verdict = decide(usual, host, 443)
        assert verdict.allowed, host
        assert "preset packages" in verdict.rule
    assert decide(usual, "github.com", 22).allowed
    assert decide(usual, "github.com", 22).named == ""  # a preset was not written for one machine
    assert not decide(usual, "pypi.org", 22).allowed
    assert not decide(usual, "api.anthropic.com", 443).allowed
    assert decide(Rules(presets=("packages", "models")), "api.anthropic.com", 443).allowed
    assert not decide(Rules(presets=()), "pypi.org", 443).allowed


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_says_nothing_that_a_user_could_not_say(name: str) -> None:
    seen = set()
    for host, ports, reason in presets.PRESETS[name]:
        assert parse(host).host == host
        assert reason
        assert all(parse(f"{host}:{port}") for port in ports)
        assert host not in seen
        seen.add(host)
    assert preset(name)


def test_what_the_machine_names_counts_with_packages() -> None:
    machine = (parse("pypi.corp.test:8080", why="~/.pip/pip.conf"),)
    verdict = decide(Rules(machine=machine), "pypi.corp.test", 8080)
    assert verdict.allowed
    assert verdict.named == "private"
    assert "~/.pip/pip.conf" in verdict.rule
    public = (parse("pypi.example.org:443", why="~/.pip/pip.conf"),)
    assert decide(Rules(machine=public), "pypi.example.org", 443).named == "machine"
    assert decide(Rules(allow=(parse("pypi.example.org:443"),), machine=public), "pypi.example.org", 443).named == "machine"
    assert decide(Rules(allow=(parse("pypi.example.org:443"),)), "pypi.example.org", 443).named == ""
    assert not decide(Rules(machine=machine, presets=()), "pypi.corp.test", 8080).allowed


def test_rules_can_be_kept() -> None:
    rules = Rules(
        allow=(parse("*.example.org:8443"), parse("[::1]:80")),
        deny=(parse("*.ru", deny=True),),
        presets=("models",),
        machine=(parse("a.test:80", why="GOPROXY"),),
    )
    again = Rules.from_document(rules.document())
    assert again == rules
    assert again.machine[0].why == "GOPROXY"
    with pytest.raises(UsageError, match="alow"):
        Rules.from_document({"alow": []})
