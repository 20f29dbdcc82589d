"""Reads Python sources as trees."""

from __future__ import annotations

import ast
import gc


def parsed(source: str) -> ast.Module:
    """Return the tree of a source.

    A garbage collection during the parse may call Python code, as hypothesis does, and CPython 3.11 then takes the
    parser's depth for wrong ("AST constructor recursion depth mismatch").
    """
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()
