"""What a window reads, against the op's definition row by row.

input rows   0 1 2 3 4 5 6 7        kernel 3, stride 1, padding 1
output 0     x x                    reads -1..1
output 4           x x x            reads  3..5
"""

from hypothesis import given
from hypothesis import strategies as st

from fullframe.geometry.extents import Extents
from fullframe.geometry.window import AdaptiveWindow, Slice, TransposedWindow, Window, proportional_extents

windows = st.builds(Window, st.integers(1, 7), st.integers(1, 4), st.integers(1, 3), st.integers(0, 6))
transposed = st.builds(TransposedWindow, st.integers(1, 7), st.integers(1, 4), st.integers(1, 3), st.integers(0, 6))


def rows_read(window: Window, out: int) -> set[int]:
    return {out * window.stride - window.padding + window.dilation * j for j in range(window.kernel)}


def rows_written(window: TransposedWindow, row: int) -> set[int]:
    return {row * window.stride - window.padding + window.dilation * j for j in range(window.kernel)}


def test_the_picture() -> None:
    window = Window(kernel=3, padding=1)
    assert window.reads(range(4, 8)) == range(3, 9)
    assert window.reads(range(0, 1)) == range(-1, 2)


def test_the_stem_of_a_resnet() -> None:
    """7/2/3 on 50 columns in halves of 25: the second half begins on an odd row, its first output is number 13."""
    window, halves = Window(kernel=7, stride=2, padding=3), Extents.even(50, 2)
    out = window.output_extents(halves, window.output_size(50))
    assert out.bounds == (0, 13, 25)
    assert window.reads(out.ranges[1]) == range(23, 52)


@given(windows, st.integers(0, 20), st.integers(1, 9))
def test_reads_is_the_hull_of_what_each_row_reads(window: Window, start: int, count: int) -> None:
    rows = set().union(*(rows_read(window, out) for out in range(start, start + count)))
    assert window.reads(range(start, start + count)) == range(min(rows), max(rows) + 1)


@given(windows, st.integers(-5, 30), st.integers(1, 9))
def test_touched_by_names_every_output_that_reads_a_row(window: Window, start: int, count: int) -> None:
    rows = range(start, start + count)
    seeing = [out for out in range(-40, 60) if set(window.reads(range(out, out + 1))) & set(rows)]
    touched = window.touched_by(rows)
    assert list(touched) == list(range(min(seeing), max(seeing) + 1)) if seeing else not touched


@given(windows, st.integers(0, 12), st.integers(1, 5), st.integers(-6, 30), st.integers(1, 6))
def test_taps_are_the_kernel_rows_that_reach(window: Window, out: int, outs: int, row: int, rows: int) -> None:
    seen = {
        j
        for o in range(out, out + outs)
        for j in range(window.kernel)
        if o * window.stride - window.padding + window.dilation * j in range(row, row + rows)
    }
    taps = window.taps(range(row, row + rows), range(out, out + outs))
    assert seen <= set(taps)
    if seen:
        assert window.cropped(taps).reads(range(out, out + 1)).start == (
            window.reads(range(out, out + 1)).start + window.dilation * taps.start
        )


@given(transposed, st.integers(0, 20), st.integers(1, 9))
def test_transposed_reads_every_row_that_adds(window: TransposedWindow, start: int, count: int) -> None:
    out = range(start, start + count)
    adding = {row for row in range(-40, 60) if rows_written(window, row) & set(out)}
    reads = window.reads(out)
    assert adding <= set(reads)
    assert len(reads) >= 1


@given(windows, st.integers(1, 60), st.integers(1, 5))
def test_output_boundaries_rise_and_cover(window: Window, size: int, parts: int) -> None:
    size_out = max(window.output_size(size), 0)
    out = window.output_extents(Extents.even(size, parts), size_out)
    assert out.size == size_out
    assert out.parts == parts


def test_slices_leave_rows_where_they_are() -> None:
    halves = Extents.even(10, 2)
    assert Slice(2, 3).output_extents(halves, 3).bounds == (0, 1, 3)  # rows 2 | 5 8
    assert Slice(2, 3).reads(range(1, 3)) == range(5, 9)
    assert Slice(-2).output_extents(halves, 14).bounds == (0, 7, 14)  # two rows of padding before


def test_adaptive_windows_overlap() -> None:
    window = AdaptiveWindow(10, 4)
    assert [window.reads(range(o, o + 1)) for o in range(4)] == [range(0, 3), range(2, 5), range(5, 8), range(7, 10)]


def test_proportional_boundaries() -> None:
    assert proportional_extents(Extents((0, 25, 50)), 100).bounds == (0, 50, 100)
    assert proportional_extents(Extents((0, 3, 7)), 5).bounds == (0, 2, 5)
