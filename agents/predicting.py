"""One reply to an observation, outside of any rollout: what ``predict`` of the trainers does.

It knows observations, a renderer and an engine, and nothing of training or of environments.
"""

from __future__ import annotations

import json
from typing import Any

from agents.engine import Engine
from clawgym_env.calls import Sampling
from clawgym_env.protocols import openai_chat
from clawgym_env.rendering import Renderer
from clawgym_env.spaces import Observation


def predict(
    renderer: Renderer,
    engine: Engine,
    observation: Observation,
    *,
    temperature: float,
    max_tokens: int,
) -> dict[str, Any]:
    """Render the observation, sample a reply and return it as an action.

    Args:
        renderer: The policy's.
        engine: Samples.
        observation: Messages and tools in OpenAI's form.
        temperature: Sampling temperature; 0 is greedy.
        max_tokens: Bound on the reply's tokens.

    Returns:
        ``token_ids``, ``logprobs``, ``finish_reason`` and ``policy_version``.

    Raises:
        ProtocolError: The observation is no valid conversation.
        PolicyError: The prompt does not fit the model's context.
    """
    body = {"model": "policy", "messages": observation["messages"]}
    if observation["tools"]:
        body["tools"] = observation["tools"]
    call = openai_chat.parse(
        json.dumps(body).encode(), rollout_id="predict", call_id="predict", index=0, arrived_at=0.0
    )
    prompt = renderer.render(call.messages, call.tools)
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    sample = engine.submit(prompt, sampling).result()
    return {
        "token_ids": list(sample.token_ids),
        "logprobs": list(sample.logprobs),
        "finish_reason": sample.finish_reason,
        "policy_version": sample.policy_version,
    }
