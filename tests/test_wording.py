"""Counts, amounts, lists of names and errors in sentences."""

from fullframe.wording import (
    amount,
    capital,
    figure,
    first_line,
    first_of,
    in_json,
    in_one_line,
    inside,
    numbered,
    plural,
    some,
)


def test_one_is_not_several() -> None:
    assert [plural(n, "step") for n in (0, 1, 2, 1024)] == ["0 steps", "1 step", "2 steps", "1,024 steps"]
    many = [plural(2, noun) for noun in ("batch", "pass", "strategy", "day", "loader worker")]
    assert many == ["2 batches", "2 passes", "2 strategies", "2 days", "2 loader workers"]
    assert numbered("rank", [2, 0]) == "ranks 0, 2" and numbered("rank", [1]) == "rank 1"


def test_an_amount_has_its_unit() -> None:
    assert [amount(size) for size in (53 * 2**20, 12.34 * 2**30)] == ["53 MiB", "12.3 GiB"]


def test_a_figure_has_three_digits_and_all_before_the_point() -> None:
    assert [figure(x) for x in (0.01234, 12.345, 14023.4)] == ["0.0123", "12.3", "14,023"]


def test_of_many_names_the_first_are_said() -> None:
    assert some("abcde") == "a, b, c and 2 more" and some("ab") == "a, b"
    assert first_of("abcde") == "a, b, c, ..." and first_of(["a"]) == "a" and first_of("abc", most=2) == "a, b, ..."


def test_json_has_null_for_what_is_not_finite() -> None:
    assert in_json({"loss": float("nan"), "best": [1.5, float("inf")], "at": (2, True)}) == (
        '{"loss": null, "best": [1.5, null], "at": [2, true]}'
    )


def test_a_full_name_begins_with_the_module_it_is_inside_of() -> None:
    assert inside("", "head") == "head" and inside("head.0", "weight") == "head.0.weight"


def test_an_error_is_said_in_a_sentence() -> None:
    assert first_line(ValueError("it is full.\nCall others.")) == "it is full" and first_line(OSError()) == "OSError"


def test_a_name_at_the_beginning_keeps_its_letters() -> None:
    said = [capital(text) for text in ("stopped. Then", "torch.load runs", "retain_graph=True", "bf16 rounds", "")]
    assert said == ["Stopped. Then", "torch.load runs", "retain_graph=True", "bf16 rounds", ""]


def test_what_ends_a_line_is_written_out() -> None:
    assert in_one_line("runs/new\nline \x1b[1m, größer") == "runs/new\\nline \\x1b[1m, größer"
