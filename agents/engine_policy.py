"""The embedded engine as the policy behind the proxy.

It turns a call's sampling parameters into the engine's, and a sample into a reply. It knows nothing
of HTTP or capture. Invariant: which parameters are used follows from the call and the override
alone: a field that the override sets counts, then the harness' value, then the engine's default;
``max_tokens`` is the smallest of all that are given. ``tool_choice`` is not enforced: the model
sees the tools and decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from agents.engine import Engine
from agents.models.policy import CausalPolicy
from clawgym_env.calls import PolicyRequest, Reply, Sampling
from clawgym_env.errors import PolicyError, ProtocolError


@dataclass(frozen=True, slots=True)
class SamplingOverride:
    """Sampling parameters that count more than the harness'; None leaves the harness its own.

    Attributes:
        temperature: Instead of the harness' temperature.
        top_p: Instead of the harness' top_p.
        top_k: Instead of the harness' top_k; 0 keeps all tokens.
        max_tokens: A cap: the harness may ask for less.
        presence_penalty: Instead of the harness' penalty.
        frequency_penalty: Instead of the harness' penalty.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @classmethod
    def on_policy(cls, max_tokens: int | None = None) -> SamplingOverride:
        """The model's own distribution, whose logprobs are those that the trainer computes.

        Args:
            max_tokens: The most tokens a reply may have.
        """
        return cls(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=max_tokens,
            presence_penalty=0.0,
            frequency_penalty=0.0,
        )

    def apply(self, asked: Sampling) -> Sampling:
        """The harness' parameters with these over them."""

        def over(mine: float | None, theirs: float | None) -> float | None:
            return theirs if mine is None else mine

        caps = [cap for cap in (self.max_tokens, asked.max_tokens) if cap is not None]
        return replace(
            asked,
            temperature=over(self.temperature, asked.temperature),
            top_p=over(self.top_p, asked.top_p),
            top_k=asked.top_k if self.top_k is None else self.top_k,
            max_tokens=min(caps, default=None),
            presence_penalty=over(self.presence_penalty, asked.presence_penalty),
            frequency_penalty=over(self.frequency_penalty, asked.frequency_penalty),
        )


class EnginePolicy:
    """Answers model calls by sampling from the engine.

    Args:
        engine: The engine; it is not closed with the policy, others may use it.
        override: Parameters that count more than the harness'; for training,
            ``SamplingOverride.on_policy()``.
        seed: Makes the k-th call of a rollout draw alike each time, whatever else is in the
            batch; for a policy that answers one rollout. None leaves it to the call's own seed,
            then to the engine's.
    """

    def __init__(
        self, engine: Engine, override: SamplingOverride | None = None, *, seed: int | None = None
    ) -> None:
        self.engine = engine
        self.override = override or SamplingOverride()
        self.seed = seed

    async def complete(self, request: PolicyRequest) -> Reply:
        """Sample a reply to one call.

        With a stop string, the reply's ids include those that spell it: they were sampled.

        Raises:
            PolicyError: The call was not rendered to ids, or the engine failed.
            ProtocolError: The prompt fills the model's context; the harness is told, as by a model
                server.
        """
        prompt, limit = request.prompt_ids, self.engine.max_context
        if prompt is None:
            raise PolicyError(
                "the embedded engine needs the prompt's token ids; give the proxy's session the "
                "policy's renderer (policy.renderer)"
            )
        if len(prompt) >= limit:
            raise ProtocolError(
                400,
                f"this model's context is {limit} tokens, but the messages and tools take "
                f"{len(prompt)}; shorten the conversation",
                param="messages",
                code="context_length_exceeded",
            )
        sampling = self.override.apply(request.call.sampling)
        if self.seed is not None:
            sampling = replace(sampling, seed=_mix(self.seed, request.call.index))
        sample = await self.engine.generate(prompt, sampling)
        return Reply(
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            finish_reason=sample.finish_reason,
            policy_version=sample.policy_version,
        )


def _mix(seed: int, index: int) -> int:
    """A seed for the call at ``index``, far from those of its neighbours."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> 1)


def from_path(path: str) -> EnginePolicy:
    """A policy that samples from a local model directory: ``engine:PATH`` on the command line.

    Raises:
        ConfigError: There is no such model.
    """
    return EnginePolicy(Engine(CausalPolicy.from_pretrained(path)))
