"""Benchmarks in the user's own files, in the layouts that are in use.

A row that cannot be read raises ``RequestError`` with file, line and field.
"""

from shadowkv.eval.files.infinitebench_files import read_infinitebench, read_scbench
from shadowkv.eval.files.longbench_files import read_longbench, read_longbench2
from shadowkv.eval.files.ruler_files import read_key_values, read_ruler, read_table

__all__ = [
    "read_infinitebench",
    "read_key_values",
    "read_longbench",
    "read_longbench2",
    "read_ruler",
    "read_scbench",
    "read_table",
]
