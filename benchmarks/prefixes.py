"""Bytes: what is kept of a prompt, and what its restoring moves, against the least there is."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .results import table
from .workers import STOCK, Worker

VARIANTS = {
    "31B": "gemma4-31b",
    "26B-A4B": "gemma4-26b-a4b",
    "12B": "gemma4-12b",
    "E4B": "gemma4-e4b",
    "E2B": "gemma4-e2b",
    "one group": "qwen3-32b",
}
_CHUNKS = (1, 2, 4, 8)
_SHARES = (0.0, 0.25, 0.5, 0.75)
# At a common block boundary of all variants and chunk sizes, and off every one.
_LENGTHS = (8192, 8192 + 777)
_PROMPTS = (8192, 32768)
# Prompts that fill a host tier, so many that half a prompt does not matter.
_FILL = {8192: 40, 32768: 12}


def measure_moved(tree: str | None, jobs: int = 2) -> list[dict[str, Any]]:
    """Restore prefixes on every variant, with every dtype and chunk size."""
    cases = list(itertools.product(VARIANTS, ("bf16", "fp8"), _CHUNKS, _LENGTHS))

    def work(mine: list[tuple[str, str, int, int]]) -> list[dict[str, Any]]:
        rows = []
        with Worker("v0.19.1", tree) as worker:
            for name, dtype, chunk, tokens in mine:
                for row in worker.call(
                    "prefixes.moved",
                    geometry=VARIANTS[name],
                    kv_dtype=dtype,
                    blocks_per_chunk=chunk,
                    tokens=tokens,
                    shares=_SHARES,
                ):
                    row |= {"variant": name, "dtype": dtype, "chunk": chunk, "tokens": tokens}
                    rows.append(row)
        return rows

    with ThreadPoolExecutor(jobs) as pool:
        shares = [cases[i::jobs] for i in range(jobs)]
        return list(itertools.chain.from_iterable(pool.map(work, shares)))


def measure_kept(
    trees: dict[str, tuple[str, str | None]], jobs: int = 2
) -> list[dict[str, Any]]:
    """What is kept of a prompt, on several trees: name -> (pin, tree)."""

    def work(name: str) -> list[dict[str, Any]]:
        rows = []
        with Worker(*trees[name]) as worker:
            for variant, geometry in VARIANTS.items():
                for tokens in _PROMPTS:
                    row = {"subject": name, "variant": variant, "tokens": tokens}
                    row |= worker.call("prefixes.kept", geometry=geometry, tokens=tokens)
                    row |= worker.call(
                        "prefixes.per_gib",
                        geometry=geometry,
                        tokens=tokens,
                        prompts=_FILL[tokens],
                    )
                    rows.append(row)
        return rows

    with ThreadPoolExecutor(jobs) as pool:
        return list(itertools.chain.from_iterable(pool.map(work, trees)))


def subjects(tree: str | None, tree_33: str | None) -> dict[str, tuple[str, str | None]]:
    return {
        "this series": ("v0.19.1", tree),
        "v0.33.0": ("v0.33.0", STOCK),
        "v0.33.0, this series": ("v0.33.0", tree_33),
    }


def moved_ratio(row: dict[str, Any]) -> float:
    return row["bytes"] / row["least_bytes"] if row["least_bytes"] else 1.0


def tables_moved(rows: list[dict[str, Any]]) -> str:
    def worst(value: Any, variant: str, **wanted: Any) -> float:
        return max(
            value(row)
            for row in rows
            if row["variant"] == variant and all(row[k] == v for k, v in wanted.items())
        )

    columns = [(dtype, chunk) for dtype in ("bf16", "fp8") for chunk in _CHUNKS]
    head = ["variant", *(f"{dtype}, {chunk}" for dtype, chunk in columns)]

    def grid(value: Any) -> str:
        return table(
            head,
            [
                [name, *(f"{worst(value, name, dtype=d, chunk=c):.3f}" for d, c in columns)]
                for name in VARIANTS
            ],
        )

    return "\n\n".join(
        [
            (
                "Bytes loaded / the least, the worst of 0, 25, 50 and 75 % on the GPU and of "
                f"prompts of {' and '.join(f'{n:,}' for n in _LENGTHS)} tokens; by dtype and "
                "blocks per chunk:"
            ),
            grid(moved_ratio),
            "Tokens of the prompt that were computed again, the most of them:",
            table(
                head,
                [
                    [
                        name,
                        *(
                            int(worst(_computed_again, name, dtype=d, chunk=c))
                            for d, c in columns
                        ),
                    ]
                    for name in VARIANTS
                ],
            ),
            "Jobs per restored prefix (least: 1):",
            grid(lambda row: row["jobs"]),
            ("Copies per block, in each tensor (in a fresh pool blocks are in order):"),
            grid(lambda row: row["copies"] / max(1, row["blocks"])),
        ]
    )


def _computed_again(row: dict[str, Any]) -> int:
    return max(0, row["tokens"] - row["restored"])


def tables_kept(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["subject"] for row in rows))
    parts = []
    for tokens in _PROMPTS:
        mine = [row for row in rows if row["tokens"] == tokens]

        def grid(value: Any, head: list[str], mine: list[dict[str, Any]] = mine) -> str:
            lines = []
            for variant in VARIANTS:
                cells = [
                    r
                    for n in names
                    for r in mine
                    if r["variant"] == variant and r["subject"] == n
                ]
                lines.append([variant, *(cell for r in cells for cell in value(r))])
            return table(["variant", *head], lines)  # fmt: skip

        parts += [
            (
                f"A prompt of {tokens:,} tokens: host bytes kept / the least. Spare copies are "
                "kept while there is room, and are the first to go:"
            ),
            grid(
                lambda r: [f"{r['kept'] / r['least']:.3f}", f"{_needed_ratio(r):.3f}"],
                [f"{n}{where}" for n in names for where in ("", ", without spare")],
            ),
            "Tokens that come back per GiB of a full tier, and the most there can be:",
            grid(
                lambda r: [round(r["tokens_per_gib"]), round(r["best_per_gib"])],
                [f"{n}, {what}" for n in names for what in ("restored", "best")],
            ),
        ]
    return "\n\n".join(parts)


def _needed_ratio(row: dict[str, Any]) -> float:
    return row["needed"] / row["least"]


def targets_moved(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, bool]]:
    boundary = [row for row in rows if row["tokens"] == _LENGTHS[0]]
    other = [row for row in rows if row["tokens"] != _LENGTHS[0]]
    on = max(boundary, key=moved_ratio)
    off = max(other, key=lambda row: moved_ratio(row) - row["common"] / row["tokens"])
    scattered = max(rows, key=lambda row: row["copies"] / max(1, row["runs"]))
    return [
        ("bytes loaded / least, at common block boundaries", "1.00",
         (f"{moved_ratio(on):.3f} at the worst ({on['variant']}, {on['dtype']}, "
         f"{on['chunk']} per chunk)"), moved_ratio(on) <= 1.0),
        ("bytes loaded / least, elsewhere", "at most 1 + common block / N",
         (f"{moved_ratio(off):.3f} at the worst ({off['variant']}, {off['dtype']}, "
         f"{off['chunk']} per chunk)"),
         moved_ratio(off) <= 1 + off["common"] / off["tokens"]),
        ("jobs per restored prefix", "1", f"{max(r['jobs'] for r in rows)}",
         max(r["jobs"] for r in rows) == 1),
        ("copies per tensor / with neighbours joined", "1",
         f"{scattered['copies'] / scattered['runs']:.2f} at the worst",
         scattered["copies"] == scattered["runs"]),
    ]  # fmt: skip


def targets_kept(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, bool]]:
    result = []
    ours = [r for r in rows if r["subject"] == "this series" and r["tokens"] == 8192]
    for what, ratio in (
        ("without spare copies", _needed_ratio),
        ("in a tier with room", lambda r: r["kept"] / r["least"]),
    ):
        figures = {r["variant"]: ratio(r) for r in ours}
        worst = max(figures.values())
        text = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        result.append(
            (f"host bytes kept of an 8k prompt / least, {what}", "at most 1.02", text,
             worst <= 1.02)
        )  # fmt: skip
    return result
