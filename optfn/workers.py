"""The workers of a step, as `update` gets them: the public path of `mesh.collectives.devices`."""

from optfn.mesh.collectives.devices import ONE_WORKER, Workers, join_workers

__all__ = ["ONE_WORKER", "Workers", "join_workers"]
