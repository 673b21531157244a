"""Without Triton there are no kernels to test."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
