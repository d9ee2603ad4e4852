"""Solves of models as compiled graphs."""

from equilibria.compiled.api import CompiledModel, compile
from equilibria.compiled.store import CompileWarning

__all__ = ["CompileWarning", "CompiledModel", "compile"]
