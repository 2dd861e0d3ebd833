"""The command `jaxpaged`: every word of its list is there."""

import os
import signal
import subprocess
import sys
import types

import pytest

from jaxpaged.cli import COMMANDS, main
from jaxpaged.entry import run


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


def test_ctrl_c_while_modules_are_imported_ends_a_command_without_a_word(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import sys, time\nprint('here', flush=True)\ntry:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    raise ImportError('broken off') from None\n"
    )
    code = "from jaxpaged.entry import run; run('slow', 'jaxpaged slow')"
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10) == (b"", b"")
    assert process.returncode == -signal.SIGINT


def test_ctrl_c_while_a_command_starts_is_one_line_and_code_130(monkeypatch, capsys):
    def interrupted() -> int:
        raise KeyboardInterrupt

    module = types.ModuleType("interrupted_command")
    vars(module)["main"] = interrupted
    monkeypatch.setitem(sys.modules, "interrupted_command", module)
    assert run("interrupted_command", "jaxpaged it") == 130
    assert capsys.readouterr().err == "jaxpaged it: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("module", ["server", "jaxpaged.generate", "jaxpaged.bench"])
def test_modules_are_commands_too(module):
    told = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("usage: ")
