from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any


class Certificates:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca, ca_key = folder / "ca.pem", folder / "ca.key"
        self.certificate, self.key = folder / "one.pem", folder / "one.key"
        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self._openssl("req", "-x509", *new, "-keyout", ca_key, "-out", self.ca, "-days", "2", "-subj", "/CN=ca")
        names = folder / "names"
        names.write_text("subjectAltName=DNS:worker.decant,IP:127.0.0.1")
        request = folder / "one.csr"
        self._openssl("req", *new, "-keyout", self.key, "-out", request, "-subj", "/CN=one")
        signed = ("-CA", self.ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", names)
        self._openssl("x509", "-req", "-in", request, *signed, "-out", self.certificate)

    @staticmethod
    def _openssl(*arguments: Any) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
