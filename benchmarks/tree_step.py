"""One training step, forward and backward, on packed trees against the same calls one by one.

The figure of merit is the speed-up over the faster of two per-call baselines, each call in a row of
its own and rows filled to the budget with calls side by side, beside the ideal token ratio: the
tokens that per-call training processes for each token of the trees. All variants compute the same
loss, which the benchmark checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from agents.attention import use_tree_attention
from agents.losses import policy_loss
from agents.packing import PackedBatch, pack, pack_calls
from agents.scoring import score
from agents.visits import visits_of
from benchmarks.capturing import capture_trees, captured_trees
from benchmarks.measuring import append_line, interleaved, surroundings
from benchmarks.synthetic import Shape, chain_of_ratio, synthetic_rollouts
from clawgym_env.errors import ClawgymError, ConfigError
from clawgym_env.trees import PrefixTree

app = typer.Typer(pretty_exceptions_enable=False)

WIDTH = 100
"""Columns that the table needs; what is narrower, such as a pipe, gets them all the same."""


@dataclass(frozen=True, slots=True)
class Result:
    """One case's figures; seconds are medians of a whole step.

    Attributes:
        case: The case's name.
        calls: Calls trained on.
        tokens: Tokens in the packed rows.
        call_tokens: Tokens of the same calls taken one by one.
        ideal_ratio: ``call_tokens / tokens``.
        packed_s: Seconds of the packed step.
        call_s: Seconds with each call in a row of its own.
        filled_s: Seconds with rows filled by calls side by side.
        speedup: The faster per-call time over the packed one.
        efficiency: ``speedup / ideal_ratio``.
        loss_gap: Largest difference of a per-call loss from the packed one, relative.
    """

    case: str
    calls: int
    tokens: int
    call_tokens: int
    ideal_ratio: float
    packed_s: float
    call_s: float
    filled_s: float
    speedup: float
    efficiency: float
    loss_gap: float


def measure(
    case: str, trees: Sequence[PrefixTree], model: nn.Module, budget: int, repeats: int
) -> Result:
    """Time the step on some trees.

    Args:
        case: A name for the result.
        trees: Trees, at least one of them with included calls.
        model: A model prepared by ``use_tree_attention``.
        budget: Most tokens in a row; raised to the longest path where that is longer.
        repeats: Timed runs of each variant.
    """
    # Any advantages will do: the cost of a step does not depend on them.
    advantages = {
        rollout.rollout_id: 1.0 - 2.0 * (number % 2)
        for tree in trees
        for number, rollout in enumerate(tree.rollouts)
    }
    visits = visits_of(trees, advantages)
    # Nor on the logprobs at sampling time, which demonstrations lack.
    behaviour = np.nan_to_num(visits.behaviour_logprobs, nan=-1.0)
    visits = replace(visits, behaviour_logprobs=behaviour)
    longest = max(tree.stats().depth for tree in trees)
    budget = max(budget, longest)
    device = next(model.parameters()).device
    variants = {
        "packed": pack(trees, visits, budget),
        "call": pack_calls(trees, visits),
        "filled": pack_calls(trees, visits, budget),
    }
    moved = {
        name: [row.to(device, torch.float32) for row in rows] for name, rows in variants.items()
    }
    losses: dict[str, float] = {}

    def step(name: str) -> Callable[[], None]:
        def run() -> None:
            losses[name] = _step(model, moved[name])

        return run

    seconds = interleaved(
        {name: step(name) for name in moved},
        repeats,
        torch.cuda.synchronize if device.type == "cuda" else None,
    )
    tokens = sum(row.tokens for row in variants["packed"])
    call_tokens = sum(row.tokens for row in variants["call"])
    per_call = min(seconds["call"], seconds["filled"])
    ratio = call_tokens / tokens
    gap = max(abs(losses[name] - losses["packed"]) for name in losses)
    gap /= max(abs(losses["packed"]), 1e-12)
    if not gap <= 1e-2:
        raise ClawgymError(f"{case}: packed and per-call losses differ by {gap:.1%}: {losses}")
    return Result(
        case=case,
        calls=len(variants["call"]),
        tokens=tokens,
        call_tokens=call_tokens,
        ideal_ratio=ratio,
        packed_s=seconds["packed"],
        call_s=seconds["call"],
        filled_s=seconds["filled"],
        speedup=per_call / seconds["packed"],
        efficiency=per_call / seconds["packed"] / ratio,
        loss_gap=gap,
    )


def _step(model: nn.Module, rows: Sequence[PackedBatch]) -> float:
    model.zero_grad(set_to_none=True)
    total = 0.0
    for row in rows:
        scores = score(model, row)
        loss, _ = policy_loss(
            scores.logprobs,
            row.behaviour_logprobs,
            row.behaviour_logprobs,
            row.advantages,
            row.weights,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def synthetic_trees(
    ratios: Sequence[int], tokens: int, vocabulary: int
) -> dict[str, list[PrefixTree]]:
    """Chains over the overlap ratios, and a group of rollouts that fork at their prompt."""
    shapes = [chain_of_ratio(ratio, tokens) for ratio in ratios]
    shapes.append(Shape("8 rollouts, 4 turns", tokens, turns=4, rollouts=8, shared=0.5))
    return {
        shape.name: [PrefixTree.from_rollouts(synthetic_rollouts(shape, vocabulary))]
        for shape in shapes
    }


@app.command()
def tree_step(
    store: Annotated[
        Path | None,
        typer.Option(help="Capture store whose trees to take; by default some are captured first."),
    ] = None,
    groups: Annotated[int, typer.Option(help="Captured groups of each harness to take.")] = 2,
    ratios: Annotated[str, typer.Option(help="Overlap ratios of the made-up chains.")] = "1,4,16",
    tokens: Annotated[int, typer.Option(help="Distinct tokens of a made-up tree.")] = 1536,
    budget: Annotated[int, typer.Option(help="Most tokens in a row.")] = 8192,
    repeats: Annotated[int, typer.Option(help="Timed runs of each variant.")] = 3,
    hidden: Annotated[int, typer.Option(help="Hidden size of the model, a multiple of 64.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 4,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; fewer than cores on a busy machine.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File to which results are appended as JSON lines.")
    ] = None,
) -> None:
    """Time a packed training step against per-call ones, on captured and on made-up trees."""
    if threads is not None:
        torch.set_num_threads(threads)
    vocabulary = 2048
    cases = synthetic_trees(_numbers(ratios), tokens, vocabulary)
    captured = captured_trees(store, groups) if store is not None else capture_trees(groups)
    for harness, trees in captured.items():
        cases[f"captured, {harness}"] = trees
    highest = max(int(tree.tokens.max()) for trees in cases.values() for tree in trees)
    model: nn.Module = _model(hidden, layers, max(vocabulary, highest + 1))
    model.to(torch.device(device))
    use_tree_attention(model)
    console = Console()
    if console.width < WIDTH:
        console.width = WIDTH
    console.print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters on {device}, "
        f"{torch.get_num_threads()} threads, float32; medians of {repeats} interleaved runs"
    )
    results = []
    for case, trees in cases.items():
        result = measure(case, trees, model, budget, repeats)
        results.append(result)
        if output is not None:
            record: dict[str, Any] = {"benchmark": "tree_step", **asdict(result)}
            record |= {"hidden": hidden, "layers": layers, "device": device, "budget": budget}
            record |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
            append_line(output, record | surroundings())
    console.print(_table(results))
    console.print(
        f"captured: from {store}"
        if store is not None
        else "captured: demonstrations, run just now; --store PATH takes a run's rollouts instead"
    )


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--ratios takes whole numbers from 1, such as 1,4,16; got {text!r}")
    return numbers


def _model(hidden: int, layers: int, vocabulary: int) -> LlamaForCausalLM:
    if hidden < 64 or hidden % 64:
        raise ConfigError(f"--hidden must be a multiple of 64, got {hidden}")
    torch.manual_seed(0)
    heads = hidden // 32
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=1 << 17,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def _table(results: Sequence[Result]) -> Table:
    table = Table(title="tree_step", box=box.SIMPLE, padding=(0, 1))
    table.add_column("case", no_wrap=True)
    for name in ("calls", "tokens", "ideal", "packed", "calls", "filled", "speed", "of ideal"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.case,
            str(result.calls),
            str(result.tokens),
            f"{result.ideal_ratio:.2f}",
            f"{result.packed_s:.3f}s",
            f"{result.call_s:.3f}s",
            f"{result.filled_s:.3f}s",
            f"{result.speedup:.2f}x",
            f"{result.efficiency:.0%}",
        )
    return table
