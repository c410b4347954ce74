"""The finders of a learning rate and of a batch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import SMALL, link_digits

from cait.cli import main

TINY = [*SMALL, "--model.fields.depth=1", "--data.num_workers=0"]


@pytest.mark.slow
def test_finders_say_what_to_type_next_and_leave_no_run(
    tmp_path: Path, digits_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cait.extras import plots

    drawn = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        plots, "write", lambda figure, path, write=plots.write: (drawn.append(figure), write(figure, path))
    )
    link_digits(tmp_path, digits_root)
    main(["find-lr", *TINY, "--steps=21", "--model.lr_base_size=32", "--model.label_smoothing=0"])
    out = capsys.readouterr().out
    rate, shown = re.search(r"at a rate of (\S+), which is --model.lr (\S+) for this batch", out).groups()
    assert float(rate) == pytest.approx(2 * float(shown), rel=0.1)  # 64 images a batch
    assert f'ARGS="--model.lr {shown}"' in out
    curve = drawn[0].axes[0].lines[0]
    assert len(curve.get_xdata()) == 21
    assert 2 < curve.get_ydata()[0] < 2.7  # ln 10, not the half of it
    assert (tmp_path / "logs/find-lr.png").stat().st_size > 5000
    main(["find-batch", *TINY, "--max=16"])
    out = capsys.readouterr().out
    assert "a batch of 16 images fits on one device (the largest that was tried; the bound is 16)" in out
    assert 'ARGS="--data.batch_size 16"' in out
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["find-lr.png"]


@pytest.mark.parametrize("arguments", [["find-lr", "--steps=5"], ["find-lr", "--min_lr=2"], ["find-batch", "--max=1"]])
def test_what_cannot_be_sought_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
