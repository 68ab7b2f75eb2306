"""A second CPU backend, `twin`, that hands everything to gloo: so that lane code runs where there is one kind of device."""

import torch.distributed as dist


def register() -> None:
    """Make `twin:cpu` a lane: `--lane twin:cpu --lane-import tests.twin:register`."""
    if "twin" in getattr(dist.Backend, "_plugins", {}) or "TWIN" in getattr(dist.Backend, "_plugins", {}):
        return
    try:
        dist.Backend.register_backend("twin", create, devices=["cpu"])
    except TypeError:  # torch 1.13 knows nothing of devices
        dist.Backend.register_backend("twin", create)


def create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
