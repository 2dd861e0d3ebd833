"""The command `jaxpaged`: every word of its list is there."""

import pytest

from jaxpaged.cli import COMMANDS, main


@pytest.mark.parametrize("word", COMMANDS)
def test_every_command_tells_its_flags(word, capsys):
    with pytest.raises(SystemExit) as ended:
        main([word, "--help"])
    assert ended.value.code == 0
    assert f"usage: jaxpaged {word}" in capsys.readouterr().out


def test_a_word_that_is_no_command_is_told_with_the_nearest(capsys):
    assert main(["generat"]) == 2
    assert "did you mean generate?" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["serve", "generate", "plan", "convert"])
def test_a_name_that_is_no_utf_8_is_refused_in_one_line(word, capsys):
    with pytest.raises(SystemExit) as ended:
        main([word, "folder\udcff", "out"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("is no UTF-8: rename it, or set LC_ALL=C.UTF-8\n")
