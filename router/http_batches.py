"""OpenAI's /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from ..proto.errors import InvalidRequest
from ..text.batch_lines import ENDPOINTS
from .batch_store import BatchStore, Json
from .batches import Batches
from .errors import NoSuchPath
from .front_door import FrontDoor
from .http_body import bounded, read_body
from .openai_calls import checked, json_of

_COPY_BYTES = 1 << 20
_HOUR_S = 3600
_MAX_WINDOW_H = 7 * 24
_MOST_METADATA = 16
_MOST_LISTED = 100
_FIELDS = frozenset({"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"})
Endpoint = Callable[[Request], Awaitable[Response]]


class BatchRoutes:
    """batches: None where they are off; then every path says so."""

    def __init__(self, door: FrontDoor, batches: Batches | None) -> None:
        self._door = door
        self._batches = batches

    def paths(self) -> list[tuple[str, Endpoint, str]]:
        """(path, endpoint, method)."""
        return [
            ("/v1/files", self.upload, "POST"),
            ("/v1/files", self.files, "GET"),
            ("/v1/files/{file_id}", self.file, "GET"),
            ("/v1/files/{file_id}", self.delete, "DELETE"),
            ("/v1/files/{file_id}/content", self.content, "GET"),
            ("/v1/batches", self.create, "POST"),
            ("/v1/batches", self.list, "GET"),
            ("/v1/batches/{batch_id}", self.batch, "GET"),
            ("/v1/batches/{batch_id}/cancel", self.cancel, "POST"),
        ]

    @property
    def _store(self) -> BatchStore:
        if self._batches is None:
            raise NoSuchPath("batches are off here; router.batches.folder says where they are kept")
        return self._batches.store

    # ---- files -----------------------------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        """A file of lines, as a form with `purpose` and `file`."""
        store = self._store
        limit = self._door.params.batches.file_bytes
        limited = Request(request.scope, _receiver(bounded(self._door, request.stream(), limit + 4096)))
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise InvalidRequest("file: send a form (multipart/form-data) with purpose and file", field="file")
        try:
            async with limited.form(max_files=1, max_fields=8) as form:
                upload, purpose = form.get("file"), form.get("purpose")
                if not isinstance(upload, UploadFile):
                    raise InvalidRequest("file: missing in the form", field="file")
                if purpose != "batch":
                    raise InvalidRequest("purpose: must be batch", field="purpose")
                name = upload.filename or "batch.jsonl"
                described = await asyncio.to_thread(store.new_file, name, "batch", upload.size or 0)
                await _copy(upload, store.data_path(described["id"]))
        except HTTPException as error:  # Starlette's, for a form that is none
            raise InvalidRequest(f"file: {error.detail}", field="file") from None
        return JSONResponse(await asyncio.to_thread(store.file, described["id"]))

    async def files(self, request: Request) -> Response:
        """All files."""
        return JSONResponse(_page(request, await asyncio.to_thread(self._store.files)))

    async def file(self, request: Request) -> Response:
        """One file's description."""
        return JSONResponse(await asyncio.to_thread(self._store.file, request.path_params["file_id"]))

    async def delete(self, request: Request) -> Response:
        """Takes a file away."""
        file_id = request.path_params["file_id"]
        await asyncio.to_thread(self._store.delete_file, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """What is in a file."""
        described = await asyncio.to_thread(self._store.file, request.path_params["file_id"])
        return FileResponse(self._store.data_path(described["id"]), media_type="application/octet-stream")

    # ---- batches ---------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        """A new batch."""
        store, raw = self._store, await read_body(self._door, request)
        body = checked(self._door, lambda: _new_batch(json_of(self._door, raw)))
        source = await asyncio.to_thread(store.file, body["input_file_id"])
        window = body.get("completion_window", "24h")
        seconds = int(window[:-1]) * _HOUR_S
        batch = await asyncio.to_thread(
            store.new_batch, source, body["endpoint"], window, seconds, body.get("metadata")
        )
        if self._batches is not None:
            self._batches.look()
        return JSONResponse(batch)

    async def list(self, request: Request) -> Response:
        """All batches."""
        return JSONResponse(_page(request, await asyncio.to_thread(self._store.batches)))

    async def batch(self, request: Request) -> Response:
        """One batch."""
        return JSONResponse(await asyncio.to_thread(self._store.batch, request.path_params["batch_id"]))

    async def cancel(self, request: Request) -> Response:
        """Ends a batch after the requests that run."""
        return JSONResponse(await asyncio.to_thread(self._store.ask_to_stop, request.path_params["batch_id"]))


def _new_batch(body: Any) -> Json:
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    unknown = next((name for name in body if name not in _FIELDS), None)
    if unknown is not None:
        raise InvalidRequest(f"{unknown:.100}: unknown field", field=unknown[:100])
    if not isinstance(body.get("input_file_id"), str):
        raise InvalidRequest("input_file_id: must be the id of a file", field="input_file_id")
    if body.get("endpoint") not in ENDPOINTS:
        raise InvalidRequest(f"endpoint: must be one of {', '.join(ENDPOINTS)}", field="endpoint")
    window = body.get("completion_window", "24h")
    hours = window[:-1] if isinstance(window, str) and window.endswith("h") else ""
    if not (hours.isascii() and hours.isdigit() and len(hours) < 4 and 1 <= int(hours) <= _MAX_WINDOW_H):
        raise InvalidRequest(f"completion_window: must be 1h to {_MAX_WINDOW_H}h", field="completion_window")
    metadata = body.get("metadata") or {}
    texts = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if not texts or len(metadata) > _MOST_METADATA:
        raise InvalidRequest(f"metadata: must be an object of at most {_MOST_METADATA} texts", field="metadata")
    return body


def _page(request: Request, everything: list[Json]) -> Json:
    """OpenAI's pages: `limit` objects behind the one with the id `after`."""
    given = request.query_params.get("limit", "20")
    if not (given.isascii() and given.isdigit() and len(given) < 6 and 1 <= int(given) <= _MOST_LISTED):
        raise InvalidRequest(f"limit: must be an integer from 1 to {_MOST_LISTED}", field="limit")
    after = request.query_params.get("after")
    start = next((i + 1 for i, one in enumerate(everything) if one["id"] == after), 0) if after else 0
    data = everything[start : start + int(given)]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": start + len(data) < len(everything)}


async def _copy(upload: UploadFile, path: Path) -> None:
    with path.open("wb") as target:
        while part := await upload.read(_COPY_BYTES):
            await asyncio.to_thread(target.write, part)


def _receiver(parts: Any) -> Callable[[], Awaitable[Any]]:
    """ASGI's receive, for the parts of a body."""

    async def receive() -> Any:
        part = await anext(parts, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    return receive
