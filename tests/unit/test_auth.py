"""Tokens of tenants: files that are refused, callers that are, and what nobody gets to see."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from protos.errors import ConfigError, PermissionDenied, TailpackError, Unauthenticated
from router.auth import Authenticator, file_lines, hashed, new_token, read_tokens
from router.cli import router_group
from router.tenants import NO_LIMITS, TenantLimits


class Clock:
    s = 0.0

    def __call__(self) -> float:
        return self.s


def refusal(it: Authenticator, authorization: str | None, x_tenant: str = "") -> TailpackError:
    with pytest.raises(TailpackError) as caught:
        it.tenant_of(authorization, x_tenant)
    return caught.value


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def tokens() -> dict[str, str]:
    return {"a": new_token(), "b": new_token()}


@pytest.fixture
def file(tmp_path: Path, tokens: dict[str, str]) -> Path:
    return write(tmp_path / "tokens.toml", "\n".join(file_lines(tenant, token) for tenant, token in tokens.items()))


def test_a_token_tells_its_tenant(file: Path, tokens: dict[str, str]) -> None:
    it = Authenticator(file)
    for tenant, token in tokens.items():
        for x_tenant in ("", tenant):
            assert it.tenant_of(f"Bearer {token}", x_tenant) == tenant
        assert it.tenant_of(f"bearer  {token}", "") == tenant  # RFC 9110: the scheme's case does not matter
    assert it.limits_of("a") == NO_LIMITS
    assert it.demands_tokens and not Authenticator(None).demands_tokens
    assert Authenticator(None).tenant_of(None, "whoever") == "whoever"


def test_every_other_caller_is_refused_by_name_and_learns_nothing(file: Path, tokens: dict[str, str]) -> None:
    it, token = Authenticator(file), tokens["a"]
    last = "A" if token[-1] != "A" else "B"
    cases = {
        "TOKEN_MISSING": (None, ""),
        "TOKEN_MALFORMED": (
            "Bearer",
            "Bearer ",
            token,
            f"Basic {token}",
            f"Bearer {token[:-1]}",
            f"Bearer {token}x",
            f"Bearer {token}\n",
            f"Bearer {hashed(token)}",
            "Bearer secret",
            f"Bearer {'é' * 46}",
            "x" * 10_000,
        ),
        "TOKEN_UNKNOWN": (f"Bearer {token[:-1]}{last}", f"Bearer {new_token()}"),
    }
    for reason, given in cases.items():
        for authorization in given:
            for x_tenant in ("", "a", "nobody"):  # a tenant that exists is refused as one that does not
                error = refusal(it, authorization, x_tenant)
                assert isinstance(error, Unauthenticated)
                assert error.reason == reason, authorization
                assert str(error) == str(refusal(it, authorization))
                assert token not in str(error) and "x" * 20 not in str(error)


def test_a_token_is_its_tenant_s_only(file: Path, tokens: dict[str, str]) -> None:
    it = Authenticator(file)
    for other in ("b", "nobody", "A", "a "):
        error = refusal(it, f"Bearer {tokens['a']}", other)
        assert isinstance(error, PermissionDenied)
        assert error.reason == "TENANT_MISMATCH"
        assert error.given == repr(other)
        same = refusal(it, f"Bearer {tokens['a']}", "zz")
        assert (error.message, error.allowed, error.hint) == (same.message, same.allowed, same.hint)


def test_all_hashes_are_compared_whichever_is_right(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (new_token() for _ in range(2))
    file.write_text(file_lines("a", first) + "\n" + file_lines("b", second))
    it, compared = Authenticator(file), []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return known == given

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for token, tenant in ((first, "a"), (second, "b")):
        compared.clear()
        assert it.tenant_of(f"Bearer {token}", "") == tenant
        assert len(compared) == 2
    compared.clear()
    refusal(it, f"Bearer {new_token()}")
    assert len(compared) == 2


def test_limits_and_several_tokens_of_a_tenant(tmp_path: Path) -> None:
    old, new = new_token(), new_token()
    text = f"""
        [tenants.search]
        tokens = ["{hashed(old)}", "{hashed(new)}"]
        max_requests = 3
        tokens_per_minute = 1000
        [tenants.batch]
        tokens = ["{hashed(new_token())}"]
        max_request_bytes = 5
    """
    it = Authenticator(write(tmp_path / "tokens.toml", text))
    assert {it.tenant_of(f"Bearer {token}", "") for token in (old, new)} == {"search"}
    assert it.limits_of("search") == TenantLimits(max_requests=3, tokens_per_minute=1000)
    assert it.limits_of("batch") == TenantLimits(max_request_bytes=5)
    assert it.limits_of("nobody") == NO_LIMITS


def test_files_that_are_wrong_are_refused_by_name_without_quoting_secrets(tmp_path: Path) -> None:
    token = new_token()
    one = f'tokens = ["{hashed(token)}"]'
    path = tmp_path / "tokens.toml"
    for text, says in (
        ("", "nothing at its top"),
        ("[tenants", "not TOML"),
        ("[others.a]\n" + one, "has others"),
        ("tenants = 3", "tenants at its top"),
        (f"[tenants.a]\n{one}\n[more]", "more, tenants"),
        ("[tenants.a]", "no tokens"),
        ("[tenants.a]\ntokens = []", "no tokens"),
        (f'[tenants.a]\ntokens = "{hashed(token)}"', "no tokens"),
        (f'[tenants.a]\ntokens = ["{token}"]', "token 1 of tenant a is no hash"),
        (f'[tenants.a]\ntokens = ["{hashed(token)}", "sha256:{"0" * 63}"]', "token 2 of tenant a is no hash"),
        (f'[tenants."a/b"]\n{one}', "'a/b' is no name of a tenant"),
        (f'[tenants.""]\n{one}', "is no name"),
        (f"[tenants.a]\n{one}\nmax_request = 3", "has max_request"),
        (f"[tenants.a]\n{one}\nmax_requests = 0", "max_requests is 0"),
        (f"[tenants.a]\n{one}\nmax_requests = true", "max_requests is True"),
        (f"[tenants.a]\n{one}\ntokens_per_minute = 1.5", "tokens_per_minute is 1.5"),
        (f"[tenants]\na = 3\n[tenants.b]\n{one}", "tenant a has 3"),
        (f"[tenants.a]\n{one}\n[tenants.b]\n{one}", "tenants a and b have the same token"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_tokens(write(path, text))
        assert caught.value.reason == "BAD_TOKENS_FILE"
        assert says in str(caught.value), text
        assert token not in str(caught.value)
        assert hashed(token)[7:] not in str(caught.value)
    path.write_bytes(b"\xff")
    for unreadable, reason in ((path, "BAD_TOKENS_FILE"), (tmp_path, "TOKENS_FILE_UNREADABLE")):
        with pytest.raises(ConfigError, match=reason):
            Authenticator(unreadable)
    with pytest.raises(ConfigError, match="TOKENS_FILE_UNREADABLE"):
        Authenticator(tmp_path / "none")


def test_a_changed_file_holds_within_a_second_and_a_broken_one_never(tmp_path: Path) -> None:
    first, second, clock = new_token(), new_token(), Clock()
    path = write(tmp_path / "tokens.toml", file_lines("a", first))
    it = Authenticator(path, now_s=clock)
    with capture_logs() as logs:
        write(path, file_lines("a", second) + "\nmax_requests = 1")
        clock.s += 0.9
        assert it.tenant_of(f"Bearer {first}", "") == "a"
        clock.s += 0.2
        assert it.tenant_of(f"Bearer {second}", "") == "a"
        assert it.limits_of("a").max_requests == 1
        assert refusal(it, f"Bearer {first}").reason == "TOKEN_UNKNOWN"
        for broken in ("[tenants", None):
            path.write_text(broken) if broken else path.unlink()
            for _ in range(3):
                clock.s += 1
                assert it.tenant_of(f"Bearer {second}", "") == "a"
        write(path, file_lines("b", first))
        clock.s += 1
        assert it.tenant_of(f"Bearer {first}", "") == "b"
    stays = "changed tokens file refused, the old one stays"
    assert [line["event"] for line in logs] == ["tokens read anew", stays, stays, "tokens read anew"]
    assert not any(secret in str(logs) for secret in (first, second, hashed(first), hashed(second)))


def test_the_command_makes_tokens_that_work(tmp_path: Path) -> None:
    seen = set()
    for _ in range(2):
        result = CliRunner().invoke(router_group, ["token", "team-a"])
        assert result.exit_code == 0
        (token,) = re.findall(r"^tp_\S+$", result.output, re.MULTILINE)
        lines = result.output[result.output.index("[tenants") :]
        assert token not in lines
        assert hashlib.sha256(token.encode()).hexdigest() in lines
        it = Authenticator(write(tmp_path / "tokens.toml", lines))
        assert it.tenant_of(f"Bearer {token}", "") == "team-a"
        seen.add(token)
    assert len(seen) == 2
    refused = CliRunner().invoke(router_group, ["token", "team/a"])
    assert isinstance(refused.exception, TailpackError) and refused.exception.reason == "BAD_TENANT"
