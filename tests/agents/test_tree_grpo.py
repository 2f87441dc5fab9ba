import json
import math
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest
import torch

from agents.callbacks import Callback, CheckpointCallback, EvalCallback, JsonlCallback, StepResult
from agents.checkpoints import latest, steps
from agents.grpo import TreeGRPO
from agents.grpo_settings import GRPOSettings
from agents.models.policy import CausalPolicy, LoraSettings
from agents.models.tiny import make_tiny
from agents.rollouts import EnvParts
from clawgym_env import HarnessEnv
from clawgym_env.errors import ConfigError

TEXTS = ["do even echo yes no the quick brown fox 0123456789 " * 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(TEXTS, tmp_path_factory.mktemp("model") / "m", size="200k", vocab_size=280)


@pytest.fixture
def env() -> Iterator[HarnessEnv]:
    made = HarnessEnv("small_harnesses:Echo", tasks="small_tasks:even", sandbox="process")
    yield made
    made.close()


def settings(**changes: object) -> GRPOSettings:
    values = {
        "tasks_per_step": 2,
        "group_size": 6,
        "max_reply_tokens": 6,
        "learning_rate": 3e-3,
        "live": 6,
        "seed": 1,
    }
    return GRPOSettings(**{**values, **changes})  # type: ignore[arg-type]


def weights(trainer: TreeGRPO) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.policy.parameters()]


class Recorder(Callback):
    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self.events: list[str] = []

    def on_training_start(self, trainer: TreeGRPO) -> None:
        self.events.append("start")

    def on_step(self, trainer: TreeGRPO, result: StepResult) -> bool:
        self.results.append(result)
        return len(self.results) < 3

    def on_training_end(self, trainer: TreeGRPO) -> None:
        self.events.append("end")


def test_a_step_trains_on_sampled_tokens(model: Path, env: HarnessEnv) -> None:
    with TreeGRPO(CausalPolicy.from_pretrained(model), env, settings()) as trainer:
        before = weights(trainer)
        recorder = Recorder()
        trainer.learn(1, recorder, progress=False)
        (result,) = recorder.results
        assert result.rollouts_seen == len(result.rollouts) == 12
        assert {r.outcome.value for r in result.rollouts} == {"completed"}
        assert {r.reward for r in result.rollouts} == {0.0, 1.0}
        calls = [call for rollout in result.rollouts for call in rollout.calls]
        assert len(calls) == 12
        for call in calls:
            ids, logprobs = call.completion.token_ids, call.completion.logprobs
            assert ids and logprobs and len(ids) == len(logprobs) <= 6
            assert call.prompt_ids and call.completion.policy_version == 0
        metrics = result.metrics
        assert metrics["rollout/drift"] == 0.0
        # The first pass is on policy: ratios are 1 and the engine agrees with the trainer.
        assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert abs(metrics["train/behaviour_gap"]) < 1e-4
        assert metrics["train/token_ratio"] > 1.5
        assert trainer.policy.version == 1 and trainer.step == 1
        assert any(not torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert recorder.events == ["start", "end"]


def test_reward_rises(model: Path, env: HarnessEnv) -> None:
    """Replies of even length are one token's choice away, so a few steps must find them."""
    chosen = settings(tasks_per_step=2, group_size=8, learning_rate=1e-2, max_reply_tokens=3)
    with TreeGRPO(CausalPolicy.from_pretrained(model), env, chosen) as trainer:
        rewards: list[float] = []

        class Note(Callback):
            def on_step(self, trainer: TreeGRPO, result: StepResult) -> bool:
                rewards.append(result.metrics["rollout/reward"])
                return True

        trainer.learn(10, Note(), progress=False)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards


def test_equal_rewards_change_nothing(model: Path) -> None:
    env = HarnessEnv("small_harnesses:Echo", tasks="small_tasks:short", sandbox="process")
    with TreeGRPO(CausalPolicy.from_pretrained(model), env, settings()) as trainer:
        before = weights(trainer)
        recorder = Recorder()
        trainer.learn(1, recorder, progress=False)
        metrics = recorder.results[0].metrics
        assert metrics["group/equal_rewards"] == metrics["group/groups"] == 2
        assert metrics["train/loss"] == metrics["train/grad_norm"] == 0.0
        assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
        assert trainer.policy.version == 0


def test_failed_verifiers_are_counted_and_not_trained_on(model: Path) -> None:
    env = HarnessEnv("small_harnesses:Echo", tasks="small_tasks:broken", sandbox="process")
    chosen = settings(tasks_per_step=1, group_size=2, seed=4)
    with TreeGRPO(CausalPolicy.from_pretrained(model), env, chosen) as trainer:
        recorder = Recorder()
        trainer.learn(1, recorder, progress=False)
        metrics = recorder.results[0].metrics
        assert metrics["rollout/failed"] == 2 and math.isnan(metrics["rollout/reward"])
        assert metrics["rollout/outcome/verifier_error"] == 1
        assert trainer.policy.version == 0


def test_a_resumed_run_continues_the_same_curve(
    model: Path, env: HarnessEnv, tmp_path: Path
) -> None:
    def curve(results: list[StepResult]) -> list[float]:
        return [r.metrics[k] for r in results for k in ("rollout/reward", "train/grad_norm")]

    whole = Recorder()
    with TreeGRPO(CausalPolicy.from_pretrained(model), env, settings()) as trainer:
        trainer.learn(3, whole, progress=False)
        end = weights(trainer)
    first, second = Recorder(), Recorder()
    with TreeGRPO(CausalPolicy.from_pretrained(model), env, settings()) as trainer:
        trainer.learn(2, first, progress=False)
        trainer.save(tmp_path / "step-000002")
    with TreeGRPO.load(tmp_path / "step-000002", env) as trainer:
        assert (trainer.step, trainer.rollouts_seen, trainer.policy.version) == (2, 24, 2)
        trainer.learn(3, second, progress=False)
        resumed = weights(trainer)
    assert curve(first.results + second.results) == pytest.approx(curve(whole.results), rel=1e-3)
    for a, b in zip(end, resumed, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_callbacks_evaluate_save_and_log(model: Path, env: HarnessEnv, tmp_path: Path) -> None:
    tasks = [env.tasks[i] for i in range(4)]
    with TreeGRPO(CausalPolicy.from_pretrained(model), env, settings()) as trainer:
        trainer.learn(
            3,
            [
                EvalCallback(tasks, every=2),
                JsonlCallback(tmp_path / "metrics.jsonl"),
                CheckpointCallback(tmp_path / "checkpoints", keep=2),
            ],
            progress=False,
        )
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert ["eval/success" in line for line in lines] == [False, True, False]
    assert [p.name for p in steps(tmp_path / "checkpoints")] == ["step-000002", "step-000003"]
    newest = latest(tmp_path / "checkpoints")
    assert newest is not None and TreeGRPO.load(newest, env).step == 3


def test_predict_gives_an_action_for_step(model: Path, env: HarnessEnv) -> None:
    parts = EnvParts.of(env)
    with TreeGRPO(CausalPolicy.from_pretrained(model), parts, settings()) as trainer:
        acting = HarnessEnv(
            "small_harnesses:Echo", tasks="small_tasks:even", sandbox="process", model=model
        )
        obs, info = acting.reset(seed=0)
        action, state = trainer.predict(obs)
        assert state is None and action in acting.action_space
        greedy = [trainer.predict(obs, deterministic=True)[0]["token_ids"] for _ in range(2)]
        assert greedy[0] == greedy[1]
        *_, info = acting.step(action)
        assert acting.rollout is not None
        (call,) = acting.rollout.calls
        assert call.completion.token_ids == tuple(action["token_ids"])
        assert call.completion.logprobs == tuple(action["logprobs"])
        acting.close()


def test_lora_trains_adapters_alone(model: Path, env: HarnessEnv, tmp_path: Path) -> None:
    policy = CausalPolicy.from_pretrained(model, lora=LoraSettings(rank=4, alpha=8))
    trained, total = policy.parameter_counts()
    assert trained < total / 4
    with TreeGRPO(policy, env, settings()) as trainer:
        frozen = [p.detach().clone() for p in policy.model.parameters() if not p.requires_grad]
        before = weights(trainer)
        trainer.learn(1, progress=False)
        trainer.save(tmp_path / "step-000001")
        assert any(not torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
        after = [p.detach() for p in policy.model.parameters() if not p.requires_grad]
        assert all(torch.equal(a, b) for a, b in zip(frozen, after, strict=True))
        saved = weights(trainer)
    with TreeGRPO.load(tmp_path / "step-000001", env) as again:
        assert all(torch.equal(a, b) for a, b in zip(saved, weights(again), strict=True))


def test_several_epochs_and_minibatches_clip(model: Path, env: HarnessEnv) -> None:
    chosen = settings(epochs=3, minibatches=2, learning_rate=2e-2)
    with TreeGRPO(CausalPolicy.from_pretrained(model), env, chosen) as trainer:
        recorder = Recorder()
        trainer.learn(1, recorder, progress=False)
        metrics = recorder.results[0].metrics
        assert metrics["train/ratio"] != 1.0 and metrics["train/clip_fraction"] > 0


def test_bad_settings_and_checkpoints(model: Path, env: HarnessEnv, tmp_path: Path) -> None:
    for bad in ({"group_size": 1}, {"temperature": 0.0}, {"minibatches": 3}, {"live": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            settings(**bad)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        TreeGRPO.load(tmp_path, env)
    with pytest.raises(ConfigError, match="clawgym environment"):
        TreeGRPO(CausalPolicy.from_pretrained(model), gym.make("CartPole-v1"), settings())
    with pytest.raises(ConfigError, match="unknown GRPO settings"):
        GRPOSettings.from_dict({"learning_rat": 1.0})
