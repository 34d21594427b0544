"""One scrape for all routers of a host: each says what it counted itself on a Unix socket of its own, and the one that
is scraped adds the others'. Series of a router then have the label `router`; what workers report is said once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from .metrics import Metrics

_log = logging.getLogger(__name__)
_ANSWER_S = 1.0  # a router that is slower is left out of a scrape
_MOST_BYTES = 16 << 20  # of one router


class MetricsPeers:
    """`socket`: a path in a folder of the routers' own, which nobody else can enter; "": there are no others."""

    def __init__(self, socket: str, metrics: Metrics) -> None:
        self._path = Path(socket) if socket else None
        self._metrics = metrics
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Answers the others from now on. On another host than theirs there is no such folder: then it is alone."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)  # of the process that was here before
            self._server = await asyncio.start_unix_server(self._answer, self._path)
        except OSError as error:
            _log.warning("metrics are not shared with other routers: %s: %s", self._path, error)
            self._path = None

    async def stop(self) -> None:
        """Frees the socket."""
        if self._server is not None:
            self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def render(self) -> bytes:
        """The scrape, in Prometheus' text format."""
        if self._path is None:
            return self._metrics.render()
        others = [path for path in sorted(self._path.parent.iterdir()) if path != self._path]
        texts = await asyncio.gather(*(_ask(path) for path in others))
        own = {self._path.name: self._metrics.render_own()}
        said = own | {path.name: text for path, text in zip(others, texts, strict=True) if text}
        return await asyncio.to_thread(merged, said, self._metrics.render_workers())

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(self._metrics.render_own())
            await writer.drain()
        writer.close()


async def _ask(path: Path) -> bytes:
    """What another router counted; nothing when it does not answer."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                said = bytearray()
                while (part := await reader.read(1 << 16)) and len(said) <= _MOST_BYTES:
                    said += part
                return bytes(said)
            finally:
                writer.close()
    return b""


def merged(routers: Mapping[str, bytes], workers: bytes) -> bytes:
    """One scrape of several. routers: by the value of their label; workers: what all of them would say alike."""
    families: dict[str, Metric] = {}
    for name, text in (*routers.items(), ("", workers)):
        for family in text_string_to_metric_families(text.decode()):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            more = {"router": name} if name else {}
            known.samples += [sample._replace(labels={**sample.labels, **more}) for sample in family.samples]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()
