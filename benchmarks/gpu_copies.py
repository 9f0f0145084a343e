"""What copies between host memory and a GPU cost. Needs torch and one GPU, nothing else.

    python gpu_copies.py [--out result.json]

1. Bandwidth each way for the pages of each Gemma 4 variant, against one large copy of pinned
   memory: page by page, as the connector's worker copies; with neighbours joined, as far as
   blocks follow each other; and as one batch per tensor (an index copy through a staging
   buffer).
2. Time to first token of a prompt that is restored against one that is computed. The model
   is a stand-in: matrix products with the arithmetic of the variant's active parameters per
   token, without attention, so that computing is rather too fast here than too slow.
3. Time per generated token with and without copies in the background; the stand-in has
   weights of its own for as many layers as half of the free memory holds.

Copies are issued from Python, which takes some microseconds each: with the smallest pages
the connector's C++ loop is faster than "one by one" here.

It takes about two minutes. Without a GPU it says so and ends with status 0.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError:
    torch = None

MIB = 1 << 20
_SECONDS = 480.0


@dataclass(frozen=True)
class Variant:
    """A model: what its cache looks like, and what a token costs to compute.

    Attributes:
        page: bytes that one block takes in one tensor.
        tensors: in which each block has a page.
        full_block: tokens in a block of the full-attention group.
        windows: sliding-window groups.
        window_blocks: blocks in one window.
        parameters: active ones per token, in billions.
        hidden: size of a hidden state.
    """

    name: str
    page: int
    tensors: int
    full_block: int
    windows: int
    window_blocks: int
    parameters: float
    hidden: int

    def blocks(self, tokens: int) -> int:
        """Blocks to restore a prompt."""
        sliding = min(self.window_blocks, tokens)
        return tokens // self.full_block + self.windows * sliding


VARIANTS = (
    Variant("31B", 256 << 10, 10, 32, 5, 64, 31.0, 5376),
    Variant("26B-A4B", 128 << 10, 5, 32, 5, 64, 4.0, 2816),
    Variant("12B", 128 << 10, 8, 64, 5, 64, 12.0, 3840),
    Variant("E4B", 64 << 10, 4, 16, 5, 16, 4.5, 2560),
    Variant("E2B", 32 << 10, 3, 16, 4, 16, 2.3, 1536),
)


@dataclass(frozen=True)
class Plan:
    """How much is done: less of it in a dry run on a CPU."""

    device: str
    pool_bytes: int
    repeats: int
    prompts: tuple[int, ...]
    decode_steps: int
    scale: int = 1

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"


GPU_PLAN = Plan("cuda", 1 << 30, 5, (8192, 32768), 40)
DRY_PLAN = Plan("cpu", MIB // 4, 1, (64,), 1, scale=128)


class Clock:
    """Seconds that work on the device takes, the median of some repeats."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def wait(self) -> None:
        if self.plan.is_gpu:
            torch.cuda.synchronize()

    def time(self, work: Callable[[], Any]) -> float:
        work()
        times = []
        for _ in range(self.plan.repeats):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def scattered(count: int, run: int, seed: int = 0) -> list[int]:
    """Block numbers, of which `run` follow each other at a time, in a random order."""
    starts = list(range(0, count - run + 1, run))
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed))
    return [starts[i] + j for i in order.tolist() for j in range(run)]


def joined(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """Copies (from, to, blocks) when neighbours on both sides are copied together."""
    copies: list[tuple[int, int, int]] = []
    for here, there in zip(source, target, strict=True):
        if copies:
            first, to, size = copies[-1]
            if (here, there) == (first + size, to + size):
                copies[-1] = (first, to, size + 1)
                continue
        copies.append((here, there, 1))
    return copies


class Pools:
    """Blocks of a variant on the device and in host memory, one pair for each tensor."""

    def __init__(self, variant: Variant, plan: Plan) -> None:
        self.variant = variant
        self.page = variant.page // plan.scale
        self.count = max(16, plan.pool_bytes // (self.page * variant.tensors))
        shape = (self.count, self.page)
        self.device = [
            torch.zeros(shape, dtype=torch.uint8, device=plan.device)
            for _ in range(variant.tensors)
        ]
        self.host = [
            torch.zeros(shape, dtype=torch.uint8, pin_memory=plan.is_gpu)
            for _ in range(variant.tensors)
        ]
        self.staging = torch.zeros(shape, dtype=torch.uint8, device=plan.device)

    def pairs(self, load: bool) -> list[tuple["torch.Tensor", "torch.Tensor"]]:
        """(source, target) of each tensor."""
        both = zip(self.host, self.device, strict=True)
        return [(host, device) if load else (device, host) for host, device in both]

    def one_by_one(self, load: bool, source: Sequence[int], target: Sequence[int]) -> None:
        for from_pool, to_pool in self.pairs(load):
            for here, there in zip(source, target, strict=True):
                to_pool[there].copy_(from_pool[here], non_blocking=True)

    def joined(self, load: bool, copies: Sequence[tuple[int, int, int]]) -> None:
        for from_pool, to_pool in self.pairs(load):
            for here, there, size in copies:
                to_pool[there : there + size].copy_(
                    from_pool[here : here + size], non_blocking=True
                )

    def batched(self, load: bool, device_ids: "torch.Tensor") -> None:
        """One copy per tensor; the device gathers or scatters."""
        size = len(device_ids)
        for host, device in zip(self.host, self.device, strict=True):
            if load:
                self.staging[:size].copy_(host[:size], non_blocking=True)
                device.index_copy_(0, device_ids, self.staging[:size])
            else:
                torch.index_select(device, 0, device_ids, out=self.staging[:size])
                host[:size].copy_(self.staging[:size], non_blocking=True)


def large_copy(plan: Plan) -> dict[str, float]:
    """GB/s each way of one large copy."""
    clock, size = Clock(plan), plan.pool_bytes
    device = torch.zeros(size, dtype=torch.uint8, device=plan.device)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=plan.is_gpu)
    return {
        "load": size / clock.time(lambda: device.copy_(host, non_blocking=True)) / 1e9,
        "store": size / clock.time(lambda: host.copy_(device, non_blocking=True)) / 1e9,
    }


def bandwidths(plan: Plan, left: Callable[[], float]) -> dict[str, Any]:
    """GB/s each way: one large copy, and each variant's pages in several manners."""
    clock = Clock(plan)
    result: dict[str, Any] = {"large": large_copy(plan), "pages": []}
    for variant in VARIANTS:
        if left() < 0:
            break
        pools = Pools(variant, plan)
        # Enough to see the rate of small copies.
        count = max(8, pools.count // 4)
        for run in (1, 8):
            ids = scattered(pools.count, run)[:count]
            others = list(range(count))
            moved = count * pools.page * variant.tensors
            device_ids = torch.tensor(ids, device=plan.device)
            for load in (True, False):
                source, target = (others, ids) if load else (ids, others)
                together = joined(source, target)
                seconds = {
                    "one by one": clock.time(
                        lambda a=source, b=target, p=pools, d=load: p.one_by_one(d, a, b)
                    ),
                    "neighbours joined": clock.time(
                        lambda c=together, p=pools, d=load: p.joined(d, c)
                    ),
                    "batched": clock.time(
                        lambda i=device_ids, p=pools, d=load: p.batched(d, i)
                    ),
                }
                way = "load" if load else "store"
                best = result["large"][way]
                for manner, taken in seconds.items():
                    rate = moved / taken / 1e9
                    result["pages"].append(
                        {
                            "variant": variant.name,
                            "page_bytes": pools.page,
                            "way": way,
                            "in_a_row": run,
                            "manner": manner,
                            "gb_per_s": rate,
                            "of_large": rate / best,
                        }
                    )
        del pools
    return result


class StandIn:
    """Matrix products with the arithmetic of a model's weights: two per layer."""

    def __init__(self, variant: Variant, plan: Plan) -> None:
        hidden = variant.hidden // plan.scale
        layer = 2 * hidden * 4 * hidden
        dtype = torch.bfloat16 if plan.is_gpu else torch.float32
        self.layers = max(1, round(variant.parameters * 1e9 / plan.scale**4 / layer))
        # Weights are used in turn: only the time matters, not what comes out.
        own = 1
        if plan.is_gpu:
            own = min(self.layers, max(1, torch.cuda.mem_get_info()[0] // 4 // layer))
        shape = (hidden, 4 * hidden)
        self.weights = [
            (
                torch.full(shape, 1e-3, dtype=dtype, device=plan.device),
                torch.full(shape[::-1], 1e-3, dtype=dtype, device=plan.device),
            )
            for _ in range(own)
        ]
        self.hidden, self.dtype, self.device = hidden, dtype, plan.device

    def run(self, tokens: int, part: int = 8192) -> None:
        for start in range(0, tokens, part):
            state = torch.ones(
                min(part, tokens - start), self.hidden, dtype=self.dtype, device=self.device
            )
            for i in range(self.layers):
                up, down = self.weights[i % len(self.weights)]
                state = (state @ up) @ down


def first_tokens(plan: Plan, left: Callable[[], float]) -> list[dict[str, Any]]:
    """Time to first token: the prompt restored, or computed."""
    clock, rows = Clock(plan), []
    for variant in VARIANTS:
        model, pools = StandIn(variant, plan), Pools(variant, plan)
        for tokens in plan.prompts:
            if left() < 0:
                return rows
            blocks = variant.blocks(tokens)
            # What does not fit the pool is copied in rounds.
            rounds, rest = divmod(blocks, pools.count)
            ids = scattered(pools.count, 8)

            def restore(ids=ids, rounds=rounds, rest=rest, pools=pools, model=model) -> None:
                for size in [len(ids)] * rounds + [min(rest, len(ids))]:
                    pools.one_by_one(True, list(range(size)), ids[:size])
                model.run(1)

            restored = clock.time(restore)
            computed = clock.time(lambda m=model, n=tokens: m.run(n))
            rows.append(
                {
                    "variant": variant.name,
                    "tokens": tokens,
                    "bytes": blocks * pools.page * variant.tensors,
                    "restored_s": restored,
                    "computed_s": computed,
                    "speed_up": computed / restored,
                }
            )
        del model, pools
    return rows


def decode_latencies(plan: Plan, left: Callable[[], float]) -> list[dict[str, Any]]:
    """Time per generated token for 32 requests, without copies and beside them."""
    rows = []
    for variant in VARIANTS:
        if left() < 0:
            break
        model, pools = StandIn(variant, plan), Pools(variant, plan)
        ids = scattered(pools.count, 8)
        # A window and some blocks, as a step stores or loads them.
        count = min(len(ids), variant.windows * variant.window_blocks)
        stream = torch.cuda.Stream() if plan.is_gpu else None
        row: dict[str, Any] = {"variant": variant.name}
        for name, load in (("alone", None), ("beside loads", True), ("beside stores", False)):
            times = []
            for _ in range(plan.decode_steps):
                Clock(plan).wait()
                if load is not None:
                    some, others = ids[:count], list(range(count))
                    pair = (others, some) if load else (some, others)
                    if stream is None:
                        pools.one_by_one(load, *pair)
                    else:
                        with torch.cuda.stream(stream):
                            pools.one_by_one(load, *pair)
                start = time.perf_counter()
                model.run(32)
                if plan.is_gpu:
                    torch.cuda.current_stream().synchronize()
                times.append(time.perf_counter() - start)
            row[name.replace(" ", "_") + "_s"] = statistics.median(times)
        rows.append(row)
        del model, pools
    return rows


def measure(plan: Plan) -> dict[str, Any]:
    end = time.monotonic() + _SECONDS

    def left() -> float:
        return end - time.monotonic()

    return {
        "ran": True,
        "device": torch.cuda.get_device_name() if plan.is_gpu else "cpu (dry run)",
        "torch": torch.__version__,
        "plan": asdict(plan),
        "bandwidth": bandwidths(plan, left),
        "first_token": first_tokens(plan, left),
        "decode": decode_latencies(plan, left),
        "ended_early": left() < 0,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_copies.json"))
    parser.add_argument("--dry-run", action="store_true", help="the same steps, on the CPU")
    options = parser.parse_args(arguments)
    if torch is None:
        result: dict[str, Any] = {"ran": False, "why": "torch is not installed"}
    elif options.dry_run:
        result = measure(DRY_PLAN)
    elif not torch.cuda.is_available():
        result = {"ran": False, "why": "torch finds no GPU on this machine"}
    else:
        result = measure(GPU_PLAN)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if not result["ran"]:
        print(f"The GPU copy benchmark did not run: {result['why']}.")
        return 0
    large = result["bandwidth"]["large"]
    print(f"{result['device']}: one large copy {large['load']:.1f} GB/s to the GPU, "
          f"{large['store']:.1f} GB/s back")  # fmt: skip
    for row in result["bandwidth"]["pages"]:
        print(f"{row['variant']:>8} {row['page_bytes'] >> 10:>4} KiB {row['way']:>5}, "
              f"{row['in_a_row']} in a row, {row['manner']:<17}: {row['gb_per_s']:6.2f} GB/s, "
              f"{row['of_large']:.2f} of large")  # fmt: skip
    for row in result["first_token"]:
        print(f"{row['variant']:>8} {row['tokens']:>6} tokens: first token in "
              f"{row['restored_s'] * 1e3:.1f} ms restored, {row['computed_s'] * 1e3:.1f} ms "
              f"computed ({row['speed_up']:.1f} times)")  # fmt: skip
    for row in result["decode"]:
        print(f"{row['variant']:>8} per token: {row['alone_s'] * 1e3:.2f} ms, beside loads "
              f"{row['beside_loads_s'] * 1e3:.2f} ms, beside stores "
              f"{row['beside_stores_s'] * 1e3:.2f} ms")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
