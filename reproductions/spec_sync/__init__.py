"""Tables and figures of SpecSync (Zhang et al., ICDCS 2018), one file per subject."""

from . import clusters, convergence, examples, pushes, traffic, workloads

EXHIBITS = tuple(
    exhibit
    for module in (workloads, examples, pushes, convergence, clusters, traffic)
    for exhibit in module.EXHIBITS
)
