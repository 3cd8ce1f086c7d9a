"""How loops are compiled. Importing this module imports Numba; `import planner` does not."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(signature: str) -> Callable[[F], F]:
    """Compile at once, for these argument types alone, so that no later call does.

    What is compiled is kept beside the module, or in the user's cache, until the module's file
    changes; not when another file does, so a compiled function calls none of other modules. Where
    neither place can be written, nothing is kept.
    """
    options = {"error_model": "numpy", "no_cfunc_wrapper": True}

    def compile_it(function: F) -> F:
        try:
            made = numba.njit(signature, cache=True, **options)(function)
        except RuntimeError:
            made = numba.njit(signature, **options)(function)
        return cast(F, made)

    return compile_it
