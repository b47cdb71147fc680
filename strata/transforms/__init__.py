"""Graph transforms: derivatives and batching by name. Drivers only; every rule belongs to an op."""

from strata.arguments import public_names
from strata.transforms.forward import hvp, jacfwd, jvp
from strata.transforms.mapping import vmap
from strata.transforms.promote import promote_params
from strata.transforms.recompute import checkpoint
from strata.transforms.reverse import grad, grad_with_loss, jacrev, value_and_grad, vjp
from strata.transforms.tidy import expand_checkpoints, merge_scans, tidy

public_names(globals())
