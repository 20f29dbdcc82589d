"""Sphinx's settings for the documentation site: the repository's own Markdown, and the public names of Python.

``make docs`` builds it into ``out/site`` and fails on dead links, unknown names and pages that no list has.
"""

import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / part) for part in ("core", "planner", "operator", "trainer", "cli")]

from heterotrain_core.version import __version__  # noqa: E402  # its folder is not in the path before

project = "heterotrain"
author = "the heterotrain authors"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = [
    "*.md", "docs/*.md", "docs/adr/*.md", "docs/pictures/*", "helm/heterotrain/README.md", "deploy/dev/site/*.md",
    "deploy/dev/cluster/README.md", "research/*.md", "research/*.png",
]  # fmt: skip
exclude_patterns = [".venv*", "out", "**/.pytest_cache"]
templates_path = ["templates"]
html_static_path, html_css_files = ["static"], ["tables.css"]
html_theme = "furo"
html_additional_pages = {"index": "index.html"}
html_title = f"heterotrain {version}"
html_math_renderer = "mathml"  # browsers draw it without a script of another host
html_show_copyright = html_copy_source = html_show_sourcelink = False

myst_heading_anchors = 4
myst_enable_extensions = ["amsmath", "dollarmath", "html_image"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"


def add_contents(_app: Sphinx, document: str, source: list[str]) -> None:
    """Add what only the site needs to the first page: the list of all pages."""
    if document == root_doc:
        source[0] += (ROOT / "deploy/dev/site/contents.txt").read_text(encoding="utf-8")


def in_a_line(translator: HTML5Translator, node: nodes.math) -> None:
    """Write a formula inside of a sentence as MathML."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def on_its_own(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula between paragraphs as MathML; a long one scrolls instead of widening the page."""
    formula = convert(node.astext(), display="block")
    translator.body.append(f'<div style="overflow-x: auto">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Connect the functions above to Sphinx."""
    app.connect("source-read", add_contents)
    app.add_html_math_renderer("mathml", inline_renderers=(in_a_line, None), block_renderers=(on_its_own, None))
