"""Every op of the catalogue as `ops.<name>`: some functions share their name with the module they live in."""

from typing import Any

from strata import ops as _ops

ops: Any = _ops
