"""An authority of certificates for tests, made on the fly by openssl."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass(frozen=True)
class Pair:
    """A chain and its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; ``certificate`` is what those who believe it have."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.certificate, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        _openssl(
            *("req", "-x509", *_EC, "-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-keyout", self._key, "-out", self.certificate),
        )

    def sign(self, name: str, pass_phrase: str = "") -> Pair:
        """A certificate for ``name`` and both loopback addresses."""
        made = self._folder / f"{self._name}-{name}"
        pair = Pair(made.with_suffix(".pem"), made.with_suffix(".key"))
        request, names = made.with_suffix(".csr"), made.with_suffix(".ext")
        names.write_text(f"subjectAltName=DNS:{name},IP:127.0.0.1,IP:::1\n")
        secrecy = ("-passout", f"pass:{pass_phrase}") if pass_phrase else ("-nodes",)
        _openssl(
            *("req", *_EC, *secrecy, "-subj", f"/CN={name}", "-keyout", pair.key, "-out", request),
        )
        if pass_phrase:
            secrecy = ("-passin", f"pass:{pass_phrase}")
        _openssl(
            *("x509", "-req", "-days", "2", "-CAcreateserial", "-CA", self.certificate, "-CAkey", self._key),
            *("-in", request, "-out", pair.certificate, "-extfile", names),
        )
        return pair
