"""Files of separated cells: what RFC 4180 allows is read as pandas reads it, and no quote swallows rows."""

from __future__ import annotations

import csv
import itertools
import json
import random
import string

import pandas
import pytest

from hf_minbert.data.delimited import read_cells
from hf_minbert.data.files import read_rows
from hf_minbert.errors import MinBertError
from hf_minbert.settings.tasks import DataFile, Task

TASK = Task("mood", "binary", ("text",), labels=("bad", "good"))
WORDS = [
    "the", "film", "was", ",", ";", ".", "!", "5", "1,000", "#new", "@me", "yes,", "no", "\t", "Neutral",
    'so ""good"" it', '"quoted"', "café",
]  # fmt: skip


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def tweet(draw: random.Random) -> str:
    """A text that holds a line break one time in three."""
    if draw.random() > 1 / 3:
        return sentence(draw, draw.randint(1, 30))
    lines = [sentence(draw, draw.randint(0, 15)) for _ in range(draw.randint(2, 6))]
    return draw.choice(["\n", "\r\n", "\r", "\n\n"]).join(lines)


def of_tweets(draw: random.Random, rows: int) -> list[list[str]]:
    moods = ["Positive", "Negative", "Neutral", "Extremely Positive", "Extremely Negative"]
    header = ["UserName", "ScreenName", "Location", "TweetAt", "OriginalTweet", "Sentiment"]
    found = []
    for number in range(rows):
        place, day = draw.choice(["", "London, UK", "a\nb", "NYC"]), f"{draw.randint(1, 30):02}-03-2020"
        found.append([str(number), str(number + 44953), place, day, tweet(draw), draw.choice(moods)])
    return [header, *found]


def of_messages(draw: random.Random, rows: int) -> list[list[str]]:
    """As the SMS spam collection: nameless columns at the end, and two cells with a break, one a lone `\\r`."""
    found = [["v1", "v2", "", "", ""]]
    found += [[draw.choice(["ham", "spam"]), sentence(draw, 12), "", "", ""] for _ in range(rows)]
    found[17][1], found[400][1] = 'he said "call\rme", now', "one\r\n\r\ntwo"
    return found


@pytest.fixture
def write(tmp_path):
    """`write(content, name)` makes a file and gives its path."""

    def make(content: str, name: str = "rows.csv"):
        path = tmp_path / name
        path.write_bytes(content.encode())
        return path

    return make


def write_csv(path, rows, **options):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows(rows)
    return path


def cells(path, **options) -> list[list[str]]:
    return [row for _, row in read_cells(path, **options)]


def of_pandas(path, **options) -> list[list[str]]:
    return pandas.read_csv(path, header=None, dtype=str, keep_default_na=False, **options).to_numpy().tolist()


# ---- Line breaks inside cells


@pytest.mark.parametrize(("make", "size"), [(of_tweets, 3798), (of_messages, 5572)])
@pytest.mark.parametrize("options", [{}, {"quoting": csv.QUOTE_ALL, "lineterminator": "\n"}, {"delimiter": ";"}])
def test_rows_are_those_of_pandas(tmp_path, make, size, options):
    rows = make(random.Random(7), size)
    path = write_csv(tmp_path / "rows.csv", rows, **options)
    found = cells(path)
    assert found == rows and len(found) == size + 1
    assert found == of_pandas(path, sep=options.get("delimiter", ","))


def test_the_rows_of_a_task_and_of_an_input(tmp_path, caplog):
    rows = of_tweets(random.Random(3), 300)
    path = write_csv(tmp_path / "rows.csv", rows)
    task = Task("mood", "classes", ("OriginalTweet",), "Sentiment", labels=(*sorted({row[5] for row in rows[1:]}),))
    texts = [" ".join(row[4].split()) for row in rows[1:]]
    found = read_rows(path, task, labelled=True)
    full = [number for number, text in enumerate(texts) if text]
    assert [" ".join(row["OriginalTweet"].split()) for row in found] == [texts[number] for number in full]
    assert [task.labels[row["label"]] for row in found] == [rows[number + 1][5] for number in full]
    assert not any(set("\r\n") & set(row["OriginalTweet"]) for row in found)
    found = read_rows(path, task, labelled=False)
    assert [" ".join(row["OriginalTweet"].split()) for row in found] == texts
    broken = sum(any(set("\r\n") & set(cell) for cell in row) for row in rows)
    line = next(number for number, text in enumerate(path.read_text().split("\n"), 1) if text.count('"') % 2)
    said = [message for message in caplog.messages if "line breaks" in message]
    assert len(said) == 1, "read twice, said once"
    assert said[0].startswith(f"{path}: line breaks inside cells in {broken} of 300 rows, the first at line {line}.")


def test_a_line_break_in_the_name_of_a_column_is_a_space(write):
    path = write('id,"my\r\ntext"\n1,a\n2,b\n')
    assert [row["text"] for row in read_rows(path, TASK, labelled=False, columns={"text": "my text"})] == ["a", "b"]


def test_the_place_of_an_error_counts_lines(write):
    path = write('text,label\n"two\nlines",good\n"three\n\nlines",bad\nx,fine\n')
    with pytest.raises(MinBertError, match=r"rows\.csv, line 7: a label .*Found 'fine'"):
        read_rows(path, TASK, labelled=True)


FIVE = [
    'text,label\n"Hello,\nworld",good\nfine,bad\n"a ""b""\rc",good\nx,bad\ny,good\n',
    'text,label\r\n"one, two\r\nthree, four, five",good\r\nfine,bad\r\n"a\r\rb",good\r\nx,bad\r\ny,good\r\n',
    'id,text\na1,"Hello\nworld, bye"\na2,b\na3,"no,\n\nyes"\na4,d\na5,e\n',
    'text;label\n"good; really\nso";good\nx;bad\n"a\nb";bad\ny;bad\nz;bad\n',
    '"text"\n"good\nfilm"\n"x"\n"y\nz"\n"so"\n"so so"\n',
    'id,text\n1,"list:\n2,he ""said"" so\n3,x"\n4,b\n5,"c\nd,e"\n6,d\n7,e\n',
    'id,text\na1,"Hello\nworld, bye"\na2,"\nx"\na3,b\na4,c\na5,d\n',
    'id,"my\ntext",label\n1,a,0\n2,"b\nc",1\n3,d,0\n4,"e\n\nf",1\n5,g,0\n',
]


@pytest.mark.parametrize("content", FIVE)
def test_small_files(write, content):
    path = write(content)
    found = cells(path)
    assert len(found) == 6
    assert found == of_pandas(path, sep=";" if ";" in content.split("\n")[0] else ",")


# ---- Quotes that swallow rows

SWALLOWED = {
    "the rows between": 'id,text,label\n1,"a b,1\n2,c d,0\n3,e",1\n4,f,0\n',
    "labels that are words": 'id,text,label\n1,"a b,good\n2,c d,bad\n3,e",good\n4,f,bad\n',
    "the next row": 'id,text,label\n1,"a b,1\n2,c d",0\n4,f,0\n',
    "tabs": 'id\ttext\tlabel\n1\t"a b\t1\n2\tc d\t0\n3\te"\t1\n4\tf\t0\n',
    "semicolons": 'id;text;label\n1;"a b;1\n2;c d;0\n3;e";1\n4;f;0\n',
    "the text comes last": 'label,text\n1,"a b\n0,c d\n1,e"\n0,f\n',
    "the text comes first": 'text,label\n"a b,1\nc d,0\ne",1\nf,0\n',
    "no labels": 'id,text\n1,"a b\n2,c d\n3,e"\n4,f\n',
    "one column": 'text\n"I came.\nI saw.\nI won."\nfine\n',
    "one column, two rows": 'text\nfine\n"I came.\nI saw."\n',
    "a blank cell in quotes": 'id,text,label\n1,"a b,1\n2,"",0\n3,e",1\n4,f,0\n',
    "to the end": 'id,text,label\n4,f,0\n1,"a b,1\n2,c d,0\n3,e",1\n',
    "all rows": 'id,text,label\n1,"a b,1\n2,c d,0\n3,e",1\n',
    "a broken row among them": 'id,text,label\n1,"a b,1\n2,c d,0\nbroken\n3,e",1\n4,f,0\n',
    "short texts elsewhere": 'id,text,label\n1,"a b,1\n2,c d,0\n3,e",1\n4,f,0\n5,g,1\n6,h,1\n7,i,0\n',
    "numbers": 'id,code\n1,"10\n2,20"\n3,30\n4,40\n5,50\n',
    "a broken first row": 'id,text,label\n1,"a b\n2,c d,0\n3,e",1\n4,f,0\n',
    "in the header": 'text,label,"note\na,1,x\nb,0,y"\nc,1,z\nd,0,z\n',
    "carriage returns": 'id,text,label\r\n1,"a b,1\r\n2,c d,0\r\n3,e",1\r\n4,f,0\r\n',
}


@pytest.mark.parametrize("name", SWALLOWED)
def test_a_quote_that_swallows_rows_is_refused(write, name):
    path = write(SWALLOWED[name])
    separator = next(mark for mark in "\t;," if mark in SWALLOWED[name] or mark == ",")
    valid = of_pandas(path, sep=separator)
    line = next(n for n, text in enumerate(SWALLOWED[name].splitlines(), 1) if '"' in text)
    with pytest.raises(MinBertError, match="a line break inside a cell") as error:
        cells(path)
    for part in (f"{path}, line {line}:", f"line {line + 1} in it could be a row", "`line_breaks: true`", "quotes: f"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert cells(path, line_breaks=True) == valid and len(valid) < len(SWALLOWED[name].splitlines())


@pytest.mark.parametrize("separator", ",;\t")
def test_no_pair_of_quotes_swallows_rows(tmp_path, separator):
    """Rows without quotes, in one of which a quote opens a text and in a later one of which a quote ends it."""
    for seed in range(150):
        draw = random.Random(seed)
        size = draw.choice([3, 8, 40, 400])
        rows = [["id", "text", "label"]]
        for number in range(size):
            text = "".join(draw.choice(string.ascii_lowercase + "  ") for _ in range(draw.randint(3, 40)))
            rows.append([str(number), f"t{text}", draw.choice(["good", "bad"])])
        first = draw.randrange(1, size)
        last = min(size, first + draw.choice([1, 2, 3, 10]))
        rows[first][1], rows[last][1] = f'"{rows[first][1]}', f'{rows[last][1]}"'
        path = tmp_path / "rows.csv"
        path.write_text("".join(separator.join(row) + "\n" for row in rows))
        with pytest.raises(MinBertError, match=f"line {first + 1}: a line break inside a cell .*could be a row"):
            cells(path)


@pytest.mark.parametrize("content", ["text\none\rtwo\n", "label,text\r\ngood,one\rtwo\r\n", "text\tx\none\rtwo\t3\n"])
def test_a_lone_carriage_return_outside_quotes_is_refused(write, content):
    """Writers leave such a cell without quotes, and readers take the rest of it for a row."""
    with pytest.raises(MinBertError, match="line 2: the line ends with a lone carriage return"):
        cells(write(content))


@pytest.mark.parametrize(
    ("label", "refused"), [("good", True), ("maybe", True), ("", False), (" good", False), ("very good", False)]
)
def test_a_label_of_the_columns_kind_is_that_of_a_row(write, label, refused):
    """Also one that the file has nowhere else. Behind a comma of a sentence is a space."""
    others = "".join(f"text {number},{('good', 'bad')[number % 2]}\n" for number in range(200))
    path = write(f'text,label\n"one\ntwo,{label}\nthree",bad\n{others}')
    if refused:
        with pytest.raises(MinBertError, match=f"line 3 in it could be a row by itself .'two,{label}'"):
            cells(path)
    else:
        assert cells(path)[1] == [f"one\ntwo,{label}\nthree", "bad"]


OTHERS = "".join(f"{number},some text {number},{number % 2}\n" for number in range(4, 40))


@pytest.mark.parametrize(
    "lines",
    [
        '1,"well, a b,1\n2,a screen of 24",0\n',  # the opened text holds a separator
        '1,"a b,1\n2,well, a screen of 24",0\n',
        '1,"a b,1\n,c d,0\n3,e",1\n',
        '1,"a b,1\n2,c d,\n3,e",1\n',
        '1,"a b,1\n2,,0\n3,e",1\n',
        '1,"a b,1\n2, c d,0\n3,e",1\n',
        '1,"a b,1\n2,c, d,0\n3,e",1\n',  # by itself it would be refused
        '1,"a b,1\n2,c d,7\n3,e",1\n',  # a label that stands nowhere else
    ],
)
def test_rows_that_a_quote_swallowed_are_known_however_odd_they_are(write, lines):
    with pytest.raises(MinBertError, match="could be a row by itself"):
        cells(write(f"id,text,label\n{lines}{OTHERS}"))


def test_rows_of_a_label_that_comes_late_are_known(write):
    rows = [f"{number},some text {number},{int(number > 10_500)}\n" for number in range(10_600)]
    rows[10_550:10_553] = ['1,"a b,1\n', "2,c d,1\n", '3,e",1\n']
    with pytest.raises(MinBertError, match="could be a row by itself"):
        cells(write("id,text,label\n" + "".join(rows)))


def test_a_quote_that_is_never_closed(write):
    path = write('text,label\nfine,good\n"two\nlines",bad\n"open,good\nx,bad\n')
    with pytest.raises(MinBertError, match=r"rows\.csv, line 5: a double quote is not closed"):
        cells(path)


def test_the_key_is_an_option_of_the_file(write):
    path = write(SWALLOWED["no labels"])
    assert len(read_rows(DataFile(str(path), line_breaks=True), TASK, labelled=False)) == 2
    lines = write('{"text": "a"}\n', "a.jsonl")
    with pytest.raises(MinBertError, match="`line_breaks` is for .csv, .tsv and .txt files"):
        read_rows(DataFile(str(lines), line_breaks=True), TASK, labelled=False)


# ---- Long cells, long files


def test_a_long_cell_is_read_as_from_jsonl(write):
    text = "good film " * 15_000
    before = csv.field_size_limit(1000)
    quoted = write(f'text,label\n"{text},\n{text}",good\n{text},bad\nfine,bad\n')
    lines = write("".join(json.dumps({"text": t}) + "\n" for t in (f"{text},\n{text}", text, "fine")), "rows.jsonl")
    found = read_rows(quoted, TASK, labelled=False)
    assert found == read_rows(lines, TASK, labelled=False)
    assert [len(row["text"]) for row in found] == [300_001, 149_999, 4]
    assert csv.field_size_limit(before) == 1000, "the limit of the process is left as it was"


def test_rows_come_before_the_file_is_read_to_its_end(write):
    rows = "".join(f"{number},t\n" for number in range(30_000))
    path = write(f'id,text\n{rows}30000,"open\n')
    first = list(itertools.islice(read_cells(path), 20_000))
    assert first[-1] == (20_000, ["19998", "t"])
    with pytest.raises(MinBertError, match="line 30002: a double quote is not closed"):
        cells(path)


# ---- Separators


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "label;text\n{};{}\n"),
        ("a.csv", '"label";"text"\n"{}";"{}"\n'),
        ("a.csv", '\ufefflabel;"text"\r\n{};"{}"\r\n'),
        ("a.txt", "label;text;a b c\n{};{};\n"),
        ("a.csv", 'label;text;"so, so"\n{};{};1,5\n'),
        ("a.csv", "label|text\n{}|{}\n"),
        ("a.csv", "label\ttext;,\ttext\n{}\t;,|\t{}\n"),
        ("a.csv", "label,a;b,text\n{},x;y,{}\n"),
        ("a.tsv", "label\ttext\n{}\t{}\n"),
    ],
)
def test_the_header_tells_the_separator(write, caplog, name, content):
    content = content.format("good", "fine").replace("\n", "\n", 1)
    assert read_rows(write(content, name), TASK, labelled=True) == [{"id": "0", "text": "fine", "label": 1}]
    assert not caplog.messages


@pytest.mark.parametrize(
    ("name", "content", "mark"),
    [
        ("a.tsv", "label;text\ngood;fine\n", "';' (semicolon)"),
        ("a.tsv", "label; text\ngood; fine\n", "';' (semicolon)"),
        ("a.tsv", "label,text\ngood,fine\n", "',' (comma)"),
        ("a.tsv", "label|texts\ngood|fine\n", "'|' (vertical bar)"),
        ("a.csv", "label;text,x\ngood;fine,x\n", "';' (semicolon)"),
        ("a.jsonl", '{"label;text": "x"}\n', "';' (semicolon)"),
    ],
)
@pytest.mark.parametrize("labelled", [True, False])
def test_another_separator_is_named(write, name, content, mark, labelled):
    with pytest.raises(MinBertError) as error:
        read_rows(write(content, name), TASK, labelled=labelled)
    assert f"The cells look separated by {mark}" in str(error.value)
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize("mark", ["^", ":", " "])
def test_a_header_in_one_cell_is_no_name_to_take(write, mark):
    with pytest.raises(MinBertError) as error:
        read_rows(write(f"label{mark}text\ngood{mark}fine\n", "a.csv"), TASK, labelled=True)
    assert f"The header is one cell, 'label{mark}text'. Separate its names by one of: tab, comma" in str(error.value)
    assert "Did you mean" not in str(error.value)


def test_a_line_for_excel_is_named(write):
    with pytest.raises(MinBertError, match="line 1: sep=; is an instruction to Excel. Delete the line."):
        cells(write("sep=;\nlabel;text\ngood;fine\n"))


def test_a_decimal_comma_is_named(write):
    score = Task("share", "score", ("text",), range=(0, 5))
    with pytest.raises(MinBertError, match="Found '3,8'. Write numbers with a decimal point"):
        read_rows(write("text;label\nfine;3,8\n"), score, labelled=True)
