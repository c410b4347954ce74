"""Golden files: what is typed, or a line of Python, and the line that answers it.

A golden file is a list of cases:

    - cait: fit --config digits.yaml --model.lr fast    # words, divided as a shell does
      says: "--model.lr: Expected a <class 'float'>. Got value: fast"
    - python: cait.create_model("xxs25")                # statements that use the public names alone
      says: "unknown model 'xxs25'; choose one of ..."

More keys of a case, all optional:

    run: [copy, broken]                     names of copies of a trained run in logs/
    files: {labels.csv: "path,label\n"}     what lies in the working folder, beside digits.yaml and data/digits: text,
                                            where "\\udcff" stands for the byte ff, or !!binary
    links: {photos/c: b}                    links in it, and where they lead
    env: {SLURM_JOB_ID: "7"}                variables
    needs: cait                             a part that may have been deleted: `cait`, an extra or contrib/NAME;
                                            `cpu` is there where no accelerator is
    program: leafnet                        a console script of the user's own that is typed in place of `cait`
    status: 0                               the exit status, if it is not 2; `says` is then a part of what is printed

In `says`, {here} stands for the folder of the case, and {*} for any text. `make golden` writes each `says` anew that
is no longer true.
"""

import contextlib
import json
import logging
import os
import re
import shlex
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import yaml
from harness import REPO, call, caught, in_folder, is_there, link_digits


@dataclass(frozen=True)
class Case:
    """One case of a golden file; the fields are its keys."""

    file: Path
    number: int
    says: str
    cait: str = ""
    python: str = ""
    files: dict[str, str | bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    run: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    program: str = "cait"
    status: int = 2

    def answer(self, folder):
        """What `cait`, or the statements, say in the folder."""
        before = files_in(folder)
        with mock.patch.dict(os.environ, self.env):
            answer = self._of_python(folder) if self.python else self._of_cait(folder)
        if self.cait and (self.status == 2 or "--print_" in self.cait):
            assert files_in(folder) == before, "it changed something"
        return answer.replace(str(folder), "{here}")

    def _of_cait(self, folder):
        logging.disable(logging.INFO)
        try:
            done = call(folder, *shlex.split(self.cait), program=self.program)
        finally:
            logging.disable(logging.NOTSET)
        printed = done.stdout + done.stderr
        assert done.returncode == self.status, printed
        assert "Traceback" not in printed
        if self.status == 0:
            return printed
        [line] = done.stderr.splitlines()
        assert line.startswith(f"{self.program}: error: ")
        return line.removeprefix(f"{self.program}: error: ")

    def _of_python(self, folder):
        import cait
        from cait.errors import UserError

        names = {"cait": cait, "Path": Path}
        refused = pytest.raises(UserError) if self.status else contextlib.nullcontext()
        with in_folder(folder), warnings.catch_warnings(), caught(1) as out, caught(2) as err:
            warnings.simplefilter("ignore")
            with refused as raised:
                exec(self.python, names)
        return str(raised.value) if self.status else out[0] + err[0]

    def agrees(self, answer):
        """Whether this is what the file says."""
        pattern = re.escape(self.says).replace(re.escape("{*}"), ".*")
        found = re.fullmatch if self.status else re.search
        return found(pattern, answer, re.DOTALL) is not None if self.says else answer == ""

    def write(self, says):
        """Put another answer into the golden file."""
        lines = self.file.read_text().splitlines()
        answers = [number for number, line in enumerate(lines) if line.startswith("  says: ")]
        lines[answers[self.number]] = f"  says: {json.dumps(says, ensure_ascii=False)}"
        self.file.write_text("\n".join(lines) + "\n")


def files_in(folder):
    """Whatever is in a folder but compiled Python, and what the files hold."""
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path: path.read_bytes() if path.is_file() else b"" for path in paths}


def cases(*files):
    """The cases of golden files, as parameters of a test."""
    for file in files:  # not by libyaml, which refuses half a surrogate pair
        for number, keys in enumerate(yaml.safe_load(file.read_text())):
            case = Case(file, number, **keys)
            if is_there(case.needs):
                yield pytest.param(case, id=f"{file.stem}: {case.cait or case.python}"[:100])


def check(case, folder, request):
    """Hold a case, in an empty folder, against its golden file, or write its answer there."""
    link_digits(folder, request.getfixturevalue("digits_root"))
    (folder / "logs").mkdir()
    config = (REPO / "configs/digits.yaml").read_text()
    config = config.replace("accelerator: auto", "accelerator: cpu")
    config = config.replace("depth: 6", "depth: 1, depth_token_only: 1")
    if case.program != "cait":
        (folder / case.program).touch()
    for name in case.run:
        shutil.copytree(request.getfixturevalue("trained"), folder / "logs" / name)
    for name, text in {"digits.yaml": config, **case.files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, str):
            text = text.encode(errors="surrogateescape")
        (folder / name).write_bytes(text)
    for name, target in case.links.items():
        (folder / name).symlink_to(target)
    answer = case.answer(folder)
    if not case.agrees(answer):
        assert os.environ.get("CAIT_GOLDEN") == "write", answer
        case.write(answer)
