"""Files and batches on disk, in one folder: what survives a restart. Everything here blocks.

    files/ID.json   OpenAI's File object        files/ID.data   its content
    batches/ID.json OpenAI's Batch object       batches/ID.stop exists: it is to be cancelled
                                                batches/ID.lock locked: a router runs it

Objects are replaced as a whole, so a crash leaves the old one or the new one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..proto.errors import Exhausted, InvalidRequest
from .errors import NoSuchPath

Json = dict[str, Any]
_ID = re.compile(r"(file|batch)[-_][0-9a-f]{24}")


class BatchStore:
    """A folder, made where it is missing. `most`: files, and batches, that are kept at the same time."""

    def __init__(self, folder: Path, most: int) -> None:
        """Raises OSError."""
        self._files, self._batches = folder / "files", folder / "batches"
        self._most = most
        for part in (self._files, self._batches):
            part.mkdir(parents=True, exist_ok=True)

    # ---- files -----------------------------------------------------------------------------------------------------

    def new_file(self, filename: str, purpose: str, size: int = 0) -> Json:
        """A File object whose content is to be put at `data_path`. Raises Exhausted when there are too many."""
        self._check_room(self._files, "files")
        described = {
            "id": f"file-{secrets.token_hex(12)}",
            "object": "file",
            "bytes": size,
            "created_at": int(time.time()),
            "expires_at": None,
            "filename": filename[:256],
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        self.data_path(str(described["id"])).touch()
        self._write(self._files / f"{described['id']}.json", described)
        return described

    def file(self, file_id: str) -> Json:
        """Raises NoSuchPath."""
        described = self._read(self._files, file_id, "file")
        return {**described, "bytes": self.data_path(file_id).stat().st_size}

    def files(self) -> list[Json]:
        """The newest first."""
        return sorted(self._all(self._files), key=lambda one: -int(one["created_at"]))

    def data_path(self, file_id: str) -> Path:
        """Where the content is. `file_id`: of a File object."""
        return self._files / f"{file_id}.data"

    def delete_file(self, file_id: str) -> None:
        """Raises NoSuchPath; InvalidRequest while a batch that is not over uses it."""
        self.file(file_id)
        for batch in self.batches():
            if not batch_over(batch) and file_id in (batch["input_file_id"], *outputs_of(batch)):
                raise InvalidRequest(f"file_id: {batch['id']} uses {file_id}", field="file_id")
        self.data_path(file_id).unlink(missing_ok=True)
        (self._files / f"{file_id}.json").unlink(missing_ok=True)

    # ---- batches ---------------------------------------------------------------------------------------------------

    def new_batch(self, source: Json, endpoint: str, window: str, seconds: int, metadata: Json | None) -> Json:
        """A Batch object, in place of the oldest that is over where there are too many. Raises Exhausted."""
        self._forget_oldest()
        self._check_room(self._batches, "batches")
        now = int(time.time())
        moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        batch: Json = {
            "id": f"batch_{secrets.token_hex(12)}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": source["id"],
            "completion_window": window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + seconds,
            **{f"{moment}_at": None for moment in moments},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        self.save(batch)
        return batch

    def batch(self, batch_id: str) -> Json:
        """Raises NoSuchPath."""
        return self._read(self._batches, batch_id, "batch")

    def batches(self) -> list[Json]:
        """The newest first."""
        return sorted(self._all(self._batches), key=lambda one: -int(one["created_at"]))

    def save(self, batch: Json) -> None:
        """Raises OSError."""
        self._write(self._batches / f"{batch['id']}.json", batch)

    def claim(self, batch_id: str) -> int | None:
        """A descriptor that keeps other routers off this batch until it is closed; None: another one has it."""
        descriptor = os.open(self._batches / f"{batch_id}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def ask_to_stop(self, batch_id: str) -> Json:
        """The batch, with `cancelling` as its status unless it is over. Raises NoSuchPath."""
        batch = self.batch(batch_id)
        if batch_over(batch):
            raise InvalidRequest(f"batch_id: {batch_id} is {batch['status']}", field="batch_id")
        (self._batches / f"{batch_id}.stop").touch()
        return {**batch, "status": "cancelling", "cancelling_at": int(time.time())}

    def is_to_stop(self, batch_id: str) -> bool:
        """Whether somebody asked for it."""
        return (self._batches / f"{batch_id}.stop").exists()

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _forget_oldest(self) -> None:
        known = self.batches()
        over = [batch for batch in known if batch_over(batch)]
        if len(known) >= self._most and over:
            for path in self._batches.glob(f"{over[-1]['id']}.*"):
                path.unlink(missing_ok=True)

    def _check_room(self, folder: Path, what: str) -> None:
        if sum(1 for _ in folder.glob("*.json")) >= self._most:
            raise Exhausted(f"{self._most} {what} are kept already; delete some", retry_after_s=60.0)

    def _read(self, folder: Path, name: str, what: str) -> Json:
        path = folder / f"{name}.json"
        if not _ID.fullmatch(name) or not path.exists():
            raise NoSuchPath(f"no {what} {name!r:.100}", field=f"{what}_id")
        return dict(json.loads(path.read_bytes()))

    def _all(self, folder: Path) -> Iterator[Json]:
        for path in folder.glob("*.json"):
            yield self._read(folder, path.stem, "file")

    def _write(self, path: Path, value: Json) -> None:
        beside = path.with_suffix(f".{secrets.token_hex(4)}.part")
        with beside.open("w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)


def batch_over(batch: Json) -> bool:
    """Whether nothing more happens to it."""
    return batch["status"] in ("completed", "failed", "expired", "cancelled")


def outputs_of(batch: Json) -> tuple[str, ...]:
    """The files that it writes."""
    return tuple(name for name in (batch["output_file_id"], batch["error_file_id"]) if name)
