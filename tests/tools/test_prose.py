"""The check of prose: phrases, exceptions, and the table of accepted places."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.prose import ACCEPTED, PHRASES, Accepted, Place, main, places_in, rejected, table_errors


def phrases(source: str, path: str = "example.py") -> list[str]:
    """Return the names of the phrases in a source."""
    return [place.phrase for place in places_in(path, source)]


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("Of samples in memory some are samples in memory.", "docstring without a subject"),
        ("Every line is a seed, one file a command.", "'a' for 'per'"),
        ("What fails is told with its place.", "told, tells, says so"),
        ("Three searches by turns, each from zero.", "archaic words"),
        ("Runs of before are an error.", "of before, of its own"),
        ("What a criterion is content with, counts.", "clause as subject"),
        ("Whether the host asked for a number.", "programs that ask or look"),
        ("The rate, be it large or small.", "inverted conditions"),
        ("The norm is as large as it may be.", "as … as may be"),
        ("A folder that nobody writes to.", "nobody, somebody"),
        ("Other weights were tried before.", "history"),
        ("An upper bound of the error.", "bound of"),
        ("The results are equal to the last bit.", "the very same"),
    ],
)
def test_phrase_is_reported_in_docstrings_comments_messages_and_markdown(
    text: str, phrase: str
) -> None:
    assert phrase in phrases(f'def f():\n    """{text}"""\n')
    assert phrase in phrases(f"x = 1\n# {text}\n")
    assert phrase in phrases(f'raise ValueError("{text}")\n')
    assert phrase in phrases(f"# Title\n\n{text}\n", "page.md")


def test_every_phrase_has_advice_and_is_tested() -> None:
    (mark,) = test_phrase_is_reported_in_docstrings_comments_messages_and_markdown.pytestmark
    assert {phrase for _, phrase in mark.args[1]} == {phrase.name for phrase in PHRASES}
    assert all(phrase.advice for phrase in PHRASES)


@pytest.mark.parametrize(
    "text",
    [
        "Return the Lipschitz constant of a convolution.",
        "By default, each sample stops on its own.",
        "Write one file per command, at most four, to avoid collisions.",
        "What is a fixed point?",
    ],
)
def test_good_prose_is_not_reported(text: str) -> None:
    assert phrases(f'"""{text}"""\n') == []
    assert phrases(text, "page.md") == []


def test_code_is_not_prose() -> None:
    assert phrases('"""Return `nobody` and ``lest we`` as strings."""\n') == []
    assert (
        phrases('def f():\n    """Call it.\n\n    >>> say("nobody here")\n    nobody\n    """\n')
        == []
    )
    assert phrases("```python\nprint('nobody is here')\n```\n", "page.md") == []
    assert phrases('x = {"nobody": 1}\n') == []


def test_names_that_do_not_describe_their_content_are_reported() -> None:
    assert phrases("found = solve()\n") == ["found"]
    assert phrases("def told(asked):\n    pass\n") == ["told", "asked"]
    assert phrases("result = solve()\nprint(report.found)\n") == []


def test_set_of_visited_items_may_be_named_seen() -> None:
    assert phrases("seen = set()\n") == phrases("seen: dict[str, int] = {}\n") == []
    assert phrases("seen = measure()\n") == ["seen"]


def test_accepted_place_needs_a_reason_and_a_match() -> None:
    place = Place("a.py", 3, "nobody, somebody", "Nobody's business, a quotation.")
    good = Accepted("a.py", "Nobody's business", "a quotation")
    assert rejected([place], [good]) == []
    assert table_errors([place], [good]) == []
    assert rejected([place], []) == [place]
    (error,) = table_errors([place], [Accepted("a.py", "Nobody's business", " ")])
    assert "has no reason" in error
    (error,) = table_errors([place], [Accepted("b.py", "Nobody's business", "a quotation")])
    assert "matches nothing" in error
    (error,) = table_errors([place], [good] * 26)
    assert "26 accepted places" in error


def test_accepted_places_have_reasons() -> None:
    assert all(entry.reason.strip() for entry in ACCEPTED)


def test_program_prints_the_places_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("Nobody reads this.\n", encoding="utf-8")
    assert main([str(page)]) == 1
    printed = capsys.readouterr().out
    assert f"{page}:1: [nobody, somebody] Nobody reads this." in printed
    assert "the passive, or 'users'" in printed
    page.write_text("Users read this.\n", encoding="utf-8")
    assert main([str(page)]) == 0
