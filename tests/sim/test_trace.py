"""Traces as files."""

import gzip
from pathlib import Path

import pytest

from kvctl.sim.trace import TraceError, at_rate, read_trace, that_fit, window

TEXT = """t_s,input_tokens,output_tokens,client_id,parent_row,shared_prefix_tokens
0.5,100,20,7,-1,0
3.5,200,30,,0,64
1.5,300,40,8,-1,0
"""


@pytest.mark.parametrize("packed", [False, True])
def test_reads_rows_in_order_of_arrival_packed_or_not(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(TEXT.encode()) if packed else TEXT.encode())
    rows = read_trace(path)
    assert [(row.number, row.at_s, row.prompt_tokens, row.output_tokens) for row in rows] == [
        (0, 0.5, 100, 20),
        (2, 1.5, 300, 40),
        (1, 3.5, 200, 30),
    ]
    assert [row.tenant for row in rows] == ["7", "8", ""]
    assert [(row.parent, row.shared_tokens) for row in rows] == [(None, 0), (None, 0), (0, 64)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "no column t_s"),
        ("t_s,input_tokens,output_tokens\n", "no requests"),
        ("t_s,input_tokens,output_tokens\n0,5,6\n1,x,6\n", "line 3"),
        ("t_s,input_tokens,output_tokens\n0,5\n", "line 2"),
        ("t_s,input_tokens,output_tokens\n0,5,0\n", "not a request"),
        ("t_s,input_tokens,output_tokens\n0,5,6\nnan,5,6\n", "line 3: not a time: nan"),
        ("t_s,input_tokens,output_tokens\ninf,5,6\n", "line 2: not a time: inf"),
        (f"t_s,input_tokens,output_tokens\n0,5,{'6' * 200_000}\n", "line 1: field larger"),
    ],
)
def test_says_what_is_wrong_and_where(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_what_no_text_is_is_told_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\x7fELF\xd0\xd1")
    with pytest.raises(TraceError, match=r"trace\.csv, line 1: .*utf-8"):
        read_trace(path)


def test_the_mark_of_a_spreadsheet_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert len(read_trace(path)) == 3


def test_a_broken_archive_is_told(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(TEXT.encode() * 50))
    packed[20:40] = bytes(20)
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(packed)
    with pytest.raises(TraceError, match=r"trace\.csv\.gz, line"):
        read_trace(path)


def test_a_cut_archive_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(TEXT.encode() * 50)[:-12])
    with pytest.raises(TraceError, match="line"):
        read_trace(path)


def test_a_window_starts_at_zero_and_is_stretched_to_the_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TEXT)
    rows = window(read_trace(path), 1, None)
    assert [row.at_s for row in rows] == [0.0, 2.0]
    assert [row.at_s for row in at_rate(rows, 4.0)] == [0.0, 0.25]
    assert at_rate(rows, None) == rows
    assert len(that_fit(rows, 250)) == 1
    with pytest.raises(TraceError, match="none from 9"):
        window(rows, 9, 5)
