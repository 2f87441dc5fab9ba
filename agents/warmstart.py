"""Warm start: demonstrations through the real harness, and behaviour cloning on the captured calls.

Demonstrations are rollouts like any other: a scripted policy answers the harness' calls inside the
proxy. They are captured before there is a tokenizer, so this module also gives captured calls their
token ids, as a renderer that had been there would have. It knows nothing of reinforcement learning.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.nn import functional

from agents.models.policy import CausalPolicy
from agents.models.tiny import TEMPLATE
from agents.rollouts import Collector, Job
from clawgym_env.calls import CapturedCall, Move, Rollout
from clawgym_env.errors import ConfigError
from clawgym_env.policies import ScriptedPolicy
from clawgym_env.rendering import Renderer
from clawgym_env.rendering.template import ChatTemplate
from clawgym_env.spaces import message_to_dict, tool_to_dict
from clawgym_env.tasks import Task
from clawgym_env.tree_export import trajectories
from clawgym_env.tree_rules import TreeRules
from clawgym_env.trees import PrefixTree

IGNORED = -100
"""Label of a token that is not trained on, as torch's cross entropy has it."""


@dataclass(frozen=True, slots=True)
class CloneSettings:
    """Settings of behaviour cloning.

    Attributes:
        epochs: Passes over the demonstrations.
        batch_size: Trajectories a step.
        learning_rate: Peak of AdamW's, reached after the warm-up and falling to a tenth (cosine).
        warmup: Share of the steps in which the learning rate rises.
        weight_decay: AdamW's.
        context_weight: Weight of the loss on tokens that the model did not write (instructions,
            tool results) beside 1.0 for those that it did; reading teaches a model that starts
            from random weights to copy.
        max_grad_norm: Bound on the gradient's norm.
        seed: Order of the trajectories.
    """

    epochs: int = 4
    batch_size: int = 16
    learning_rate: float = 3e-3
    warmup: float = 0.05
    weight_decay: float = 0.0
    context_weight: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is above 0; got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class CloneStep:
    """One step of behaviour cloning.

    Attributes:
        step: Its number, from 1.
        steps: How many there are.
        loss: Mean negative log-likelihood of the action tokens, in nats.
    """

    step: int
    steps: int
    loss: float


def demonstrate(
    collector: Collector,
    tasks: Iterable[Task],
    moves: Callable[[Task], Sequence[Move]],
    *,
    on_rollout: Callable[[Rollout], None] | None = None,
) -> list[Rollout]:
    """Run scripted demonstrations through the collector's harness.

    Args:
        collector: Runs them.
        tasks: One rollout each.
        moves: What the demonstrator does on a task.
        on_rollout: Called in the runtime's thread for each finished rollout.

    Returns:
        The captured rollouts, whatever their reward; those that failed for reasons of the
        infrastructure are left out.

    Raises:
        ConfigError: None could be run.
    """
    harness = collector.parts.harness
    jobs = [Job(task, ScriptedPolicy(harness.script(moves(task)))) for task in tasks]
    rollouts = collector.collect(jobs, on_rollout=on_rollout)
    kept = [rollout for rollout in rollouts if not rollout.outcome.is_infrastructure]
    if not kept:
        detail = rollouts[0].detail if rollouts else "no task was given"
        raise ConfigError(f"no demonstration could be run: {detail}")
    return kept


def conversation_text(captured: CapturedCall) -> str:
    """A call's conversation with its reply, as the tiny models' chat template writes it.

    For training a tokenizer, before there is a renderer.
    """
    messages = (*captured.call.messages, captured.completion.message)
    return _template().render(
        [message_to_dict(message) for message in messages],
        [tool_to_dict(tool) for tool in captured.call.tools],
        add_generation_prompt=False,
    )


@cache
def _template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE.read_text(encoding="utf-8"), origin=TEMPLATE.name)


def with_token_ids(rollout: Rollout, renderer: Renderer) -> Rollout:
    """The rollout with prompts and replies as token ids, spliced as at capture time.

    Replies get the ids that the renderer encodes them to, without logprobs: nothing sampled them.
    """
    conversation = renderer.conversation()
    calls = []
    for captured in rollout.calls:
        prompt = conversation.render(captured.call.messages, captured.call.tools)
        message = captured.completion.message
        ids = renderer.encode_reply(message)
        conversation.record(captured.call.call_id, prompt.ids, ids, message)
        calls.append(
            replace(
                captured,
                prompt_ids=prompt.ids,
                completion=replace(captured.completion, token_ids=ids, logprobs=None),
                parent_id=prompt.parent_id,
                extends=prompt.extends,
                drift=prompt.drift,
            )
        )
    return replace(rollout, calls=tuple(calls))


def clone(
    policy: CausalPolicy,
    rollouts: Sequence[Rollout],
    settings: CloneSettings | None = None,
    *,
    on_step: Callable[[CloneStep], None] | None = None,
) -> float:
    """Behaviour cloning: maximise the likelihood of the demonstrations' replies.

    Args:
        policy: Trained in place; its version is counted up once, at the end.
        rollouts: Demonstrations with token ids.
        settings: See :class:`CloneSettings`.
        on_step: Called after each optimiser step.

    Returns:
        The last epoch's mean loss on action tokens, in nats a token.

    Raises:
        ConfigError: No rollout has a call to train on.
    """
    settings = settings or CloneSettings()
    rows = _rows(rollouts)
    if not rows:
        raise ConfigError("no demonstration has a reply with token ids to clone")
    per_epoch = math.ceil(len(rows) / settings.batch_size)
    steps = settings.epochs * per_epoch
    model = policy.model
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        betas=(0.9, 0.98),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _rate(step, steps, settings.warmup)
    )
    order = random.Random(settings.seed)
    model.train()
    losses: list[float] = []
    for epoch in range(settings.epochs):
        order.shuffle(rows)
        for batch in range(per_epoch):
            chosen = rows[batch * settings.batch_size : (batch + 1) * settings.batch_size]
            loss, shown = _loss(policy, chosen, settings.context_weight)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            optimizer.step()
            schedule.step()
            losses.append(shown)
            if on_step is not None:
                on_step(CloneStep(epoch * per_epoch + batch + 1, steps, shown))
    model.eval()
    policy.updated()
    return sum(losses[-per_epoch:]) / per_epoch


@dataclass(frozen=True, slots=True)
class _Row:
    """One trajectory: its ids, and which of them the demonstrator wrote."""

    ids: tuple[int, ...]
    actions: tuple[bool, ...]


def _rows(rollouts: Sequence[Rollout]) -> list[_Row]:
    rules = TreeRules(unsampled=True)
    return [
        _Row(tuple(path.token_ids.tolist()), tuple(path.action_mask.tolist()))
        for rollout in rollouts
        for path in trajectories(PrefixTree.from_rollouts([rollout], rules))
    ]


def _loss(
    policy: CausalPolicy, rows: Sequence[_Row], context_weight: float
) -> tuple[torch.Tensor, float]:
    """The batch's weighted loss, and the plain mean over its action tokens."""
    width = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full((len(rows), width), IGNORED, dtype=torch.int64)
    weights = torch.zeros(len(rows), width)
    for index, row in enumerate(rows):
        size = len(row.ids)
        ids[index, :size] = torch.tensor(row.ids)
        labels[index, :size] = ids[index, :size]
        weights[index, :size] = torch.where(torch.tensor(row.actions), 1.0, context_weight)
    device = policy.device
    ids, labels, weights = ids.to(device), labels[:, 1:].to(device), weights[:, 1:].to(device)
    # Padding is at the end and attention causal, so it is seen by nothing that counts.
    logits = policy.model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = functional.cross_entropy(
        logits.transpose(1, 2).float(), labels, ignore_index=IGNORED, reduction="none"
    )
    actions = (weights == 1.0) & (labels != IGNORED)
    shown = float(losses.detach()[actions].mean())
    return (losses * weights).sum() / weights.sum(), shown


def _rate(step: int, steps: int, warmup: float) -> float:
    rising = max(1, int(steps * warmup))
    if step < rising:
        return (step + 1) / rising
    progress = (step - rising) / max(1, steps - rising)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
