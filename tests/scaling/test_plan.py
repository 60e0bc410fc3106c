"""Points are what was asked for, and rows come back from their file as they went in."""

from dataclasses import fields

import pytest

from lin_attn.scaling.plan import COLUMNS, Point, Row, parse_bytes, parse_lengths, points, read_rows, row_of, write_rows

SAME = {"level": "op", "device": "cpu", "dtype": "float32", "heads": 2, "head_dim": 16}


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("256:2048", [256, 512, 1024, 2048]),
        ("256:2047", [256, 512, 1024]),
        ("3:24", [3, 6, 12, 24]),
        ("7:7", [7]),
        ("1:4", [1, 2, 4]),
        ("256,1000,4096", [256, 1000, 4096]),
        ("5", [5]),
    ],
)
def test_lengths_double_or_stand_as_written(text, lengths):
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", "a", "256:", "512:256", "0:4", "0", "4,2", "4,4", "1:2:3", "-4", "4,", "2.5"])
def test_other_lengths_are_refused_by_name(text):
    with pytest.raises(ValueError, match=rf"lengths are '{text}'; wanted FIRST:LAST"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2G", 2**31), ("500M", 500 * 2**20), ("1.5GiB", 3 * 2**29), ("7", 7), ("7B", 7), ("4k", 4096), ("1TB", 2**40)],
)
def test_bytes_are_powers_of_1024(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "2X", "1e9", "2 G G"])
def test_other_sizes_are_refused_by_name(text):
    with pytest.raises(ValueError, match=f"size is '{text}'; wanted a number of bytes"):
        parse_bytes(text)


def test_points_go_by_length_and_keep_the_tokens_of_a_batch():
    made = points(
        mechanisms=["linear", "softmax-math"],
        phases=["train"],
        lengths=[8, 16],
        tokens=32,
        backend="chunked",
        **SAME,
    )
    assert [(p.mechanism, p.backend, p.length, p.batch) for p in made] == [
        ("linear", "chunked", 8, 4),
        ("softmax-math", "math", 8, 4),
        ("linear", "chunked", 16, 2),
        ("softmax-math", "math", 16, 2),
    ]
    with pytest.raises(ValueError, match="tokens per batch are 32; wanted a multiple of every length, and 12"):
        points(mechanisms=["linear"], phases=["train"], lengths=[12], tokens=32, **SAME)
    with pytest.raises(ValueError, match="batch is 0; wanted at least 1"):
        points(mechanisms=["linear"], phases=["train"], lengths=[12], batch=0, **SAME)
    with pytest.raises(ValueError, match="head_dim is 15; wanted an even number"):
        points(mechanisms=["linear"], phases=["train"], lengths=[12], **{**SAME, "head_dim": 15})


def test_rows_come_back_as_they_went_in(tmp_path):
    [point] = points(mechanisms=["linear"], phases=["train"], lengths=[8], **SAME)
    rows = [
        row_of(point, "ok", seconds_median=1 / 3, seconds_q1=1e-7, seconds_q3=2.0, peak_bytes=0, repeats=5),
        row_of(point, "crash", detail='ended by SIGSEGV: "a, b"\nand more'),
    ]
    path = tmp_path / "scaling.csv"
    write_rows(path, rows[:1])
    write_rows(path, rows[1:])
    assert read_rows(path) == rows
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert list(rows[0].as_dict()) == list(COLUMNS) == [field.name for field in fields(Row)]
    assert set(COLUMNS[: COLUMNS.index("status")]) <= {field.name for field in fields(Point)}


def test_a_file_of_another_kind_is_refused_by_line(tmp_path):
    path = tmp_path / "scaling.csv"
    [point] = points(mechanisms=["linear"], phases=["train"], lengths=[8], **SAME)
    write_rows(path, [row_of(point, "ok")])
    text = path.read_text()
    path.write_text(text.replace(",8,ok", ",eight,ok"))
    with pytest.raises(ValueError, match="line 2: length is 'eight'; wanted a number"):
        read_rows(path)
    path.write_text(text.replace(",ok", ",fine"))
    with pytest.raises(ValueError, match="line 2: status is 'fine'; wanted one of ok"):
        read_rows(path)
    path.write_text("length,seconds\n1,2\n")
    with pytest.raises(ValueError, match="has the columns length, seconds; wanted mechanism"):
        read_rows(path)
