"""KV-01, KV-02, KV-04: what a decode worker ends up with is what a naive copy gives, bit for bit, for every pair of
tensor parallel degrees, head counts, block sizes, dtypes and codecs, and no byte travels twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from baton.kernels.kv_quantize import CODES
from baton.kernels.kv_rows import convert as convert_rows
from baton.kv_transfer.codec import WIRES, decode, direct, encode, wire_bytes, wire_dtype
from baton.kv_transfer.plan import Box
from baton.tests.harness.kv_convert import HEAD_DIM, LAYERS, Case, convert
from hypothesis import given, settings
from hypothesis import strategies as st

RANKS = (1, 2, 3, 4)
HEADS = (1, 2, 3, 4, 8)
BLOCKS = (1, 4, 8, 16, 32)
DTYPES = ("float32", "bfloat16", "float16")
PAIRS = tuple(itertools.product(DTYPES, DTYPES))
CODED = ("int8", "fp8")
RAW_PAIRS = tuple(itertools.product((*DTYPES, *CODED), (*DTYPES, *CODED)))  # with codes at either end: raw only
BLOCK_PAIRS = tuple(itertools.product(BLOCKS, BLOCKS))


@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize("tp", list(itertools.product(RANKS, RANKS)))
def test_kv_01_kv_02_every_pair_of_tensor_parallel_degrees(tp: tuple[int, int], kv_heads: int) -> None:
    """Uneven splits and replicated heads included; block sizes, dtypes, codecs and chunks change along."""
    turn = (tp[0] * 5 + tp[1]) * 7 + kv_heads
    convert(
        Case(
            tp,
            kv_heads,
            BLOCK_PAIRS[turn % 25],
            PAIRS[turn % 9],
            WIRES[turn % 3],
            cached=(0, 1, 16, 21)[turn % 4],
            chunk=(5, 16, 37)[turn // 3 % 3],
            group=1 + turn // 5 % 3,
        )
    )


@pytest.mark.parametrize("codec", WIRES)
@pytest.mark.parametrize("blocks", BLOCK_PAIRS)
def test_every_pair_of_block_sizes(blocks: tuple[int, int], codec: str) -> None:
    """With prompts and cached prefixes that end inside, at and after a block of either side."""
    for prompt in (1, 33):
        for cached in {0, prompt - 1, prompt // 2, prompt}:
            convert(Case((2, 1), 3, blocks, codec=codec, prompt=prompt, cached=cached, chunk=7, group=3))


@pytest.mark.parametrize("codec", WIRES)
@pytest.mark.parametrize("dtypes", PAIRS)
def test_kv_04_every_pair_of_dtypes(dtypes: tuple[str, str], codec: str) -> None:
    for tp in ((1, 1), (1, 3), (3, 2)):
        convert(Case(tp, 3, (8, 4), dtypes, codec, cached=3))


@pytest.mark.parametrize("dtypes", [pair for pair in RAW_PAIRS if set(pair) & set(CODED)])
def test_kv_04_every_pair_with_a_quantised_pool(dtypes: tuple[str, str]) -> None:
    """Codes as the decode pool's writer makes them, the same codes where both have them, or the values they mean."""
    for tp in ((1, 1), (1, 3), (3, 2)):
        convert(Case(tp, 3, (8, 4), dtypes, cached=3))
        convert(Case(tp, 3, (4, 16), dtypes, cached=17, chunk=5, frame_bytes=301))


def _cases() -> st.SearchStrategy[Case]:
    prompt = st.integers(1, 70)
    return prompt.flatmap(
        lambda tokens: st.builds(
            Case,
            tp=st.tuples(st.integers(1, 4), st.integers(1, 4)),
            kv_heads=st.sampled_from(HEADS),
            blocks=st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS)),
            dtypes=st.sampled_from(RAW_PAIRS),
            codec=st.sampled_from(WIRES),
            prompt=st.just(tokens),
            cached=st.integers(0, tokens),
            chunk=st.integers(1, 40),
            group=st.integers(1, LAYERS),
            frame_bytes=st.sampled_from([1, 300, 5000, 1 << 20]),
        )
    ).map(lambda case: replace(case, codec="raw") if set(case.dtypes) & set(CODED) else case)


@settings(max_examples=60)
@given(_cases())
def test_any_combination_equals_a_naive_copy(case: Case) -> None:
    convert(case)


@pytest.mark.slow
@settings(max_examples=3000)
@given(_cases())
def test_many_combinations_equal_a_naive_copy(case: Case) -> None:
    convert(case)


def _whole_grid() -> Iterator[Case]:
    for tp, heads, blocks in itertools.product(itertools.product(RANKS, RANKS), HEADS, BLOCK_PAIRS):
        yield Case(tp, heads, blocks, prompt=33, cached=5, chunk=16, group=2, frame_bytes=1500)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("codec", WIRES)
def test_kv_01_the_whole_grid(codec: str) -> None:
    """TP x TP x heads x block sizes, in one dtype pair after the other."""
    for case, dtypes in zip(_whole_grid(), itertools.cycle(PAIRS), strict=False):
        convert(Case(**{**vars(case), "codec": codec, "dtypes": dtypes}))


def test_the_wire_has_the_narrower_type() -> None:
    narrower = {pair: wire_dtype(*pair, "raw") for pair in PAIRS}
    assert narrower == {
        ("float32", "float32"): "float32",
        ("float32", "bfloat16"): "bfloat16",
        ("float32", "float16"): "float16",
        ("bfloat16", "float32"): "bfloat16",
        ("bfloat16", "bfloat16"): "bfloat16",
        ("bfloat16", "float16"): "bfloat16",
        ("float16", "float32"): "float16",
        ("float16", "bfloat16"): "float16",
        ("float16", "float16"): "float16",
    }
    assert {wire_dtype(*pair, "int8") == pair[0] for pair in PAIRS} == {True}
    with_codes = {pair: wire_dtype(*pair, "raw") for pair in RAW_PAIRS if set(pair) & set(CODED)}
    assert with_codes == {pair: pair[0] if pair[0] in CODED else pair[1] for pair in with_codes}
    assert direct(torch.float32, "float32", "raw")
    assert not direct(torch.float32, "bfloat16", "raw")
    assert not direct(torch.float32, "float32", "fp8")


def test_kv_04_raw_passes_what_is_not_finite_and_never_makes_it_finite() -> None:
    box, shape = Box((0, 1), (0, 1), (0, 1)), (1, 2, 1, 1, 8)
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 70000.0, -70000.0, 3e38, -0.0, 1e-40])
    for source, target in PAIRS:
        values = odd.to(getattr(torch, source)).expand(shape)
        payload = torch.empty(wire_bytes(box, 8, wire_dtype(source, target, "raw"), "raw"), dtype=torch.uint8)
        encode(values, payload, wire_dtype(source, target, "raw"), "raw")
        kind = getattr(torch, target)
        got = decode(payload, box, 8, wire_dtype(source, target, "raw"), "raw", kind)
        assert torch.equal(got.isfinite() | values.isfinite(), values.isfinite())
        torch.testing.assert_close(got, values.to(kind), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("kind", CODED)
def test_kv_04_a_quantised_pool_passes_what_is_not_finite_as_a_row_without_numbers(kind: str) -> None:
    box = Box((0, 1), (0, 1), (0, 1))
    values = torch.ones(1, 2, 1, 1, 8)
    values[0, 1, 0, 0, 3] = float("inf")
    payload = torch.empty(wire_bytes(box, 8, kind, "raw"), dtype=torch.uint8)
    assert payload.numel() == 2 * (8 + 4)
    encode(values, payload, kind, "raw")
    got = decode(payload, box, 8, kind, "raw", torch.float32)
    assert torch.equal(got[0, 0], values[0, 0])
    assert got[0, 1].isnan().all()


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("codec", CODED)
def test_codes_are_not_coded_again(kind: str, codec: str) -> None:
    box = Box((0, 1), (0, 1), (0, 1))
    payload = torch.empty(wire_bytes(box, 8, kind, codec), dtype=torch.uint8)
    rows = convert_rows(torch.ones(1, 2, 1, 1, 8), CODES[kind])
    with pytest.raises(ValueError, match=f"quantised pool .{kind}. travels raw only, not as {codec}"):
        encode(rows, payload, kind, codec)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_quantised_payload_is_its_scales_then_its_codes(codec: str) -> None:
    """The format: other implementations read it."""
    box = Box((0, 2), (0, 1), (0, 1))
    values = torch.tensor([1.0, -2.0, 0.5]).expand(1, 2, 1, 2, 3).contiguous()
    payload = torch.empty(wire_bytes(box, 3, "float32", codec), dtype=torch.uint8)
    encode(values, payload, "float32", codec)
    assert payload.numel() == 4 * (4 + 3)
    assert payload[:16].view(torch.float32).tolist() == [pytest.approx(2 / {"int8": 127, "fp8": 448}[codec])] * 4
    codes = {"int8": [64, 256 - 127, 32], "fp8": [0x76, 0xFE, 0x6E]}[codec]
    assert payload[16:].tolist() == codes * 4


@pytest.mark.parametrize(("dtype", "codec"), [("int4", "raw"), ("float32", "zip"), ("float8", "fp8")])
def test_what_is_not_known_is_refused(dtype: str, codec: str) -> None:
    with pytest.raises(ValueError, match="is not one of"):
        wire_dtype(dtype, "float32", codec)
    with pytest.raises(ValueError, match="is not one of"):
        wire_bytes(Box((0, 1), (0, 1), (0, 1)), HEAD_DIM, dtype, codec)
