"""Stores for compiled code: keys are text, values are bytes; no store knows what an IR is."""

from strata.arguments import public_names
from strata.cache.process import default_store
from strata.cache.sources import last_change, version_of
from strata.cache.store import DiskStore, Entry, Event, digest
from strata.cache.tools import Listing, export, ls, prune, verify, why
from strata.core import TABLES

public_names(globals())
