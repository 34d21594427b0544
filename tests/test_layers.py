"""Who may import whom: reads every module's imports and names the line that breaks a rule."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ALLOWED = {
    "proto": set(),
    "kernels": set(),
    "client": {"proto"},
    "text": {"proto"},
    "engine": {"proto", "kernels", "text"},
    "kv_transfer": {"proto", "kernels"},
    "router": {"proto", "text"},
    "vllm_engine": {"proto", "text", "router"},
    "prefill_worker": {"engine", "kv_transfer", "text", "proto"},
    "decode_worker": {"engine", "kv_transfer", "text", "proto"},
    "cluster": {
        "proto",
        "client",
        "kernels",
        "text",
        "engine",
        "kv_transfer",
        "router",
        "prefill_worker",
        "decode_worker",
        "vllm_engine",
    },
}
ONLY_IN = {"ray": "cluster/launcher_ray.py", "triton": "kernels/"}


def _modules() -> Iterator[tuple[str, Path]]:
    for room in ALLOWED:
        for path in sorted((ROOT / room).rglob("*.py")):
            if "_pb2" not in path.name:
                yield room, path


def _imported_rooms(room: str, path: Path, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Rooms of ours that an import statement reaches; the statement's own room included."""
    depth = len(path.relative_to(ROOT).parts) - 1  # 1 = directly in the room
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("baton."))
    elif node.level == 0:
        if (node.module or "").startswith("baton"):
            parts = (node.module or "").split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
    elif node.level <= depth:
        yield room
    elif node.level == depth + 1:
        yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
    else:
        yield "above the package"


def _third_party(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    return [(node.module or "").split(".")[0]] if node.level == 0 else []


def _violations() -> Iterator[str]:
    for room, path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            file = str(path.relative_to(ROOT))
            where = f"{file}:{node.lineno}"
            for target in _imported_rooms(room, path, node):
                if target != room and target not in ALLOWED[room] and target != "__version__":
                    yield f"{where}: {room} may not import {target}"
            for name in _third_party(node):
                if not file.startswith(ONLY_IN.get(name, "")):
                    yield f"{where}: {name} may be imported in {ONLY_IN[name]} only"
                if name == "baton":
                    yield f"{where}: inside the package imports are relative"


def test_imports_run_downwards() -> None:
    assert list(_violations()) == []


def test_no_init_below_the_root() -> None:
    below = [str(p.relative_to(ROOT)) for room in ALLOWED for p in (ROOT / room).rglob("__init__.py")]
    assert below == []


def test_no_pickle_in_the_product() -> None:
    """Network bytes are never unpickled, so the product does not import pickle at all."""
    banned = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for _, path in _modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom) and banned & set(_third_party(node))
    ]
    assert found == []
