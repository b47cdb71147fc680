"""What strata tests itself with, for tests of your own ops, passes and backends."""

from strata.arguments import public_names
from strata.testing.check import check_dtypes, check_op, checks_for, claimed_dtypes
from strata.testing.golden import GoldenCase, check_case, find_cases, read_case
from strata.testing.logits import LOOSE_F16, STRICT, Agreement, Tolerance, check_finite, compare_logits

public_names(globals())
