"""Records: what was encoded is decoded, and anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lookfar.sharing.record import HEADER, MAX_TOKENS, Record, decode, encode

TOKENIZER = b"8 bytes!"


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=50), st.integers(1, 2**63), st.integers(1, 3))
def test_what_was_encoded_is_decoded(ids: list[int], number: int, use: int) -> None:
    data = encode(Record("0123456789abcdef", number, use, ids), TOKENIZER)
    assert len(data) == HEADER.size + len(ids) * (2 if max(ids) < 1 << 16 else 4)
    found = decode(data, TOKENIZER, 200_001)
    assert (found.origin, found.number, found.use) == ("0123456789abcdef", number, use)
    assert list(found.ids) == ids


@given(st.binary(max_size=80))
def test_other_bytes_are_refused_or_hold_tokens_of_the_vocabulary(data: bytes) -> None:
    for start in (b"", encode(Record("00" * 8, 1, 1, []), TOKENIZER)):
        try:
            found = decode(start + data, TOKENIZER, 100)
        except ValueError:
            continue
        assert 0 < len(found.ids) <= MAX_TOKENS
        assert all(0 <= token < 100 for token in found.ids)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "another version"),
        (b"\x02" + encode(Record("00" * 8, 1, 1, [1]), TOKENIZER)[1:], "another version"),
        (encode(Record("00" * 8, 1, 1, [1]), b"another!"), "another tokenizer"),
        (encode(Record("00" * 8, 1, 1, [1, 2]), TOKENIZER)[:-1], "damaged"),
        (encode(Record("00" * 8, 1, 1, [1, 100]), TOKENIZER), "outside the vocabulary"),
        (encode(Record("00" * 8, 1, 1, [1] * (MAX_TOKENS + 1)), TOKENIZER), "too many"),
    ],
)
def test_reasons(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(data, TOKENIZER, 100)
