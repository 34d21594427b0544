"""Fields of OpenAI's bodies, and of those of other servers, that change nothing here."""

from __future__ import annotations

from typing import Any

# Fields that have no effect here and are taken at these values only (null always): routers and SDKs add them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prediction": (),
    "reasoning_effort": ("none",),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Labels for whoever keeps answers: taken, and of no effect.
LABELS = frozenset({"metadata", "safety_identifier"})
