"""Request ids and block hashes that hash the same in every process.

vLLM keeps both in sets, and Python orders a set of strings or bytes differently in each
process. With these a seed means the same history everywhere.
"""

import zlib


class Name(str):
    """A request id."""

    def __new__(cls, text: str) -> "Name":
        name = super().__new__(cls, text)
        name._hash = zlib.crc32(text.encode())
        return name

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return Name, (str(self),)

    def __hash__(self) -> int:
        return self._hash


class Hash(bytes):
    """A block hash; keys that vLLM makes from it, and what they begin with, are too.

    What a key ends with, the number of a group, is not.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        return zlib.crc32(self)

    def __add__(self, other: bytes) -> "Hash":
        return Hash(bytes(self) + other)

    def __getitem__(self, key: int | slice) -> "int | bytes | Hash":
        part = bytes.__getitem__(self, key)
        begins = isinstance(key, slice) and not key.start
        return Hash(part) if begins else part


FIRST = Hash(b"the start of every prefix")


def hash_block(value: tuple) -> Hash:
    """Hash of (hash of the block before, tokens, what else tells blocks apart)."""
    before, tokens, extra = value
    mixed = hash((before, tokens, 0 if extra is None else zlib.crc32(repr(extra).encode())))
    return Hash((mixed & (1 << 64) - 1).to_bytes(8, "big"))
