"""`python -m tests.cases STAGE NAME [TARGET]`: what the program of a golden case becomes, whole."""

from __future__ import annotations

import sys
from pathlib import Path

from strata.testing import read_case
from tests.cases.texts import TARGETS, plan_text, schedule_text, whole_text

stage, name, *targets = sys.argv[1:]
case = read_case(Path(__file__).parent / stage / f"{name}.txt")
if stage == "llvm":
    for target in targets or TARGETS:
        print(whole_text(case, target))
else:
    print({"lir": plan_text, "schedule": schedule_text}[stage](case))
