"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from baton.tests.harness.tiny_model import write_tiny_model
from baton.text.source import ModelSource, resolve
from baton.text.tokenizer import Tokenizer
from hypothesis import HealthCheck, settings

# A busy machine is slow: how long an example takes says nothing about the property.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("baton")


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heard() -> None:
    """Whoever runs the tests may ignore some (nohup, a shell's background jobs), and children would inherit that."""
    for kind, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(kind) is signal.SIG_IGN:
            signal.signal(kind, default)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T0's model: a random Llama with the default sizes."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_source(tiny_dir: Path) -> ModelSource:
    """T0's model as a source."""
    return resolve(str(tiny_dir))


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_source: ModelSource) -> Tokenizer:
    """T0's tokenizer."""
    return Tokenizer.load(tiny_source)


@pytest.fixture(scope="session")
def smol_source() -> ModelSource:
    """The bundled SmolLM2-135M-Instruct."""
    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smol_tokenizer(smol_source: ModelSource) -> Tokenizer:
    """The bundled model's tokenizer, from the metadata of its GGUF file."""
    return Tokenizer.load(smol_source)
