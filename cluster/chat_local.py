"""A model in this process, for `baton chat --local`: one engine, without router, transfer or Ray."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..proto.errors import InvalidRequest
from ..proto.sampling import SamplingParams
from ..text.chat_template import ChatTemplate
from ..text.detokenizer import Detokenizer
from ..text.source import resolve
from ..text.tokenizer import Tokenizer
from . import spec
from .chat import Ended, Message, Pieces, Wanted
from .config import Config
from .progress import StartProgress

if TYPE_CHECKING:
    from ..engine.block_pool import BlockPool
    from ..engine.local import LocalEngine
    from ..engine.runner import Runner


class LocalModel:
    """Made by `load`. The prefix cache keeps the KV of a conversation between its turns."""

    def __init__(self, runner: Runner, pool: BlockPool, engine: LocalEngine, tokenizer: Tokenizer, chunk: int) -> None:
        self._runner = runner
        self._pool = pool
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._chunk = chunk

    @staticmethod
    def load(config: Config) -> LocalModel:
        """The model of a configuration, warm. Raises ConfigError."""
        params = spec.local_engine(config)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(params.threads)  # before torch is imported
        from ..engine.block_pool import BlockPool
        from ..engine.local import LocalEngine
        from ..engine.ranks import SingleRank
        from ..engine.runner import Runner
        from ..engine.speculation_start import start_speculation

        logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="baton: %(message)s")
        with StartProgress(verbose=False) as progress:

            def loading(done: int, total: int) -> None:
                progress.report("model", "loading", {"done": done, "total": total})

            tokenizer = Tokenizer.load(resolve(params.model_path))
            runner = Runner(params, SingleRank(), loading, None)
            runner.warm_up()
            speculator = start_speculation(spec.speculation_params(config), params, runner)
        pool = BlockPool(runner.blocks, params.block_size, params.prefix_cache)
        engine = LocalEngine(runner, pool, runner.kv.copy_blocks, speculator)
        return LocalModel(runner, pool, engine, tokenizer, config.pools.prefill.max_batch_tokens)

    def answer(self, messages: Sequence[Message], wanted: Wanted) -> Pieces:
        """See ChatModel."""
        prompt = self._template.render_ids(messages)
        params = self._params(wanted, len(prompt))
        text = Detokenizer(self._tokenizer)
        known, tokens = self._pool.prefix_hit_tokens, 0
        for token in self._engine.stream(prompt, params, self._chunk):
            tokens += 1
            yield text.push([token.token_id])
        yield text.flush()
        yield Ended(len(prompt), self._pool.prefix_hit_tokens - known, tokens)

    def _params(self, wanted: Wanted, prompt_tokens: int) -> SamplingParams:
        """Raises InvalidRequest when the conversation fills the context."""
        context = min(self._runner.max_model_len, self._pool.total * self._pool.block_size)
        if prompt_tokens >= context:
            text = f"the conversation has {prompt_tokens} tokens, the context {context}; /reset begins a new one"
            raise InvalidRequest(text)
        neutral: dict[str, Any] = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}
        neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1, "min_tokens": 0, "logprobs": None}
        return SamplingParams(
            **neutral,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            seed=wanted.seed,
            max_tokens=min(wanted.max_tokens or context, context - prompt_tokens),
            stop_token_ids=frozenset(i for i in self._tokenizer.eos_token_ids if i < self._runner.vocab_size),
        )
