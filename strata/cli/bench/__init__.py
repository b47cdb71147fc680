"""`strata bench`: times of a model beside a peer, of a server under load, of the suite; two results compared."""

from strata.cli.bench.model import bench
