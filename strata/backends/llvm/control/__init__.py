"""Control flow: scan, cond and while as native loops over the programs of their bodies."""
