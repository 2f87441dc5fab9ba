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
from typing import Any, Literal

import numpy as np
import torch

from agents.attention import base_model, output_head, tree_hidden, use_tree_attention
from agents.layout import TreeLayout
from agents.losses import chunked_logprobs
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
from clawgym_env.tree_rules import TreeRules
from clawgym_env.trees import PrefixTree


@dataclass(frozen=True, slots=True)
class CloneSettings:
    """Settings of behaviour cloning.

    Attributes:
        epochs: Passes over the demonstrations.
        batch_size: Demonstrations a step; they are packed into one tree, so that what they share
            is computed once.
        optimizer: ``muon`` for the matrices between the embeddings (Jordan et al., Muon, 2024)
            with AdamW for the rest, or ``adamw`` for all.
        muon_learning_rate: Muon's peak.
        learning_rate: AdamW's peak. Both peaks are reached after the warm-up and then fall
            linearly to a twentieth.
        warmup: Steps in which the learning rates rise.
        context_weight: Weight of the loss on tokens that the demonstrator did not write
            (instructions, tool results) beside 1.0 for those that it did; reading teaches a model
            that starts from random weights to copy.
        max_grad_norm: Bound on the gradient's norm.
        seed: Order of the demonstrations.
    """

    epochs: int = 6
    batch_size: int = 4
    optimizer: Literal["muon", "adamw"] = "muon"
    muon_learning_rate: float = 0.02
    learning_rate: float = 3e-3
    warmup: int = 20
    context_weight: float = 0.5
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "learning_rate", "muon_learning_rate", "warmup"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is above 0; got {getattr(self, name)!r}")
        if not self.max_grad_norm > 0 or self.context_weight < 0:
            raise ConfigError(
                f"max_grad_norm is above 0 and context_weight not below; got "
                f"{self.max_grad_norm!r} and {self.context_weight!r}"
            )
        if self.optimizer not in ("muon", "adamw"):
            raise ConfigError(f"optimizer is 'muon' or 'adamw'; got {self.optimizer!r}")


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
    usable = [r for r in rollouts if any(c.completion.token_ids for c in r.calls)]
    if not usable:
        raise ConfigError("no demonstration has a reply with token ids to clone")
    use_tree_attention(policy.model)
    per_epoch = math.ceil(len(usable) / settings.batch_size)
    steps = settings.epochs * per_epoch
    optimizers = _optimizers(policy, settings)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: _rate(step, steps, settings.warmup))
        for o in optimizers
    ]
    order = random.Random(settings.seed)
    policy.model.train()
    losses: list[float] = []
    for epoch in range(settings.epochs):
        order.shuffle(usable)
        for batch in range(per_epoch):
            chosen = usable[batch * settings.batch_size : (batch + 1) * settings.batch_size]
            loss, shown = _loss(policy, chosen, settings.context_weight)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            losses.append(shown)
            if on_step is not None:
                on_step(CloneStep(epoch * per_epoch + batch + 1, steps, shown))
    policy.model.eval()
    policy.updated()
    return sum(losses[-per_epoch:]) / per_epoch


def _optimizers(policy: CausalPolicy, settings: CloneSettings) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices and AdamW for embeddings and norms, or AdamW for all."""
    base: Any = base_model(policy.model)
    tables = (base.get_input_embeddings(), base.get_output_embeddings())
    embeddings = {id(table.weight) for table in tables if table is not None}
    hidden: list[torch.nn.Parameter] = []
    other: list[torch.nn.Parameter] = []
    for parameter in policy.parameters():
        muon = settings.optimizer == "muon" and parameter.ndim == 2
        (hidden if muon and id(parameter) not in embeddings else other).append(parameter)
    found: list[torch.optim.Optimizer] = []
    if hidden:
        found.append(
            torch.optim.Muon(
                hidden,
                lr=settings.muon_learning_rate,
                weight_decay=0.0,
                adjust_lr_fn="original",
            )
        )
    if other:
        found.append(
            torch.optim.AdamW(other, lr=settings.learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
        )
    return found


def _loss(
    policy: CausalPolicy, rollouts: Sequence[Rollout], context_weight: float
) -> tuple[torch.Tensor, float]:
    """The batch's weighted loss, and the plain mean over its action tokens.

    The batch is one tree: each token but the roots' first is predicted by its predecessor.
    """
    tree = PrefixTree.from_rollouts(rollouts, TreeRules(unsampled=True))
    device = policy.device
    ids = torch.from_numpy(tree.tokens.astype(np.int64)).to(device)
    positions = torch.from_numpy(tree.depth).to(device)
    hidden = tree_hidden(policy.model, ids[None], positions[None], TreeLayout.of(tree.subtree_end))
    predicted = np.flatnonzero(tree.predecessor >= 0)
    actions = torch.from_numpy(tree.action_mask[predicted]).to(device)
    sources = torch.from_numpy(tree.predecessor[predicted]).to(device)
    targets = ids[torch.from_numpy(predicted).to(device)]
    logprobs, _ = chunked_logprobs(hidden[sources], output_head(policy.model), targets)
    weights = torch.where(actions, 1.0, context_weight)
    shown = -float(logprobs.detach()[actions].mean())
    return -(logprobs * weights).sum() / weights.sum(), shown


def _rate(step: int, steps: int, warmup: int) -> float:
    return min(1.0, (step + 1) / warmup) * max(0.05, 1 - step / steps)
