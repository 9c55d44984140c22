"""The version numbers of the module `deepspeed`."""

from . import VERSION

TEXT = VERSION
MAJOR, MINOR, PATCH = (int(part) for part in VERSION.partition("+")[0].split("."))
UNKNOWN = None
ALLREDUCE_NUMEL = 500_000_000
