"""A leak in words."""

from fullframe.observation.leaks.origin import Line
from fullframe.observation.leaks.report import leak


def test_a_leak_says_what_grows_where_it_comes_from_and_what_to_do(tmp_path, monkeypatch):
    file = tmp_path / "recipe.py"
    file.write_text("value = model(x)\nlosses.append(value)\n")
    monkeypatch.chdir(tmp_path)
    found = leak("graphs", "losses", Line(str(file), 1), Line(str(file), 2), 3 << 20, 12, 40)
    assert found.text == (
        "leak: `losses` grows with every step by 3.0 MiB and 12 graph nodes; kept at recipe.py:2 "
        "(losses.append(value)), made at recipe.py:1 (value = model(x)); keep .detach() or .item() of it, or empty it"
    )
    assert found.record() == {
        "leak": "graphs",
        "path": "recipe.py",
        "line": 1,
        "kept_at": "losses (recipe.py:2)",
        "bytes_per_step": 3 << 20,
        "nodes_per_step": 12,
        "after_step": 40,
        "text": found.text,
    }


def test_what_was_not_seen_is_not_said():
    found = leak("evaluation", "seen", None, None, 10, 0, 8, every="evaluation")
    assert (found.path, found.line, found.kept_at) == ("", 0, "seen")
    assert found.text.startswith("leak: `seen` grows with every evaluation by 10 bytes; compute under")
