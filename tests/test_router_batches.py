"""/v1/files and /v1/batches with scripted workers: whole runs, refusals, cancel, and a router that restarts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from baton.proto import worker_pb2 as pb
from baton.router.params import BatchParams, TenantParams
from baton.router.tenants import key_hash, salted
from baton.tests.harness.router_rig import RouterRig, router_rig

CHAT = "/v1/chat/completions"


def line(number: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {number}"}]
    return {"custom_id": f"q{number}", "method": "POST", "url": CHAT, "body": {"messages": messages, **body}}


def params(folder: Path, files: int = 8, parallelism: int = 3) -> BatchParams:
    return BatchParams(folder=str(folder), files=files, file_bytes=1 << 16, parallelism=parallelism)


async def upload(http: httpx.AsyncClient, lines: list[Any]) -> str:
    text = "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines)
    answer = await http.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["bytes"] == len(text)
    return str(answer.json()["id"])


async def start(rig: RouterRig, lines: list[Any]) -> str:
    body = {"input_file_id": await upload(rig.http, lines), "endpoint": CHAT, "completion_window": "24h"}
    answer = await rig.http.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def ended(rig: RouterRig, batch_id: str) -> dict[str, Any]:
    for _ in range(500):
        batch = (await rig.http.get(f"/v1/batches/{batch_id}")).json()
        if batch["status"] in ("completed", "failed", "cancelled", "expired"):
            return dict(batch)
        await asyncio.sleep(0.02)
    raise AssertionError(batch)


async def content(rig: RouterRig, file_id: str) -> list[dict[str, Any]]:
    answer = await rig.http.get(f"/v1/files/{file_id}/content")
    return [json.loads(text) for text in answer.text.splitlines()]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


async def test_every_line_is_answered_once_and_errors_have_a_file_of_their_own(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0", batches=params(tmp_path / "kept")) as rig:
        bad = [{**line(90), "method": "GET"}, "no json\n", line(91, temperature=9), line(3)]
        batch = await ended(rig, await start(rig, [*(line(n, max_tokens=4) for n in range(10)), *bad]))
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 14, "completed": 10, "failed": 4}
        answers = await content(rig, batch["output_file_id"])
        assert sorted(one["custom_id"] for one in answers) == sorted(f"q{n}" for n in range(10))
        assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in answers)
        errors = {one["custom_id"]: one for one in await content(rig, batch["error_file_id"])}
        assert set(errors) == {"q90", None, "q91", "q3"}
        assert errors["q91"]["response"]["body"]["error"]["param"] == "temperature"
        listed = (await rig.http.get("/v1/batches", params={"limit": "1"})).json()
        assert [one["id"] for one in listed["data"]] == [batch["id"]]
        assert not listed["has_more"]
        assert len((await rig.http.get("/v1/files")).json()["data"]) == 3


async def test_a_batch_goes_on_after_the_router_restarts(tmp_path: Path) -> None:
    kept = params(tmp_path / "kept", parallelism=1)
    async with router_rig(tmp_path / "one", "prefill-0", "decode-0", batches=kept) as rig:
        rig.cluster["decode-0"].step_s = 0.02
        batch_id = await start(rig, [line(n) for n in range(12)])
        for _ in range(500):
            first = (await rig.http.get(f"/v1/batches/{batch_id}")).json()
            if first["output_file_id"] and len(await content(rig, first["output_file_id"])) >= 3:
                break
            await asyncio.sleep(0.02)
        rig.stop.set()
        assert rig.task is not None
        await rig.task
        done = _lines(tmp_path / "kept" / "files" / f"{first['output_file_id']}.data")
        assert 3 <= len(done) < 12
    with (tmp_path / "kept" / "files" / f"{first['output_file_id']}.data").open("ab") as file:
        file.write(b'{"id": "batch_req_12')  # a line that was cut off
    async with router_rig(tmp_path / "two", "prefill-0", "decode-0", batches=kept) as rig:
        batch = await ended(rig, batch_id)
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        answers = await content(rig, batch["output_file_id"])
        assert [one["custom_id"] for one in answers] == [f"q{n}" for n in range(12)]
        assert answers[: len(done)] == done
        assert batch["error_file_id"] is None


async def test_a_batch_is_cancelled(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0", batches=params(tmp_path / "kept", parallelism=1)) as rig:
        rig.cluster["decode-0"].step_s = 0.02
        batch_id = await start(rig, [line(n) for n in range(30)])
        answer = await rig.http.post(f"/v1/batches/{batch_id}/cancel")
        assert answer.json()["status"] == "cancelling"
        batch = await ended(rig, batch_id)
        assert batch["status"] == "cancelled"
        assert batch["request_counts"]["completed"] < 30
        again = await rig.http.post(f"/v1/batches/{batch_id}/cancel")
        assert again.status_code == 400


async def test_what_cannot_be_taken_is_refused(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0", batches=params(tmp_path / "kept", files=2)) as rig:
        http = rig.http
        large = await http.post("/v1/files", files={"file": ("x", b"x" * (1 << 17))}, data={"purpose": "batch"})
        assert large.status_code == 413
        for data, files, param in (
            ({"purpose": "batch"}, {"other": ("x", b"x")}, "file"),
            ({"purpose": "vision"}, {"file": ("x", b"x")}, "purpose"),
        ):
            refused = await http.post("/v1/files", files=files, data=data)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await http.post("/v1/files", json={})).json()["error"]["param"] == "file"
        torn = await http.post("/v1/files", content=b"--x", headers={"content-type": "multipart/form-data"})
        assert torn.status_code == 400
        known = await upload(http, [line(1)])
        for body, param in (
            ({"endpoint": CHAT}, "input_file_id"),
            ({"input_file_id": known, "endpoint": "/v1/embeddings"}, "endpoint"),
            ({"input_file_id": known, "endpoint": CHAT, "completion_window": "soon"}, "completion_window"),
            ({"input_file_id": known, "endpoint": CHAT, "metadata": {"a": 1}}, "metadata"),
            ({"input_file_id": known, "endpoint": CHAT, "window": 1}, "window"),
        ):
            refused = await http.post("/v1/batches", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        for path in (
            "/v1/files/file-0",
            "/v1/files/../../etc",
            "/v1/batches/batch_" + "0" * 24,
            f"/v1/batches/{known}",
        ):
            assert (await http.get(path)).status_code == 404
        assert (await http.get("/v1/files", params={"limit": "-1"})).json()["error"]["param"] == "limit"
        await upload(http, [line(1)])
        full = await http.post("/v1/files", files={"file": ("x", b"x")}, data={"purpose": "batch"})
        assert full.status_code == 429
        assert (await http.delete(f"/v1/files/{known}")).json()["deleted"]
        assert (await http.get(f"/v1/files/{known}")).status_code == 404
        wrong = await ended(rig, await start(rig, [{**line(1), "url": "/v1/completions"}]))
        assert wrong["status"] == "failed"
        assert "line 1" in wrong["errors"]["data"][0]["message"]


async def test_batches_are_off_unless_they_have_a_folder(tmp_path: Path) -> None:
    async with router_rig(tmp_path, "prefill-0", "decode-0") as rig:
        answer = await rig.http.get("/v1/files")
        assert answer.status_code == 404
        assert "router.batches.folder" in answer.json()["error"]["message"]


async def test_tenants_see_and_run_only_their_own(tmp_path: Path) -> None:
    names = ("alice", "bob")
    tenants = tuple(TenantParams(name, (key_hash(name),), 1.0, None, None) for name in names)
    options: dict[str, Any] = {"batches": params(tmp_path / "kept", files=3), "tenants": tenants}
    async with router_rig(tmp_path, "prefill-0", "decode-0", **options) as rig:
        salts: list[str] = []
        said = rig.cluster.script

        def script(leg: pb.Leg, choice: int, index: int) -> int:
            salts.append(leg.cache_salt)
            return said(leg, choice, index)

        rig.cluster.script = script
        rig.http.headers["authorization"] = "Bearer alice"
        batch = await ended(rig, await start(rig, [line(1), line(2)]))
        assert batch["request_counts"]["completed"] == 2
        assert set(salts) == {salted(tenants[0], "")}
        rig.http.headers["authorization"] = "Bearer bob"
        for path in ("/v1/files", "/v1/batches"):
            assert (await rig.http.get(path)).json()["data"] == []
        for name in ("input_file_id", "output_file_id"):
            file = f"/v1/files/{batch[name]}"
            answers = [await rig.http.get(file), await rig.http.get(file + "/content"), await rig.http.delete(file)]
            assert [answer.status_code for answer in answers] == [404] * 3
        body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        others = f"/v1/batches/{batch['id']}"
        answers = [await rig.http.post("/v1/batches", json=body), await rig.http.get(others)]
        answers.append(await rig.http.post(others + "/cancel"))
        assert [answer.status_code for answer in answers] == [404] * 3
        for _ in range(3):  # alice's files take none of bob's room
            await upload(rig.http, [line(1)])
        del rig.http.headers["authorization"]
        assert (await rig.http.get("/v1/files")).status_code == 401
