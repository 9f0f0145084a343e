"""When a change fits into a slightly different file, and when it does not."""

import pytest

from image.installer.merge import Conflict, gone, imports, merge

PINNED = """\
import json

LIMIT = 3


class Pool:
    size = 1

    def take(self, count):
        self.size -= count
        return count

    def give(self, count):
        self.size += count


def describe(pool):
    return json.dumps(pool.size)
"""
PATCHED = PINNED.replace("self.size -= count", "assert count\n        self.size -= count")


def test_equal():
    assert merge(PINNED, PATCHED, PINNED) == PATCHED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.size += count", "self.size += 2 * count"),
        ("json.dumps(pool.size)", "str(pool.size)"),
        ("LIMIT = 3", "LIMIT = 4\nMORE = 5"),
        ("def describe", "def before():\n    pass\n\n\ndef describe"),
    ],
)
def test_differs_elsewhere(old, new):
    assert merge(PINNED, PATCHED, PINNED.replace(old, new)) == PATCHED.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("return count", "return count or 0", "Pool.take"),
        ("def take(self, count)", "def take(self, count=1)", "Pool.take"),
        ("    def take", "    @property\n    def take", "Pool.take"),
        ("def take", "def take_some", "Pool.take"),
    ],
)
def test_differs_in_what_is_changed(old, new, named):
    with pytest.raises(Conflict, match=named):
        merge(PINNED, PATCHED, PINNED.replace(old, new))


def test_both_change_the_module_itself():
    patched = PINNED.replace("import json", "import json\nimport os")
    with pytest.raises(Conflict, match="module"):
        merge(PINNED, patched, PINNED.replace("LIMIT = 3", "LIMIT = 4"))


def test_a_line_that_would_land_elsewhere():
    """Lines alone merge well here, but the new method gets into another class."""
    patched = PINNED.replace(
        "\n\ndef describe", "\n    def count(self):\n        pass\n\n\ndef describe"
    )
    base = PINNED.replace("    def give", "\nclass Other:\n    def give")
    with pytest.raises(Conflict, match=r"line by line: Other.count, Pool.count"):
        merge(PINNED, patched, base)


def test_no_python():
    with pytest.raises(Conflict, match="no Python file"):
        merge(PINNED, PATCHED, "<<<<<<< ours\n")


@pytest.mark.parametrize(
    ("old", "new", "missed"),
    [
        ("def take(self, count)", "def take(self, count, now=False)", set()),
        ("def take(self, count)", "def take(self, count, *, now)", {"take"}),
        ("def take(self, count)", "def take(self, number)", {"take"}),
        ("def take(self, count)", "def take(self)", {"take"}),
        ("def describe(pool)", "def show(pool)", {"describe"}),
    ],
)
def test_what_callers_may_miss(old, new, missed):
    assert gone(PINNED, PINNED.replace(old, new)) == missed


def test_imports():
    source = "from vllm.a import b\nfrom .c import d\nfrom .. import e\nfrom os import path\n"
    assert list(imports(source, "vllm/x/y.py")) == [
        ("vllm/a", "b"), ("vllm/x/c", "d"), ("vllm", "e"),
    ]  # fmt: skip
