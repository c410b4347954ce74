"""The completion script, asked by a real bash."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cait.cli import main

ASK = """
source ./cait.bash
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_shtab_cait 2>/dev/null
echo "${COMPREPLY[@]}"
"""


def test_bash_completes_verbs_settings_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--print_completion", "bash"])
    (tmp_path / "cait.bash").write_text(capsys.readouterr().out)
    for name in ("mine", "mean", "other", "$(touch made-by-a-name)"):
        (tmp_path / "logs" / name).mkdir(parents=True)

    def complete(*words: str) -> set[str]:
        done = subprocess.run(["bash", "-c", ASK, "bash", *words], cwd=tmp_path, capture_output=True, text=True)
        return set(done.stdout.split())

    assert complete("cait", "re") == {"resume", "replay"}
    assert {"--model.lr", "--model.lr_base_size"} <= complete("cait", "fit", "--model.l")
    assert "--trainer.max_epochs" in complete("cait", "resume", "mine", "--trainer.max_e")
    assert complete("cait", "eval", "m") == complete("cait", "resume", "m") == {"mine", "mean"}
    assert "--ckpt_path" in complete("cait", "eval", "--ckpt")
    assert not (tmp_path / "made-by-a-name").exists()
    assert "--run_name" in complete("cait", "find-lr", "--run")


def test_zsh_gets_its_own_script(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--print_completion", "zsh"])
    out = capsys.readouterr().out
    assert out.startswith("#compdef cait")
    assert "_cait_runs" in out
    if shutil.which("zsh"):
        assert subprocess.run(["zsh", "-n"], input=out, text=True, check=False).returncode == 0


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--print_completion", "fish"])
    assert capsys.readouterr().err == "cait: error: --print_completion takes bash or zsh, got fish\n"
