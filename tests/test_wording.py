"""Counts and amounts in sentences."""

from fullframe.wording import amount, plural


def test_one_is_not_several() -> None:
    assert [plural(n, "step") for n in (0, 1, 2, 1024)] == ["0 steps", "1 step", "2 steps", "1,024 steps"]
    many = [plural(2, noun) for noun in ("batch", "pass", "strategy", "day", "loader worker")]
    assert many == ["2 batches", "2 passes", "2 strategies", "2 days", "2 loader workers"]


def test_an_amount_has_its_unit() -> None:
    assert [amount(size) for size in (53 * 2**20, 12.34 * 2**30)] == ["53 MiB", "12.3 GiB"]
