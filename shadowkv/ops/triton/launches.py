"""Notes which kernels a piece of code launches, so that they can be launched again without the code around them.

What tests a kernel also allocates and poisons what it writes; what times it wants the kernel alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

Launch = Callable[[], object]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """A list that grows by every launch inside; calling an entry launches it again, on the same tensors.

    Entries hold on to their tensors. Not for several threads at once.
    """
    launches: list[Launch] = []
    usual: dict[Any, Any] = {kind: kind.run for kind in (JITFunction, InterpretedFunction) if hasattr(kind, "run")}

    def note(kernel: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> object:
        run = next(run for kind, run in usual.items() if isinstance(kernel, kind))
        launches.append(partial(run, kernel, *positional, **named))
        return run(kernel, *positional, **named)

    try:
        for kind in usual:
            kind.run = lambda kernel, *positional, **named: note(kernel, positional, named)
        yield launches
    finally:
        for kind, run in usual.items():
            kind.run = run
