"""Workers that compile Triton programs: what they import, and what they answer."""

import ast
import json
import subprocess
import sys
from pathlib import Path

from strata.backends.triton.launch import jobs


def test_a_worker_imports_nothing_of_strata() -> None:
    tree = ast.parse(Path(jobs.__file__).read_text(encoding="utf-8"))
    names = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    names += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
    assert not [name for name in names if name.partition(".")[0] == "strata"]


def test_a_job_that_fails_is_answered_and_the_next_one_is_taken() -> None:
    line = json.dumps({"text": "no program", "name": "f", "kind": "cuda", "overlaps": False}) + "\n"
    command = [sys.executable, "-P", jobs.__file__]
    made = subprocess.run(command, input=line * 2, capture_output=True, text=True, check=True)
    answers = [json.loads(answer) for answer in made.stdout.splitlines()]
    assert len(answers) == 2
    assert all(len(answer) == 1 and answer[0] for answer in answers), "a reason, and no binary"
