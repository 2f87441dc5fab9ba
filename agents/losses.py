"""Policy losses over visits, and the logprobs they need, without a full T x V tensor of logits.

Functions of tensors with one entry a visit; they know nothing of trees, rows or models. Invariant:
the loss is a plain weighted sum over visits, so the losses of an update's rows add up to the
update's loss however it was cut, and metrics merge by their counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clawgym_env.errors import ConfigError, PolicyError

Head = Tensor | Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The policy loss.

    Attributes:
        clip_low: The ratio is clipped from below at 1 - clip_low (PPO, arXiv 1707.06347, eq. 7).
        clip_high: And from above at 1 + clip_high; larger than ``clip_low`` is DAPO's asymmetric
            clip (arXiv 2503.14476, eq. 10).
        importance_cap: Each visit's policy term is scaled by min(exp(old - behaviour), cap),
            truncated importance sampling against the sampling engine; None for no correction,
            which is also what replies without logprobs need.
        kl_coefficient: Weight of the k3 estimate of KL(policy || reference), exp(d) - d - 1 with
            d = reference - policy (GRPO, arXiv 2402.03300, eq. 4); 0 for none.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    importance_cap: float | None = 2.0
    kl_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1 or self.clip_high <= 0:
            raise ConfigError(
                f"clip_low must be in (0, 1] and clip_high positive, got {self.clip_low} and "
                f"{self.clip_high}"
            )
        if self.importance_cap is not None and self.importance_cap <= 0:
            raise ConfigError(f"importance_cap must be positive or None: {self.importance_cap}")
        if self.kl_coefficient < 0:
            raise ConfigError(f"kl_coefficient must not be negative: {self.kl_coefficient}")


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """Means over visits; ``merge`` joins those of several rows.

    Attributes:
        visits: Number of visits.
        loss: Sum of the rows' losses (not a mean).
        ratio: Mean of exp(policy - old).
        clip_fraction: Share of visits where clipping stops the gradient.
        approx_kl: Mean k3 estimate of KL(old || policy).
        entropy: Mean entropy of the policy at the visits in nats; NaN where not given.
        importance: Mean truncated importance weight, 1 without correction.
        importance_capped: Share of visits whose importance weight was cut.
        behaviour_gap: Mean of old - behaviour, which is 0 for engines that agree; NaN where a
            visit has no behaviour logprob.
        reference_kl: Mean k3 estimate of KL(policy || reference), 0 without a reference.
    """

    visits: int
    loss: float
    ratio: float
    clip_fraction: float
    approx_kl: float
    entropy: float
    importance: float
    importance_capped: float
    behaviour_gap: float
    reference_kl: float

    @staticmethod
    def merge(parts: Sequence[LossMetrics]) -> LossMetrics:
        """The metrics of all parts together.

        Raises:
            ConfigError: There is no part.
        """
        if not parts:
            raise ConfigError("there are no metrics to merge: the update had no row")
        visits = sum(part.visits for part in parts)
        means = {
            field.name: sum(getattr(part, field.name) * part.visits for part in parts) / visits
            for field in fields(LossMetrics)
            if field.name not in ("visits", "loss")
        }
        return LossMetrics(visits=visits, loss=sum(part.loss for part in parts), **means)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    settings: LossSettings | None = None,
    *,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """The clipped surrogate, summed over visits with their weights.

    Per visit: ``-min(r A, clip(r, 1 - low, 1 + high) A) * c + kl_coefficient * k3`` with
    ``r = exp(logprob - old)`` and ``c = min(exp(old - behaviour), cap)``.

    Args:
        logprobs: (V,) under the policy, with gradient.
        old_logprobs: (V,) under the proximal policy, the weights before the update.
        behaviour_logprobs: (V,) as sampled; NaN allowed only without ``importance_cap``.
        advantages: (V,).
        weights: (V,) see ``visits.visits_of``.
        settings: The loss.
        reference_logprobs: (V,) under the reference policy, needed with ``kl_coefficient``.
        entropy: (V,) for the metrics.

    Returns:
        Scalar loss in the dtype of ``logprobs``, and its metrics.

    Raises:
        ConfigError: Shapes differ, there is no visit, or an input that the settings need is absent.
        PolicyError: A logprob of the policy is NaN or infinite.
    """
    settings = settings or LossSettings()
    given = {
        "old_logprobs": old_logprobs,
        "behaviour_logprobs": behaviour_logprobs,
        "advantages": advantages,
        "weights": weights,
        "reference_logprobs": reference_logprobs,
        "entropy": entropy,
    }
    _check(logprobs, given, settings)
    log_ratio = logprobs - old_logprobs.detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)

    raw = torch.ones_like(ratio)
    cap = float("inf")
    if settings.importance_cap is not None:
        cap = settings.importance_cap
        raw = (old_logprobs - behaviour_logprobs).detach().exp()
    importance = raw.clamp(max=cap)
    per_visit = -surrogate * importance

    reference_kl = torch.zeros_like(ratio)
    if reference_logprobs is not None:
        difference = reference_logprobs.detach() - logprobs
        reference_kl = difference.exp() - difference - 1
        if settings.kl_coefficient:
            per_visit = per_visit + settings.kl_coefficient * reference_kl
    loss = (per_visit * weights).sum()

    with torch.no_grad():
        stopped = (clipped != ratio) & (clipped * advantages < ratio * advantages)
        metrics = LossMetrics(
            visits=len(logprobs),
            loss=loss.item(),
            ratio=ratio.mean().item(),
            clip_fraction=stopped.double().mean().item(),
            approx_kl=(ratio - 1 - log_ratio).mean().item(),
            entropy=float("nan") if entropy is None else entropy.mean().item(),
            importance=importance.mean().item(),
            importance_capped=(raw > cap).double().mean().item(),
            behaviour_gap=(old_logprobs - behaviour_logprobs).mean().item(),
            reference_kl=reference_kl.mean().item(),
        )
    return loss, metrics


def chunked_logprobs(
    hidden: Tensor, head: Head, targets: Tensor, chunk: int = 1024, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logprobs of ``targets``, and entropies, ``chunk`` rows of logits at a time.

    With several chunks the logits of each are computed again in the backward pass instead of kept.

    Args:
        hidden: (A, hidden) final hidden states at the predecessors of the targets.
        head: The output head's (V, hidden) weight, or what turns hidden states into logits: a
            ``Linear``, tied or not, or peft's wrapper of one.
        targets: (A,) int64.
        chunk: Rows of logits held at once.
        temperature: Logits are divided by it, as they were in sampling.

    Returns:
        (A,) logprobs in nats with gradient, and (A,) entropies without; float32 or wider.

    Raises:
        ConfigError: Shapes differ, ``chunk`` or ``temperature`` is not positive, or a target lies
            outside of the vocabulary.
    """
    if len(hidden) != len(targets) or hidden.ndim != 2:
        raise ConfigError(
            f"hidden {tuple(hidden.shape)} must be (A, hidden) with one row for each of the "
            f"{len(targets)} targets"
        )
    if chunk < 1 or temperature <= 0:
        raise ConfigError(f"chunk and temperature must be positive, got {chunk}, {temperature}")
    if len(targets) == 0:
        raise ConfigError("there are no targets; a row without visits should not be made")
    pieces = list(zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True))
    if len(pieces) == 1:
        return _logprobs(hidden, targets, head, temperature)
    results = [
        checkpoint(_logprobs, rows, ids, head, temperature, use_reentrant=False)
        for rows, ids in pieces
    ]
    return torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results])


def _logprobs(
    hidden: Tensor, targets: Tensor, head: Head, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ head.T if isinstance(head, Tensor) else head(hidden)
    highest = int(targets.max())
    if highest >= logits.shape[-1]:
        raise ConfigError(
            f"token id {highest} is outside of the policy's vocabulary of {logits.shape[-1]}; "
            "the calls were captured with another tokenizer"
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    logprobs = torch.log_softmax(logits.to(wide) / temperature, dim=-1)
    entropy = torch.special.entr(logprobs.detach().exp()).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def _check(logprobs: Tensor, given: dict[str, Tensor | None], settings: LossSettings) -> None:
    if logprobs.ndim != 1 or len(logprobs) == 0:
        raise ConfigError(f"logprobs must be (V,) with V > 0, got {tuple(logprobs.shape)}")
    for name, value in given.items():
        if value is not None and value.shape != logprobs.shape:
            raise ConfigError(
                f"{name} must be {tuple(logprobs.shape)} like logprobs, got {tuple(value.shape)}"
            )
    if settings.kl_coefficient and given["reference_logprobs"] is None:
        raise ConfigError(
            f"kl_coefficient is {settings.kl_coefficient} and reference_logprobs are not given"
        )
    behaviour = given["behaviour_logprobs"]
    assert behaviour is not None
    if settings.importance_cap is not None and not torch.isfinite(behaviour).all():
        raise ConfigError(
            "some visits have no behaviour logprob; set importance_cap to None for replies that "
            "were not sampled"
        )
    for name in ("old_logprobs", "reference_logprobs"):
        value = given[name]
        if value is not None and not torch.isfinite(value).all():
            raise PolicyError(f"{name} are not finite; the weights or activations overflowed")
    if not torch.isfinite(logprobs).all():
        raise PolicyError("logprobs are not finite; the weights or activations overflowed")
