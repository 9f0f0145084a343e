"""Run a script on an engine with offloading, and compare it with a cold one."""

import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cases import Case
from checkpoints import ADAPTER, MODELS, Shape
from engines import BLOCK_SIZE, counter, engine, engine_config, hybrid_manager_is_on, offloading
from workloads import PICTURE_TOKEN, PICTURE_TOKENS, Request, Reset, Script

# An engine that takes longer for a script is stuck.
MOST_STEPS = 4000


@dataclass(frozen=True)
class Answer:
    """What a request gets: tokens of each answer, and why they end."""

    prompt: list[int]
    tokens: list[tuple[int, ...]]
    ends: list[str | None]


@dataclass
class Outcome:
    """What came of a case."""

    case: str
    hybrid_manager: bool = False
    seconds: float = 0.0
    requests: int = 0
    preemptions: int = 0
    hits: int = 0
    reloaded_tokens: int = 0
    # copies, bytes, and blocks of each group, by kind of copy
    copies: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    # answers that a cold engine does not give
    wrong: list[str] = field(default_factory=list)
    # other things that must not be
    problems: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return self.wrong + self.problems

    def __str__(self) -> str:
        manager = "on" if self.hybrid_manager else "off"
        parts = [
            (
                f"{self.case}: {self.requests} requests in {self.seconds:.1f} s, hybrid "
                f"manager {manager}; {self.preemptions} preemptions; {self.hits} hits of "
                f"{self.reloaded_tokens} tokens"
            )
        ]
        for kind, count in self.copies.items():
            parts.append(
                f"{count} {kind}s of {self.blocks[kind]} blocks, {self.bytes[kind] >> 10} KiB"
            )
        return "; ".join([*parts, f"{len(self.failures)} failures"])

    def read_ledger(self, entries: list[dict]) -> None:
        for entry in entries:
            match entry["kind"]:
                case "problem":
                    if entry["text"] not in self.problems:
                        self.problems.append(entry["text"])
                case "hit":
                    self.hits += 1
                    self.reloaded_tokens += entry["tokens"]
                case "store" | "load" as kind:
                    self.copies[kind] = self.copies.get(kind, 0) + 1
                    self.bytes[kind] = self.bytes.get(kind, 0) + entry["bytes"]
                    before = self.blocks.get(kind, [0] * len(entry["blocks"]))
                    self.blocks[kind] = [a + b for a, b in zip(before, entry["blocks"])]


def sampling_params(request: Request):
    from vllm import SamplingParams

    # Greedy, also with several answers, for which vLLM wants a temperature.
    return SamplingParams(
        n=request.n,
        temperature=0.0 if request.n == 1 else 1.0,
        top_k=1,
        max_tokens=request.tokens,
        stop=list(request.stop) or None,
        ignore_eos=True,
    )


def settings_for(script: Script) -> dict:
    """Arguments of `engine` if a request wants the adapter, or has a picture."""
    settings = {}
    requests = [event for event in script if isinstance(event, Request)]
    if any(request.adapter for request in requests):
        # On v0.19.1 the CPU's LoRA ops take the last adapter for a request that wants none;
        # a second one that nobody loads is as good as none.
        settings |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    if any(request.picture is not None for request in requests):
        model = {
            "architectures": ["Gemma4WithPictures"],
            "picture_token_id": PICTURE_TOKEN,
            "picture_tokens": PICTURE_TOKENS,
        }
        settings |= {"enable_mm_embeds": True, "hf_overrides": model}
    return settings


def adapter(folder: Path, request: Request):
    if not request.adapter:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(ADAPTER, 1, str(folder / ADAPTER))


def engine_input(request: Request, prompt: list[int]) -> dict:
    """What `add_request` and `generate` take for a prompt."""
    given: dict = {"prompt_token_ids": prompt}
    if request.salt is not None:
        given["cache_salt"] = request.salt
    if request.picture is not None:
        # vLLM puts as many tokens there as the picture has.
        first = prompt.index(PICTURE_TOKEN)
        given["prompt_token_ids"] = prompt[: first + 1] + prompt[first + PICTURE_TOKENS :]
        given["multi_modal_data"] = {"image": [_picture(request.picture)]}
    return given


def _picture(number: int):
    import torch

    numbers = torch.Generator().manual_seed(number)
    return torch.randn(PICTURE_TOKENS, Shape.hidden, generator=numbers)


# --- what is right ---


def cold_answers(folder: Path, scripts: list[Script]) -> list[dict[str, Answer]]:
    """The answers of an engine without connector and prefix cache, for several scripts."""
    answers: list[dict[str, Answer]] = [{} for _ in scripts]
    settings = {"enable_prefix_caching": False, "max_num_seqs": 16}
    settings |= settings_for([event for script in scripts for event in script])
    with engine(folder, **settings) as llm:
        while True:
            # A chat can go on when the answer before is there.
            due = [
                (known, request)
                for script, known in zip(scripts, answers)
                for request in script
                if isinstance(request, Request)
                and request.name not in known
                and (request.follows is None or request.follows in known)
            ]
            if not due:
                return answers
            prompts = [full_prompt(request, known) for known, request in due]
            outputs = llm.generate(
                [engine_input(request, prompt) for (_, request), prompt in zip(due, prompts)],
                [sampling_params(request) for _, request in due],
                lora_request=[adapter(folder, request) for _, request in due],
                use_tqdm=False,
            )
            for (known, request), prompt, output in zip(due, prompts, outputs):
                known[request.name] = _answer(prompt, output)


def full_prompt(request: Request, answers: dict[str, Answer]) -> list[int]:
    if request.follows is None:
        return list(request.prompt)
    before = answers[request.follows]
    return [*before.prompt, *before.tokens[0], *request.prompt]


def _answer(prompt: list[int], output) -> Answer:
    outputs = sorted(output.outputs, key=lambda one: one.index)
    return Answer(
        prompt,
        [tuple(one.token_ids) for one in outputs],
        [one.finish_reason for one in outputs],
    )


# --- what happens ---


@contextmanager
def observed(case: Case) -> Iterator[tuple[Outcome, str]]:
    """An outcome, complete in the end, and the folder for the ledger."""
    outcome = Outcome(case.name)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ledger-") as ledger:
        try:
            yield outcome, ledger
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}, {frame.line}"
            outcome.problems.append(f"the engine fails: {error!r} in {place}")
        from host_memory_spec import Ledger

        outcome.read_ledger(Ledger.read(ledger))
    if case.reloads and not outcome.hits:
        outcome.problems.append("nothing was reloaded")
    if case.preempts and not outcome.preemptions:
        outcome.problems.append("nothing was preempted")
    outcome.seconds = time.monotonic() - start


def run(
    case: Case,
    seed: int,
    folder: Path,
    expected: dict[str, Answer],
    *,
    spec: str = "HostMemorySpec",
    **settings,
) -> Outcome:
    """Run a case; settings are added to the case's own."""
    with observed(case) as (outcome, ledger):
        given = engine_settings(case, seed, folder, ledger, spec)
        with engine(folder, **given | settings) as llm:
            outcome.hybrid_manager = hybrid_manager_is_on(llm.llm_engine.vllm_config)
            replay = Replay(llm.llm_engine, folder, case.script(seed), expected)
            try:
                replay.to_the_end()
            finally:
                outcome.preemptions = counter(llm, "vllm:num_preemptions")
                replay.report(outcome)
    return outcome


def engine_settings(case: Case, seed: int, folder: Path, ledger: str, spec: str) -> dict:
    """Arguments of `engine` for a case."""
    extra = {
        "spec_name": spec,
        "spec_module_path": (
            "host_memory_spec" if spec == "HostMemorySpec" else "faulty_memory_spec"
        ),
        "blocks_per_chunk": case.blocks_per_chunk,
        "hostility": {"seed": seed, "ledger": ledger, **case.hostility},
    }
    settings = case.settings | settings_for(case.script(seed))
    shape = MODELS[case.model]
    longest = case.workload.longest + case.workload.longest_answer
    settings["max_model_len"] = longest
    kv_transfer = offloading(1 << 30, **extra)
    hybrid = hybrid_manager_is_on(engine_config(folder, kv_transfer=kv_transfer, **settings))
    budget = settings["max_num_batched_tokens"]
    room = shape.blocks_needed(longest, budget, BLOCK_SIZE, hybrid)
    settings["num_gpu_blocks_override"] = 1 + int(case.gpu * room)
    host_blocks = int(case.host * room / case.blocks_per_chunk + 1) * case.blocks_per_chunk
    host_bytes = host_blocks * shape.bytes_per_block(BLOCK_SIZE, hybrid)
    return settings | {"kv_transfer": offloading(host_bytes, **extra)}


class Comparison:
    """Outputs as they come, with what they should be, and what may be taken from a cache."""

    def __init__(self, expected: dict[str, Answer]):
        self.expected = expected
        # of the requests that came, by what else has to be the same
        self.texts: dict[tuple, list[list]] = defaultdict(list)
        self.most_cached: dict[str, int] = {}
        self.reuses: set[str] = set()
        self.ended: set[str] = set()
        # by request and number of the answer, or -1
        self.wrong: dict[tuple[str, int], str] = {}
        self.cached_too_many: dict[str, str] = {}

    def prompt(self, request: Request) -> dict:
        """The input for a request, which comes now."""
        prompt = full_prompt(request, self.expected)
        self._remember(request, prompt)
        return engine_input(request, prompt)

    def _remember(self, request: Request, prompt: list[int]) -> None:
        text = [request.picture if token == PICTURE_TOKEN else -token for token in prompt]
        others = self.texts[request.salt, request.adapter]
        shared = max((_length_of_common_prefix(text, other) for other in others), default=0)
        # A second answer finds what the first one left.
        self.most_cached[request.name] = shared if request.n == 1 else len(prompt)
        others.append(text + [-token for token in self.expected[request.name].tokens[0]])
        if request.reuses:
            self.reuses.add(request.name)

    def look_at(self, output) -> None:
        name = output.request_id
        right = self.expected[name]
        if output.finished:
            self.ended.add(name)
        cached, most = output.num_cached_tokens or 0, self.most_cached[name]
        if cached > most:
            self.cached_too_many[name] = (
                f"{name} takes {cached} tokens from a cache, and shares {most} with others"
            )
        if output.finished and name in self.reuses and not cached:
            self.wrong[name, -1] = f"{name} takes nothing from a cache"
        for one in output.outputs:
            got, want = tuple(one.token_ids), right.tokens[one.index]
            # An answer that is not finished has to be the beginning of the right one.
            is_right = want[: len(got)] == got
            if one.finish_reason is not None:
                is_right &= (want, right.ends[one.index]) == (got, one.finish_reason)
            if not is_right:
                self.wrong[name, one.index] = (
                    f"{name} ({len(right.prompt)} tokens, {output.num_cached_tokens} cached) "
                    f"answers {list(got)}, not {list(want)}"
                )


def _length_of_common_prefix(one: list, other: list) -> int:
    pairs = enumerate(zip(one, other))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class Replay:
    """An engine that works through a script."""

    def __init__(self, llm_engine, folder: Path, script: Script, expected: dict[str, Answer]):
        self.engine = llm_engine
        self.folder = folder
        self.script = list(script)
        self.comparison = Comparison(expected)
        self.requests = 0
        self.steps = 0
        self.last_arrival = 0
        self.running: dict[str, Request] = {}
        self.aborts: dict[str, int] = {}  # the step in which each is due

    def to_the_end(self) -> None:
        while self.script or self.engine.has_unfinished_requests():
            self._let_come()
            for name in [name for name, due in self.aborts.items() if due <= self.steps]:
                self._abort(name)
            for output in self.engine.step():
                self.comparison.look_at(output)
                if output.finished:
                    self.running.pop(output.request_id, None)
            self.steps += 1
            if self.steps > MOST_STEPS:
                break

    def report(self, outcome: Outcome) -> None:
        outcome.requests = self.requests
        outcome.wrong += self.comparison.wrong.values()
        # A request that was preempted finds what it has computed itself.
        if not outcome.preemptions:
            outcome.wrong += self.comparison.cached_too_many.values()
        if self.running:
            names = ", ".join(self.running)
            outcome.problems.append(f"not ended after {self.steps} steps: {names}")

    def _let_come(self) -> None:
        while self.script and self._is_due(event := self.script[0]):
            self.script.pop(0)
            self.last_arrival = self.steps
            if isinstance(event, Request):
                self._add(event)
            else:
                self._reset(event)

    def _is_due(self, event: Request | Reset) -> bool:
        if not self.running:
            return True
        if isinstance(event, Reset) and event.when_idle:
            return False
        if isinstance(event, Request) and event.follows in self.running:
            return False
        return self.steps >= self.last_arrival + event.gap

    def _add(self, request: Request) -> None:
        self.requests += 1
        self.running[request.name] = request
        prompt = self.comparison.prompt(request)
        self.engine.add_request(
            request.name,
            prompt,
            sampling_params(request),
            lora_request=adapter(self.folder, request),
        )
        if request.abort_after is not None:
            self.aborts[request.name] = self.steps + request.abort_after

    def _abort(self, name: str) -> None:
        del self.aborts[name]
        if self.running.pop(name, None) is not None:
            self.engine.abort_request([name])

    def _reset(self, event: Reset) -> None:
        try:
            self.engine.reset_prefix_cache(
                reset_running_requests=event.running, reset_connector=event.host
            )
        except RuntimeError as error:
            # vLLM's word for it: a request waits for its load.
            if "not supported yet" not in str(error):
                raise
