"""What shells and `man` know of the command line, from the parser itself: `strata completion`, `strata manual`."""

from strata.cli.shell.completion import completion
from strata.cli.shell.manual import manual
