"""The embedded engine: exact logprobs, joining, reuse, cancelling, pausing, failing."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agents import batch
from agents.engine import Engine, Sample
from agents.models.policy import CausalPolicy, LoraSettings
from agents.row_forward import RowForward
from clawgym_env.calls import Sampling
from clawgym_env.errors import ConfigError, PolicyError


def prompts(count: int, *, shared: int = 0, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    prefix = [rng.randrange(300) for _ in range(shared)]
    return [prefix + [rng.randrange(300) for _ in range(rng.randint(1, 60))] for _ in range(count)]


def forward_logprobs(
    policy: CausalPolicy, prompt: Sequence[int], reply: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """The reply's logprobs by the trainer's plain forward pass."""
    ids = torch.tensor([[*prompt, *reply]])
    with torch.no_grad():
        logits = policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])[:, 0]


def assert_exact(
    policy: CausalPolicy, prompt: Sequence[int], sample: Sample, temperature: float = 1.0
) -> None:
    own = forward_logprobs(policy, prompt, sample.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(sample.logprobs), own, rtol=0, atol=1e-4)


def all_of(futures: Sequence[Future[Sample]]) -> list[Sample]:
    return [future.result(timeout=60) for future in futures]


def never_stop(engine: Engine) -> None:
    engine._batch._stop_ids = frozenset()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the awaited state did not come"
        time.sleep(0.001)


@pytest.mark.parametrize("cache_tokens", [None, 0, 150])
@pytest.mark.parametrize("step_tokens", [2048, 40])
def test_logprobs_equal_the_plain_forward_pass(
    policy: CausalPolicy,
    monkeypatch: pytest.MonkeyPatch,
    cache_tokens: int | None,
    step_tokens: int,
) -> None:
    monkeypatch.setattr(batch, "_STEP_TOKENS", step_tokens)
    asked = prompts(12, shared=50)
    rng = random.Random(3)
    with Engine(policy, max_batch=5, cache_tokens=cache_tokens) as engine:
        for turn in range(2):
            futures = [
                engine.submit(p, Sampling(max_tokens=rng.randint(1, 40), seed=i))
                for i, p in enumerate(asked)
            ]
            samples = all_of(futures)
            for prompt, sample in zip(asked, samples, strict=True):
                assert_exact(policy, prompt, sample)
                if turn and cache_tokens is None:
                    assert len(prompt) - sample.cached_tokens == 4
            asked = [[*p, *s.token_ids, 5, 6, 7] for p, s in zip(asked, samples, strict=True)]
    assert (engine.stats.cached_tokens > 0) == (cache_tokens != 0)
    assert engine.stats.most_active == 5


def test_a_group_reads_its_prompt_once(engine: Engine) -> None:
    prompt = prompts(1, shared=200)[0]
    samples = all_of([engine.submit(prompt, Sampling(max_tokens=5, seed=i)) for i in range(8)])
    assert engine.stats.read_tokens == len(prompt) + 7
    assert sorted(s.cached_tokens for s in samples) == [0] + [len(prompt) - 1] * 7
    assert len({s.token_ids for s in samples}) > 1


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}])
def test_a_seed_gives_the_same_sample_in_any_company(
    policy: CausalPolicy, sampling: dict[str, Any]
) -> None:
    asked = prompts(10, shared=20)
    rules = [Sampling(max_tokens=30, seed=i, **sampling) for i in range(10)]
    with Engine(policy, max_batch=4) as engine:
        crowd = all_of([engine.submit(p, r) for p, r in zip(asked, rules, strict=True)])
    with Engine(policy, cache_tokens=0) as engine:
        alone = [engine.submit(p, r).result() for p, r in zip(asked, rules, strict=True)]
    assert [s.token_ids for s in crowd] == [s.token_ids for s in alone]


def test_the_engines_seed_serves_requests_without_one(policy: CausalPolicy) -> None:
    def run(seed: int) -> list[tuple[int, ...]]:
        with Engine(policy, seed=seed) as engine:
            return [engine.submit([1, 2], Sampling(max_tokens=9)).result().token_ids for _ in "abc"]

    first = run(1)
    assert first == run(1) != run(2)
    assert len(set(first)) == 3


def test_temperature_shows_in_the_logprobs(policy: CausalPolicy, engine: Engine) -> None:
    sample = engine.submit([1, 2, 3], Sampling(temperature=0.5, max_tokens=20, seed=1)).result()
    assert_exact(policy, [1, 2, 3], sample, temperature=0.5)
    greedy = engine.submit([1, 2, 3], Sampling(temperature=0, max_tokens=20)).result()
    assert set(greedy.logprobs) == {0.0}


def test_a_stop_token_ends_the_reply_and_belongs_to_it(
    policy: CausalPolicy, engine: Engine
) -> None:
    stops = set(policy.renderer.stop_ids)
    samples = all_of([engine.submit([i], Sampling(seed=i, max_tokens=99)) for i in range(20)])
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        assert (sample.token_ids[-1] in stops) == (sample.finish_reason == "stop")
        assert not set(sample.token_ids[:-1]) & stops


def test_a_stop_string_ends_the_reply(policy: CausalPolicy, engine: Engine) -> None:
    never_stop(engine)
    free = engine.submit([1, 2, 3], Sampling(max_tokens=200, seed=5)).result()
    text = policy.renderer.decode(free.token_ids)
    stop = text[60:64]
    rule = Sampling(max_tokens=200, seed=5, stop=("never to be seen", stop))
    sample = engine.submit([1, 2, 3], rule).result()
    stopped = policy.renderer.decode(sample.token_ids)
    assert sample.finish_reason == "stop"
    assert sample.token_ids == free.token_ids[: len(sample.token_ids)]
    assert stop in stopped and stop not in policy.renderer.decode(sample.token_ids[:-1])


def test_lengths(engine: Engine) -> None:
    never_stop(engine)
    sample = engine.submit([1, 2, 3], Sampling(max_tokens=7)).result()
    assert (len(sample.token_ids), sample.finish_reason) == (7, "length")
    sample = engine.submit([1] * 500, Sampling(max_tokens=100)).result()
    assert (len(sample.token_ids), sample.finish_reason) == (12, "length")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * 512, "the prompt has 512 tokens and the context holds 512"),
        ([1, 5000], r"the prompt has id 5000, but the model's ids are 0 to \d+"),
        ([-1], "the prompt has id -1"),
    ],
)
def test_prompts_that_cannot_be_served(engine: Engine, prompt: list[int], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        engine.submit(prompt)


@pytest.mark.parametrize("setting", ["max_batch", "max_context", "threads"])
def test_settings_out_of_range(policy: CausalPolicy, setting: str) -> None:
    settings: dict[str, Any] = {setting: 0}
    with pytest.raises(ConfigError, match=f"the engine's {setting} is . or more; got 0"):
        Engine(policy, **settings)


def test_a_request_joins_what_is_running(policy: CausalPolicy, engine: Engine) -> None:
    never_stop(engine)
    first = engine.submit([1, 2, 3], Sampling(max_tokens=400, seed=1))
    until(lambda: engine.stats.sampled_tokens > 5)
    second = engine.submit([4, 5], Sampling(max_tokens=5, seed=2)).result(timeout=60)
    assert not first.done()
    assert engine.stats.most_active == 2
    assert_exact(policy, [4, 5], second)
    assert_exact(policy, [1, 2, 3], first.result(timeout=60))


def test_cancelling_the_task_frees_the_row(policy: CausalPolicy, engine: Engine) -> None:
    never_stop(engine)

    async def run() -> Sample:
        long = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=500)))
        while not engine.stats.sampled_tokens:
            await asyncio.sleep(0.001)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        return await engine.generate([3, 4], Sampling(max_tokens=10, seed=1))

    assert_exact(policy, [3, 4], asyncio.run(run()))
    assert engine.stats.requests == 1
    assert engine.stats.sampled_tokens < 500


def scale(policy: CausalPolicy, factor: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(factor)
    policy.updated()


def test_a_pause_waits_for_the_sequences_in_progress(policy: CausalPolicy, engine: Engine) -> None:
    never_stop(engine)
    old = engine.submit([1, 2, 3], Sampling(max_tokens=50, seed=1))
    until(lambda: engine.stats.sampled_tokens > 1)
    with engine.paused():
        sample = old.result(timeout=0)
        assert_exact(policy, [1, 2, 3], sample)
        assert (sample.policy_version, sample.last_version) == (0, 0)
        waiting = engine.submit([1, 2, 3], Sampling(max_tokens=50, seed=1))
        steps = engine.stats.steps
        scale(policy, 1.1)
        assert not waiting.done() and engine.stats.steps == steps
    new = waiting.result(timeout=60)
    assert_exact(policy, [1, 2, 3], new)
    assert (new.policy_version, new.last_version, new.cached_tokens) == (1, 1, 0)


def test_a_pause_can_hold_the_sequences_in_progress(policy: CausalPolicy, engine: Engine) -> None:
    never_stop(engine)
    prompt = prompts(1)[0]
    future = engine.submit(prompt, Sampling(max_tokens=100, seed=1))
    until(lambda: engine.stats.sampled_tokens > 1)
    with engine.paused(drain=False):
        before = engine.stats.sampled_tokens
        scale(policy, 1.1)
    sample = future.result(timeout=60)
    assert 1 < before < 100
    assert (sample.policy_version, sample.last_version) == (0, 1)
    new = forward_logprobs(policy, prompt, sample.token_ids)
    scale(policy, 1 / 1.1)
    was = forward_logprobs(policy, prompt, sample.token_ids)
    mixed = torch.cat([was[:before], new[before:]])
    torch.testing.assert_close(torch.tensor(sample.logprobs), mixed, rtol=0, atol=1e-3)


def test_the_async_pause_leaves_the_loop_free(policy: CausalPolicy, engine: Engine) -> None:
    never_stop(engine)

    async def run() -> tuple[Sample, Sample]:
        long = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=200, seed=1)))
        while not engine.stats.sampled_tokens:
            await asyncio.sleep(0.001)
        async with engine.paused():
            assert engine.stats.requests == 1
            scale(policy, 1.1)
            after = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=9, seed=1)))
            await asyncio.sleep(0.01)
        return await long, await after

    first, second = asyncio.run(run())
    assert (first.policy_version, second.policy_version) == (0, 1)


def test_a_pause_given_up_is_not_kept(engine: Engine) -> None:
    never_stop(engine)

    async def run() -> None:
        long = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=300, seed=1)))
        while not engine.stats.sampled_tokens:
            await asyncio.sleep(0.001)

        async def pause() -> None:
            async with engine.paused():
                raise AssertionError("it was cancelled before the sequence ended")

        pausing = asyncio.create_task(pause())
        await asyncio.sleep(0.01)
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        await long
        await engine.generate([1, 2], Sampling(max_tokens=3))

    asyncio.run(run())


def test_pauses_take_turns(engine: Engine) -> None:
    inside = 0

    def pause() -> None:
        nonlocal inside
        for _ in range(20):
            with engine.paused():
                inside += 1
                assert inside == 1
                time.sleep(0.0005)
                inside -= 1

    threads = [threading.Thread(target=pause) for _ in range(3)]
    for thread in threads:
        thread.start()
    samples = all_of([engine.submit([i], Sampling(max_tokens=10)) for i in range(20)])
    for thread in threads:
        thread.join()
    assert len(samples) == 20


def test_weights_that_change_under_one_version_are_an_error(
    policy: CausalPolicy, engine: Engine
) -> None:
    optimiser = torch.optim.AdamW(policy.parameters(), lr=0.01)
    policy.model(input_ids=torch.tensor([[1, 2, 3]])).logits.square().mean().backward()
    with pytest.raises(PolicyError, match=r"call policy.updated\(\) after each optimiser step"):
        with engine.paused():
            optimiser.step()
    with engine.paused():
        policy.updated()
    assert_exact(policy, [1], engine.submit([1], Sampling(max_tokens=5)).result())


def test_replaced_parameters_are_picked_up(policy: CausalPolicy, engine: Engine) -> None:
    engine.submit([1], Sampling(max_tokens=5)).result()
    with engine.paused():
        weight = policy.base.get_input_embeddings().weight
        assert isinstance(weight, torch.Tensor)
        policy.base.set_input_embeddings(
            torch.nn.Embedding.from_pretrained(weight.detach() * 1.3, freeze=False)
        )
        policy.base.tie_weights()
        policy.updated()
    assert_exact(policy, [1, 2], engine.submit([1, 2], Sampling(max_tokens=9)).result())


def test_closing_fails_what_is_in_progress(policy: CausalPolicy) -> None:
    engine = Engine(policy, max_batch=1)
    never_stop(engine)
    futures = [engine.submit([1], Sampling(max_tokens=500)) for _ in range(3)]
    engine.close()
    engine.close()
    for future in futures:
        with pytest.raises(PolicyError, match="closed before the reply was complete"):
            future.result(timeout=0)
    with pytest.raises(PolicyError, match="the engine is closed"):
        engine.submit([1])
    with pytest.raises(PolicyError, match="the engine is closed"):
        with engine.paused():
            pass


def test_a_step_that_fails_fails_its_sequences_alone(
    policy: CausalPolicy, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def fail(self: RowForward, chunks: object) -> None:
            raise RuntimeError("out of memory")

        patch.setattr(RowForward, "__call__", fail)
        with pytest.raises(PolicyError, match="step failed: RuntimeError: out of memory"):
            engine.submit([1]).result(timeout=60)
    assert_exact(policy, [1], engine.submit([1], Sampling(max_tokens=5)).result(timeout=60))


def test_weights_that_diverged_are_an_error_that_says_so(
    policy: CausalPolicy, engine: Engine
) -> None:
    weight = policy.parameters()[0]
    with engine.paused():
        good = weight.detach().clone()
        weight.data.fill_(float("nan"))
        policy.updated()
    with pytest.raises(PolicyError, match="policy version 1 are not finite"):
        engine.submit([1]).result(timeout=60)
    with engine.paused():
        weight.data.copy_(good)
        policy.updated()
    assert_exact(policy, [1], engine.submit([1], Sampling(max_tokens=5)).result(timeout=60))


def test_adapters_are_served(tiny_directory: Path) -> None:
    policy = CausalPolicy.from_pretrained(tiny_directory, lora=LoraSettings(dropout=0.5))
    policy.model.eval()
    with Engine(policy) as engine:
        plain = engine.submit([1, 2], Sampling(max_tokens=20, seed=1)).result()
        with engine.paused():
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            policy.updated()
        adapted = engine.submit([1, 2], Sampling(max_tokens=20, seed=1)).result()
        policy.model.train()  # the trainer's dropout is not the engine's
        again = engine.submit([1, 2], Sampling(max_tokens=20, seed=1)).result()
    policy.model.eval()
    assert_exact(policy, [1, 2], adapted)
    assert again.token_ids == adapted.token_ids != plain.token_ids


def test_ids_beyond_the_tokenizer_are_never_sampled(tiny_directory: Path, tmp_path: Path) -> None:
    policy = CausalPolicy.from_pretrained(tiny_directory)
    policy.save(tmp_path / "padded")
    model = AutoModelForCausalLM.from_pretrained(tiny_directory)
    model.resize_token_embeddings(5000)
    model.save_pretrained(tmp_path / "padded")
    with Engine(CausalPolicy.from_pretrained(tmp_path / "padded")) as engine:
        samples = all_of([engine.submit([i], Sampling(max_tokens=20)) for i in range(20)])
    assert max(max(s.token_ids) for s in samples) < policy.renderer.vocab_size


def test_torchs_thread_setting_stays(policy: CausalPolicy) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Engine(policy, threads=1):
            found = [torch.get_num_threads()]
            later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            later.start()
            later.join()
        assert found == [2, 2]
    finally:
        torch.set_num_threads(before)


def test_a_long_random_day(policy: CausalPolicy) -> None:
    rng = random.Random(7)
    with Engine(policy, max_batch=4, cache_tokens=300) as engine:

        async def conversation(number: int) -> None:
            prompt = prompts(1, shared=30, seed=number % 3)[0]
            for turn in range(rng.randint(1, 3)):
                rule = Sampling(max_tokens=rng.randint(1, 25), seed=number)
                task = asyncio.create_task(engine.generate(prompt, rule))
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random() * 0.02)
                    task.cancel()
                    await asyncio.wait([task])
                    continue
                sample = await task
                assert_exact(policy, prompt, sample)
                prompt = [*prompt, *sample.token_ids, turn]

        async def run() -> None:
            await asyncio.gather(*(conversation(number) for number in range(30)))

        asyncio.run(run())
        until(lambda: not engine._batch.active)
