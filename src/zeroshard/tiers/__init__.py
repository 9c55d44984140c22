"""Offload of model states from the device to host and disk: moves between these tiers, the host's step, the memory it takes."""

from .cpu_kernels import Kernel, describe_threads, host_threads, register, visible_cores
from .estimate import needs
from .imagined import imagine
from .offload_states import Spare

__all__ = ["Kernel", "Spare", "describe_threads", "host_threads", "imagine", "needs", "register", "visible_cores"]
