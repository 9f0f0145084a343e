"""Bring the series' change of a Python file into a slightly different version of that file.

A merge of lines can be wrong without a conflict. So what is merged is looked at again,
definition by definition: each function, and what of a class or the module stands outside of
functions, must either be exactly as the series leaves it, where the base has what the series
was made for, or exactly the base's, where the series changes nothing. Else there is no merge.
"""

import ast
from collections.abc import Iterator
from difflib import SequenceMatcher


class Conflict(Exception):
    """What the series changes differs; the message names the definitions."""


def merge(pinned: str, patched: str, base: str) -> str:
    """The base's file with the change from `pinned` to `patched`.

    Raises:
        Conflict: the change is not provably the same one in the base's file.
    """
    before, after, there = map(_definitions, (pinned, patched, base))
    names = before.keys() | after.keys() | there.keys()
    wanted = {}
    conflicts = []
    for name in names:
        if there.get(name) == before.get(name):
            wanted[name] = after.get(name)
        elif after.get(name) == before.get(name):
            wanted[name] = there.get(name)
        else:
            conflicts.append(name)
    if conflicts:
        raise Conflict(f"differs in what the series changes: {', '.join(sorted(conflicts))}")
    merged = "".join(
        _merged_lines(*(text.splitlines(True) for text in (pinned, patched, base)))
    )
    found = _definitions(merged)
    if wrong := sorted(
        name for name in names | found.keys() if found.get(name) != wanted.get(name)
    ):
        raise Conflict(f"cannot be merged line by line: {', '.join(wrong)}")
    return merged


def _definitions(source: str) -> dict[str, str]:
    """The text of each function by its qualified name, and of what is around them."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise Conflict(f"is no Python file: {error}") from None
    lines = source.splitlines(True)
    found: dict[str, str] = {}

    def keep(name: str, text: str) -> None:
        while name in found:  # overloads, setters of properties
            name += "'"
        found[name] = text

    def visit(node: ast.Module | ast.ClassDef, name: str, first: int, last: int) -> None:
        outside = dict(enumerate(lines[first:last], start=first))
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            start = min([child.lineno, *(d.lineno for d in child.decorator_list)]) - 1
            end = child.end_lineno or child.lineno
            for number in range(start, end):
                del outside[number]
            full_name = f"{name}.{child.name}".removeprefix("module.")
            if isinstance(child, ast.ClassDef):
                visit(child, full_name, start, end)
            else:
                keep(full_name, "".join(lines[start:end]))
        # blank lines move with what they set apart
        keep(name, "".join(line for line in outside.values() if line.strip()))

    visit(tree, "module", 0, len(lines))
    return found


def _merged_lines(pinned: list[str], patched: list[str], base: list[str]) -> Iterator[str]:
    changes = sorted([*_changes(pinned, patched, 0), *_changes(pinned, base, 1)])
    position = 0
    previous = (-1, -1)
    for start, end, side, lines in changes:
        if start <= previous[0] and side != previous[1]:
            raise Conflict(f"differs next to what the series changes, at line {start + 1}")
        yield from pinned[position:start]
        yield from lines
        position, previous = end, (end, side)
    yield from pinned[position:]


def _changes(
    before: list[str], after: list[str], side: int
) -> Iterator[tuple[int, int, int, list[str]]]:
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for kind, start, end, first, last in matcher.get_opcodes():
        if kind != "equal":
            yield start, end, side, after[first:last]


def identifiers(source: str) -> set[str]:
    """All names that a file uses or defines."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        for attribute in ("id", "attr", "name", "arg"):
            if isinstance(value := getattr(node, attribute, None), str):
                found.add(value)
    return found


def imports(source: str, path: str) -> Iterator[tuple[str, str]]:
    """What a file of the package imports from its other modules: module, and name there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".") if node.module else []
            if node.level:
                module = [*path.split("/")[: -node.level], *module]
            if module[0] == path.split("/")[0]:
                yield from (("/".join(module), alias.name) for alias in node.names)


def gone(pinned: str, patched: str) -> set[str]:
    """Names of functions and classes that callers of the old file may miss in the new one."""
    before, after = _signatures(pinned), _signatures(patched)
    return {
        name.rpartition(".")[2]
        for name, old in before.items()
        if name not in after or not _accepts(after[name], old)
    }


def _signatures(source: str) -> dict[str, ast.arguments | None]:
    found: dict[str, ast.arguments | None] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = None
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + node.name] = node.args

    visit(ast.parse(source).body, "")
    return found


def _accepts(new: ast.arguments | None, old: ast.arguments | None) -> bool:
    """Whether every call that suits the old signature suits the new one."""
    if new is None or old is None:
        return new is old
    was, now = ([a.arg for a in s.posonlyargs + s.args] for s in (old, new))
    required = len(now) - len(new.defaults)
    was_required = len(was) - len(old.defaults)
    old_keywords = {a.arg for a in old.kwonlyargs}
    new_keywords = {a.arg: d for a, d in zip(new.kwonlyargs, new.kw_defaults)}
    return (
        now[: len(was)] == was
        and required <= was_required
        and old_keywords <= new_keywords.keys()
        and all(d is not None for a, d in new_keywords.items() if a not in old_keywords)
        and bool(new.vararg) >= bool(old.vararg)
        and bool(new.kwarg) >= bool(old.kwarg)
    )
