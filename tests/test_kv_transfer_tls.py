"""TLS on links: both ends prove themselves; plain against TLS, foreign certificates and bad files are told clearly."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import which

import pytest
from baton.kv_transfer.events import FirstTokensArrived, ReceiveFailed, SendFailed, Sent
from baton.kv_transfer.params import TLSFiles, TransferParams
from baton.kv_transfer.sender import Sender
from baton.proto.errors import ConfigError, Incompatible
from baton.tests.harness.kv_raw_peer import PROMPT, SHAPE
from baton.tests.harness.kv_rig import LEG, PARAMS, Events, FastStore, TensorStore, layout, rig

pytestmark = pytest.mark.skipif(which("openssl") is None, reason="needs the openssl command to make certificates")

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def _authority(folder: Path) -> TLSFiles:
    """An authority, and a certificate of it for a rank."""
    folder.mkdir()
    _openssl(folder, "req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca")
    _openssl(folder, "req", *_KEY, "-keyout", "rank.key", "-out", "rank.csr", "-subj", "/CN=rank")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    _openssl(folder, "x509", "-req", "-in", "rank.csr", *signing, "-out", "rank.pem")
    return TLSFiles(*(str(folder / name) for name in ("rank.pem", "rank.key", "ca.pem")))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TransferParams:
    return replace(PARAMS, transport="auto", tls=_authority(tmp_path_factory.mktemp("tls") / "ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> TransferParams:
    return replace(PARAMS, transport="auto", tls=_authority(tmp_path_factory.mktemp("tls") / "theirs"))


def _seen_by_proxy(pair_address: str, spoken: list[bytes]) -> Callable[[], tuple[str, Callable[[], None]]]:
    """Makes a forwarder that keeps what went through it."""

    def start() -> tuple[str, Callable[[], None]]:
        listener = socket.create_server(("127.0.0.1", 0))

        def pump(source: socket.socket, target: socket.socket) -> None:
            with suppress(OSError):  # either end may go first
                while data := source.recv(65536):
                    spoken.append(data)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            near, _ = listener.accept()
            host, port = pair_address.split(":")
            with near, socket.create_connection((host, int(port))) as far:
                back = threading.Thread(target=pump, args=(far, near), daemon=True)
                back.start()
                pump(near, far)
                back.join(10)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()

        def stop() -> None:
            thread.join(10)
            listener.close()

        return f"127.0.0.1:{listener.getsockname()[1]}", stop

    return start


def test_everything_goes_through_tls_and_nothing_shows(ours: TransferParams) -> None:
    shape = layout([(0, 2)], head_dim=64, block_size=16)
    spoken: list[bytes] = []
    with rig(shape, shape, replace(ours, frame_bytes=1 << 16), store=FastStore, tokens=256) as pair:
        address, stop = _seen_by_proxy(pair.receivers[0].address, spoken)()
        issued = pair.book.issue(
            LEG,
            worker_id="decode-0",
            incarnation="one",
            layout=shape,
            addresses=(address,),
            cached_tokens=0,
            prompt_tokens=256,
            carrier="inline",
            lifetime_s=60.0,
        )
        pair.receivers[0].expect(LEG, issued.nonce, pair.target_blocks(256), (0, 256))
        pair.open(LEG, issued, 256, pair.source_blocks(256))
        pair.computed(LEG, (0, 256), (0, 4))
        pair.senders[0].finish(LEG, b"the first tokens")
        pair.sent[0].wait(Sent)
        pair.received[0].wait(FirstTokensArrived)
        pair.assert_equal(256)
        pair.senders[0].close()
        stop()
        heard = b"".join(spoken)
        assert len(heard) > pair.sources[0].data[:, :, :16].nbytes
        for secret in (b"decode-0", b"the first tokens", b"frame"):
            assert secret not in heard


@pytest.mark.parametrize("secure", ["prefill", "decode"])
def test_plain_against_tls_is_refused_clearly_and_soon(secure: str, ours: TransferParams) -> None:
    patient = [replace(params, connect_timeout_s=20.0, frame_timeout_s=20.0) for params in (ours, PARAMS)]
    prefill, decode = patient if secure == "prefill" else patient[::-1]
    with rig(SHAPE, SHAPE, prefill, decode_params=decode) as pair:
        began = time.monotonic()
        pair.send(LEG, PROMPT)
        error = pair.sent[0].wait(SendFailed)[0].error
        assert time.monotonic() - began < 10.0
        assert "TLS" in error.message
        assert "kv.tls" in error.message
        if secure == "decode":
            assert isinstance(error, Incompatible)
        assert not pair.received[0].seen


def test_a_certificate_of_another_authority_is_refused_by_either_end(
    ours: TransferParams, theirs: TransferParams
) -> None:
    assert ours.tls is not None
    assert theirs.tls is not None
    stranger = replace(ours, tls=replace(theirs.tls, ca=ours.tls.ca))  # believes us, and is not believed
    for prefill, decode in ((ours, theirs), (stranger, ours), (ours, stranger)):
        with rig(SHAPE, SHAPE, prefill, decode_params=decode) as pair:
            pair.send(LEG, PROMPT)
            message = pair.sent[0].wait(SendFailed)[0].error.message
            assert "certificate" in message.lower() or "unknown_ca" in message.lower() or "tls" in message.lower()
            assert pair.targets[0].writes == 0
            assert not pair.received[0].seen


def test_a_silent_stranger_at_a_tls_door_holds_up_nobody(ours: TransferParams) -> None:
    with rig(SHAPE, SHAPE, ours) as pair:
        host, port = pair.receivers[0].address.split(":")
        with socket.create_connection((host, int(port))) as half, socket.create_connection((host, int(port))):
            half.sendall(b"\x16\x03\x01")
            pair.send(LEG, PROMPT)
            pair.sent[0].wait(Sent)
            pair.assert_equal(PROMPT)
            assert not pair.received[0].of(ReceiveFailed)


def test_a_file_that_cannot_be_used_is_told_before_anything_starts(ours: TransferParams, tmp_path: Path) -> None:
    assert ours.tls is not None
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for name in ("certificate", "key", "ca"):
        params = replace(ours, tls=replace(ours.tls, **{name: str(wrong)}))
        with pytest.raises(ConfigError, match=r"kv\.tls: .*wrong\.pem"):
            Sender(params, TensorStore(SHAPE, 0, 1), SHAPE, 0, Events())
