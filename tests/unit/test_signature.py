"""The signature of a configuration: what this account has written is its own, and nothing else."""

import pytest

from cait import signature

TEXT = "a: 1\n"


@pytest.fixture(autouse=True)
def key(tmp_path, monkeypatch):
    """The account's key, which is not yet there."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "cait/key"


def test_only_the_whole_text_that_was_signed_is_ones_own(key):
    signed = signature.signed(TEXT)
    assert key.stat().st_mode & 0o777 == 0o600
    assert signature.is_own(signed)
    assert not signature.is_own(signed.replace("1", "2", 1))
    assert not signature.is_own(signed[: signed.index("signed") + 9])
    assert not signature.is_own(TEXT)


@pytest.mark.parametrize("content", [b"", b"short", b"\n"])
def test_a_damaged_key_signs_nothing(content, key):
    signed = signature.signed(TEXT)
    key.write_bytes(content)
    assert not signature.is_own(signed)
    assert signature.signed(TEXT) == TEXT


def test_a_key_that_cannot_be_written_is_made_the_next_time(key, monkeypatch):
    def full(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(signature.secrets, "token_bytes", full)
        assert signature.signed(TEXT) == TEXT
    assert signature.is_own(signature.signed(TEXT))
    assert {path.name for path in key.parent.iterdir()} == {"key", "lock"}
