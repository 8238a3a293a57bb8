"""How a page is read and compared, on pages of a few lines."""

from pathlib import Path

from tests.docs.page import abridged, agrees, blocks, commands, play

PAGE = """
```python title="a.py"
print(f"{3 * 4} GiB in 0.52 s")
```

```console
$ python a.py
7 GiB in 1.25 s
$ export NAME=one
$ echo $NAME \\
    two
one two
```

<!-- not run: no cluster here -->
```console
$ sbatch job.sh
```
"""


def test_a_page_is_run_and_figures_may_differ(tmp_path: Path) -> None:
    text, differences = play(PAGE, tmp_path, "page")
    assert differences == []
    assert "12 GiB in 0.52 s" in text and "$ sbatch job.sh\n" in text
    assert text.replace("12 GiB in 0.52 s", "7 GiB in 1.25 s") == PAGE


def test_another_word_is_a_difference(tmp_path: Path) -> None:
    _, differences = play(PAGE.replace("one two", "one three"), tmp_path, "page")
    assert [said.splitlines()[0] for said in differences] == ["page: $ echo $NAME \\"]


def test_what_stands_for_any_lines() -> None:
    printed = ["a 1", "b", "c", "d 2"]
    assert agrees(["a 9", "...", "d 8"], printed) and agrees(["..."], []) and agrees(printed, printed)
    assert not agrees(["a 9", "...", "e 8"], printed) and not agrees(["a 9"], printed) and not agrees([], printed)
    assert agrees(["a", "x"], ["a", "y"], "held to: 1 first, 0 last")
    assert not agrees(["a", "x"], ["b", "x"], "held to: 1 first, 0 last")
    assert abridged(["a 9", "...", "d 8"], printed) == ["a 1", "...", "d 2"]


def test_blocks_and_their_comments() -> None:
    file, console, cluster = blocks(PAGE)
    assert (file.title, console.runs, cluster.runs) == ("a.py", True, False)
    assert [shown.command for shown in commands(console.text)][1:] == ["export NAME=one", "echo $NAME \\\n    two"]
