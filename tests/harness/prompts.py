"""Twenty varied prompts for the oracle: 1 to 1,500 tokens, several languages, code, block-edge lengths."""

from __future__ import annotations

from typing import Any

TEXTS = {
    "one-token": "The",
    "question": "What is the capital of France?",
    "story": "Once upon a time, in a village by the sea, there lived a fisherman who",
    "german": "Die Hauptstadt von Deutschland ist Berlin. Die Stadt liegt an der",
    "french": "Il était une fois une petite fille qui habitait près de la forêt et",
    "spanish": "El perro corre por el parque mientras los niños juegan con",
    "chinese": "北京是中国的首都,也是",
    "japanese": "昔々、あるところにおじいさんと",
    "russian": "Москва является столицей России. Город расположен на",
    "arabic": "القاهرة هي عاصمة",
    "emoji": "Weather today: ☀️🌧️⛈️ and tomorrow 🌈. Summary:",
    "python": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "sql": "SELECT customer_id, SUM(amount) AS total\nFROM orders\nWHERE created_at >= '2024-01-01'\nGROUP BY",
    "json": '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "known_for":',
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21,",
}

_SUBJECTS = ("The river", "A lighthouse", "Our library", "The old railway", "Every winter", "A careful reader")
_VERBS = ("remembers", "changes", "carries", "measures", "repeats", "divides")
_OBJECTS = ("the names of ships", "what the maps left out", "a long account of storms", "numbers without a table")


def long_text(sentences: int) -> str:
    """Prose that does not repeat itself within a few hundred sentences; about 12 tokens each."""
    return " ".join(
        f"{_SUBJECTS[i % 6]} {_VERBS[(i * 5 + i // 6) % 6]} {_OBJECTS[(i * 3 + i // 4) % 4]} "
        f"in year {1700 + 7 * i % 311}."
        for i in range(sentences)
    )


def twenty_prompts(block_size: int = 16) -> list[dict[str, Any]]:
    """Input lines of `baton generate --input`, greedy, 64 tokens."""
    lines: list[dict[str, Any]] = [{"id": name, "prompt": text} for name, text in TEXTS.items()]
    edge_ids = [(37 * i) % 40000 + 200 for i in range(4 * block_size + 1)]
    for length in (block_size - 1, block_size, 4 * block_size + 1):
        lines.append({"id": f"edge-{length}", "prompt_token_ids": edge_ids[:length]})
    lines.append({"id": "long-400", "prompt": long_text(24)})
    lines.append({"id": "long-1500", "prompt": long_text(94)})
    return [{**line, "max_tokens": 64, "temperature": 0} for line in lines]
