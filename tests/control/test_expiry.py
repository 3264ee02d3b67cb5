"""Dates of certificates, read from files that openssl makes."""

import datetime as dt
import subprocess
from pathlib import Path

import pytest

from kvctl.control.certificates import Certificates, Identity, IdentityFiles, Trust, TrustFiles
from kvctl.control.expiry import authorities_end, chain_end, ends
from kvctl.settings.errors import SettingsError
from tests.proxy.authority import Authority


def made(path: Path, end: str) -> Path:
    """A certificate that ends at ``end`` (openssl's YYYYMMDDHHMMSSZ), with its key beside it."""
    key, request, names = path.with_suffix(".key"), path.with_suffix(".csr"), path.with_suffix(".db")
    names.write_text("")
    config = path.with_suffix(".cnf")
    config.write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndatabase={names}\nrand_serial=yes\ndefault_md=sha256\npolicy=p\n"
        f"new_certs_dir={path.parent}\nunique_subject=no\n[p]\ncommonName=supplied\n"
    )
    pair = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for arguments in (
        ("req", *pair, "-subj", "/CN=x", "-keyout", key, "-out", request),
        ("ca", "-config", config, "-batch", "-notext", "-selfsign", "-keyfile", key, "-in", request,
         "-startdate", "19600101000000Z", "-enddate", end, "-out", path),
    ):  # fmt: skip
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
    return path


@pytest.mark.parametrize(
    ("end", "moment"),
    [
        ("20300102030405Z", dt.datetime(2030, 1, 2, 3, 4, 5, tzinfo=dt.UTC)),
        ("19990228235959Z", dt.datetime(1999, 2, 28, 23, 59, 59, tzinfo=dt.UTC)),
        ("20500101000000Z", dt.datetime(2050, 1, 1, tzinfo=dt.UTC)),  # the longer form of a time
        ("21991231235959Z", dt.datetime(2199, 12, 31, 23, 59, 59, tzinfo=dt.UTC)),
    ],
)
def test_both_forms_of_a_time(tmp_path: Path, end: str, moment: dt.datetime) -> None:
    assert ends(made(tmp_path / "a.pem", end)) == [moment.timestamp()]


def test_a_chain_ends_with_its_first_and_authorities_with_their_last(tmp_path: Path) -> None:
    early, late = made(tmp_path / "a.pem", "20300101000000Z"), made(tmp_path / "b.pem", "20400101000000Z")
    both = tmp_path / "both.pem"
    both.write_text("some words\n" + late.read_text() + early.read_text())
    assert chain_end(both) == ends(early)[0]
    assert authorities_end(both) == ends(late)[0]


def test_what_is_no_certificate_has_no_date(tmp_path: Path) -> None:
    file = tmp_path / "x.pem"
    assert ends(file) == []
    assert chain_end(None) is None
    whole = made(tmp_path / "a.pem", "20300101000000Z").read_text()
    head, *body, foot = whole.strip().splitlines()
    for cut in (0, 1, 2, 4, len(body)):
        file.write_text("\n".join([head, *body[:cut], "MIIB", foot]))
        assert all(each == ends(tmp_path / "a.pem")[0] for each in ends(file))
    for junk in ("AAAA", "MAMCAQE=", "MIID/zCCAuegAwIBAgI=", "MIL//////////w==", "!"):
        file.write_text(f"{head}\n{junk}\n{foot}\n")
        assert authorities_end(file) is None, junk


def test_the_dates_are_those_of_the_files_in_force(tmp_path: Path) -> None:
    """A reload of good files moves them; one of bad files does not, though some of it could be read."""
    authority = Authority(tmp_path, "ours")
    pair = authority.sign("localhost")
    identity = Identity(
        IdentityFiles(certificate=pair.certificate, key=pair.key, client_ca=authority.certificate)
    )
    trust = Trust(TrustFiles(ca=authority.certificate, certificate=pair.certificate, key=pair.key))
    held = Certificates(identity, {"e": trust, "plain": Trust()})
    before = held.ends
    assert set(before) == {("listen", ""), ("client_ca", ""), ("engine_client", "e"), ("engine_ca", "e")}
    old_key = pair.key.read_bytes()
    made(pair.certificate, "20400101000000Z")
    pair.key.write_bytes(old_key)
    with pytest.raises(SettingsError):  # the key is that of the old one
        held.read()
    held.adopt()
    assert held.ends == before
    made(pair.certificate, "20400101000000Z")
    held.read()
    assert held.ends == before  # read, and not in force yet
    held.adopt()
    assert held.ends["listen", ""] == ends(pair.certificate)[0] != before["listen", ""]


def test_no_tls_has_no_dates() -> None:
    held = Certificates()
    held.read()
    held.adopt()
    assert held.ends == {}
