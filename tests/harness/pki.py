"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from baton.router.params import FrontTLS


def authority(folder: Path) -> tuple[FrontTLS, Path, Path]:
    """A certificate for localhost and for a cluster with its key, the authority that made it, and the certificate."""
    folder.mkdir()

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *key, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    (folder / "san").write_text("subjectAltName=DNS:localhost,DNS:baton,IP:127.0.0.1")
    openssl("req", *key, "-subj", "/CN=localhost", "-keyout", "end.key", "-out", "end.csr")
    sign = ("x509", "-req", "-in", "end.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl(*sign, "-extfile", "san", "-out", "end.pem")
    files = FrontTLS(str(folder / "end.pem"), str(folder / "end.key"), "")
    return files, folder / "ca.pem", folder / "end.pem"
