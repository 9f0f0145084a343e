"""Makes a failing history small: fewer operations, shorter texts, plainer settings."""

import dataclasses
from collections.abc import Callable, Iterator

from .findings import Violation
from .history import Arrive, History, Settings, Steps
from .world import replay

Replay = Callable[[History], object]


def failure_of(history: History, run: Replay = replay) -> Violation | None:
    """How a history fails, or None."""
    try:
        run(history)
    except Violation as violation:
        return violation
    return None


def shrink(history: History, invariant: str, run: Replay = replay, tries: int = 300) -> History:
    """The smallest history found in so many tries that breaks the same invariant."""
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(history):
            if not tries:
                return history
            tries -= 1
            failure = failure_of(smaller, run)
            if failure is not None and failure.invariant == invariant:
                history = smaller
                progress = True
                break
    return history


def _smaller(history: History) -> Iterator[History]:
    """Candidates, those that take most away first."""
    operations = history.operations
    size = len(operations)
    chunk = size
    while chunk:
        for start in range(size - chunk, -1, -chunk):
            yield History(history.settings, operations[:start] + operations[start + chunk :])
        chunk //= 2
    yield from _plainer_settings(history)
    for i, operation in enumerate(operations):
        for simpler in _simpler(operation):
            yield History(history.settings, (*operations[:i], simpler, *operations[i + 1 :]))


def _plainer_settings(history: History) -> Iterator[History]:
    for field in dataclasses.fields(Settings):
        keep = ("geometry", "max_model_len", "gpu_ratio", "host_tokens", "budget")
        if field.name not in keep and getattr(history.settings, field.name) != field.default:
            yield History(
                dataclasses.replace(history.settings, **{field.name: field.default}),
                history.operations,
            )


def _simpler(operation: object) -> Iterator[object]:
    match operation:
        case Steps(count) if count > 1:
            yield Steps(count // 2)
            yield Steps(count - 1)
        case Arrive(_, prompt, generate, _):
            if generate > 1:
                yield dataclasses.replace(operation, generate=1)
                yield dataclasses.replace(operation, generate=generate // 2)
                yield dataclasses.replace(operation, generate=generate - 1)
            for i, (name, length) in enumerate(prompt):
                rest = (*prompt[:i], *prompt[i + 1 :])
                if rest:
                    yield dataclasses.replace(operation, prompt=rest)
                for shorter in (length // 2, length // 16 * 16, length - 16):
                    if 0 < shorter < length:
                        part = ((name, shorter),)
                        yield dataclasses.replace(
                            operation, prompt=(*prompt[:i], *part, *prompt[i + 1 :])
                        )
