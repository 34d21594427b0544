"""`baton plan --explain` and `baton explain TOPIC`: the roofline in words, each line with the numbers it came from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from ...proto.errors import ConfigError
from ..hardware import CATALOGUE, Hardware
from .costs import WIDTH, CostModel
from .model_shape import find
from .roofline import BATCHES, CURVE_CONTEXT, EXAMPLE, READER, TPOT_S, TTFT_S, Roofline, Training, end_to_end
from .workload import Workload

TOPICS = ("roofline", "training")
_OTHER = "h100-sxm"


def lines(prefill: CostModel, decode: CostModel, workload: Workload) -> list[str]:
    """The whole explanation, for one rank's limits and for the workers of the configuration."""
    roof = Roofline.of(replace(decode, measured=None))
    output = workload.output.mean
    return [
        *_weights(roof),
        *_balance(roof),
        *_kv(roof),
        *_curve(roof),
        *_latency(output),
        *_real(prefill, decode, workload),
    ]


def _weights(roof: Roofline) -> list[str]:
    hardware, shape, kind = roof.hardware, roof.shape, roof.kind
    width, speed = WIDTH[kind], roof.single()
    found = [
        "1. Weights and the ceiling of one stream",
        f"   {shape.total / 1e9:.3g} billion parameters * {width:g} bytes ({kind}) = {_gb(roof.weights())}",
        "   A decode step reads every weight once, so one stream gets at most bandwidth / weights:",
        f"   {hardware.bandwidth / 1e12:.4g} TB/s / {_gb(roof.weights())} = {speed:.0f} tokens/s",
        f"   A reader's {READER:.0f} tokens/s need {READER:.0f} * {_gb(roof.weights())} = "
        f"{roof.bandwidth_for(READER) / 1e9:.0f} GB/s",
    ]
    for smaller in ("int8", "int4"):
        if WIDTH[smaller] < width:
            times = width / WIDTH[smaller]
            found.append(
                f"   {smaller.upper()} has 1/{times:g} of the bytes: {_gb(roof.weights(smaller))}, "
                f"{roof.single(smaller):.0f} tokens/s (scales add a few percent; KV keeps its own type)"
            )
    other = Hardware.model_validate(yaml.safe_load((CATALOGUE / f"{_OTHER}.yaml").read_text()))
    if other.bandwidth > 1.2 * hardware.bandwidth:
        faster = replace(roof, hardware=other)
        found.append(
            f"   {_OTHER} ({other.bandwidth / 1e12:.2f} TB/s) gets {faster.single():.0f} tokens/s: only "
            f"{other.bandwidth / hardware.bandwidth:.1f}x as many, "
            f"though it has {other.flops / hardware.flops:.1f}x the FLOPs"
        )
    return found


def _balance(roof: Roofline) -> list[str]:
    hardware = roof.hardware
    return [
        "",
        "2. The balance point: why decode waits for memory and prefill for arithmetic",
        f"   {hardware.flops / 1e12:.4g} TFLOP/s / {hardware.bandwidth / 1e12:.4g} TB/s = {roof.balance:.0f} FLOPs for "
        "each byte read",
        f"   Decode of one sequence does {roof.intensity:.0f} FLOPs for each weight (a product and a sum): "
        f"{roof.balance / roof.intensity:.0f}x below the balance point",
        f"   (counted for each byte of {roof.kind} it is {roof.intensity / WIDTH[roof.kind]:g}: "
        f"{roof.balance * WIDTH[roof.kind] / roof.intensity:.0f}x below). A batch of b does b times as many with the "
        "same reading;",
        "   a prompt of n tokens does n times as many: prefill is above the point from some hundred tokens on.",
    ]


def _kv(roof: Roofline) -> list[str]:
    shape, (tokens, batch) = roof.shape, EXAMPLE
    size = roof.kv_token * tokens * batch
    head = f"2 * {shape.layers} layers * {shape.kv_heads} KV heads * {shape.head_dim} * {WIDTH[roof.kv]:g} bytes"
    found = [
        "",
        "3. KV cache: what a batch must keep",
        f"   {head} = {roof.kv_token:,.0f} B = {roof.kv_token / 1024:g} KiB a token",
        f"   {tokens} tokens * {batch} sequences * {roof.kv_token / 1024:g} KiB = {_gb(size)} ({size / 2**30:.0f} GiB)",
    ]
    if shape.heads > shape.kv_heads and not shape.latent:
        found.append(
            f"   Grouped queries: {shape.heads // shape.kv_heads} heads share a KV head, so it is that much less"
        )
    return found


def _curve(roof: Roofline) -> list[str]:
    found = [
        "",
        f"4. Batching shares the reading of the weights ({CURVE_CONTEXT} tokens of context each)",
        "   t(b) = weights / W + b * context * KV / W: reading KV is not shared, so the curve bends",
    ]
    for batch in BATCHES:
        alone = batch * roof.single()
        found.append(
            f"   batch {batch:4}: {roof.throughput(batch):6,.0f} tokens/s   (weights alone would give {alone:,.0f})"
        )
    fits = roof.most_sequences(EXAMPLE[0])
    found.append(
        f"   KV memory ends it: {_gb(float(roof.hardware.memory))} - {_gb(roof.weights())} hold {fits} sequences of "
        f"{EXAMPLE[0]} tokens"
    )
    return found


def _latency(output: float) -> list[str]:
    total, share = end_to_end(TTFT_S, TPOT_S, output)
    strict = TTFT_S + (output - 1) * TPOT_S
    return [
        "",
        "5. What a user waits for: TTFT (queue and prefill) + TPOT * tokens (decode)",
        f"   {TTFT_S * 1e3:.0f} ms + {TPOT_S * 1e3:.0f} ms * {output:.0f} tokens = {total:.1f} s, of which TPOT makes "
        f"{share:.0%}",
        f"   (strictly the first token is TTFT's: {TTFT_S * 1e3:.0f} ms + {output - 1:.0f} * {TPOT_S * 1e3:.0f} ms = "
        f"{strict:.3f} s)",
    ]


def _real(prefill: CostModel, decode: CostModel, workload: Workload) -> list[str]:
    prompt = workload.prompt.mean
    batch = 16
    context = batch * (prompt + workload.output.mean / 2)
    found = ["", "6. What is reached (coefficients: " + _origin(decode) + ")"]
    for title, terms in (
        (f"a prompt of {prompt:.0f} tokens on TP {prefill.tp}", prefill.prefill_terms(prompt)),
        (
            f"a decode step of {batch} sequences, {context:,.0f} tokens of KV, on TP {decode.tp}",
            decode.decode_terms(batch, context),
        ),
    ):
        parts = [
            f"{name.replace('_', '-')} {value * 1e3:.2f}"
            for name in ("weights", "kv", "compute", "attention", "all_reduce", "overhead")
            if (value := getattr(terms, name))
        ]
        found.append(f"   {title}: {' + '.join(parts)} = {terms.total * 1e3:.2f} ms")
    found.append(
        f"   its KV pool: {decode.kv_blocks:,} blocks of {decode.options.block_size} tokens a rank "
        f"(computed: {decode.options.memory_share:.0%} of memory - weights - activations - reserve)"
        if decode.options.kv_memory is None
        else f"   its KV pool: {decode.kv_blocks:,} blocks of {decode.options.block_size} tokens a rank (kv.memory)"
    )
    return found


def _origin(cost: CostModel) -> str:
    if cost.measured is not None:
        return f"baton calibrate, {cost.measured.date}, {cost.measured.device}"
    return cost.hardware.efficiency.origin


def topic(name: str, model: str) -> list[str]:
    """`baton explain`. Raises ConfigError for an unknown topic or model."""
    if name not in TOPICS:
        raise ConfigError(f"TOPIC: is {name}, but must be one of {', '.join(TOPICS)}")
    shape = find(model, Path())
    if name == "training":
        return _training(shape.total, shape.name)
    hardware = Hardware.model_validate(yaml.safe_load((CATALOGUE / "a100-teaching.yaml").read_text()))
    roof = Roofline(shape, hardware, "bfloat16", "bfloat16")
    return [*_weights(roof), *_balance(roof), *_kv(roof), *_curve(roof), *_latency(500)]


def _training(parameters: float, name: str) -> list[str]:
    held = Training(parameters)
    low, high = held.held + held.activations(True), held.held + held.activations(False)
    return [
        f"Training {name} ({parameters / 1e9:.3g} billion parameters, bfloat16, Adam) holds",
        f"   weights      {_gb(held.weights):>8}   2 bytes each",
        f"   gradients    {_gb(held.gradients):>8}   as many as weights",
        f"   Adam         {_gb(held.adam):>8}   two moments, 2 bytes each",
        f"   together     {_gb(held.held):>8}   before activations",
        f"   activations {_gb(held.activations(True))} to {_gb(held.activations(False))} and more: every layer's, "
        "kept for the way back",
        f"   = {low / 1e9:.0f}-{high / 1e9:.0f} GB and more. With moments and a master copy in float32: "
        f"{_gb(held.mixed)} before activations",
        f"Inference holds {_gb(held.weights)} of weights + KV: no gradients, no moments, and a layer's activations are "
        "dropped when the next has them.",
    ]


def _gb(value: float) -> str:
    return f"{value / 1e9:.3g} GB"
