"""The prose linter: README, docs and the CRD's texts against the glossary, the list of habits and two limits.

Run by ``make lint-prose``. The decision for it is docs/adr/0015-a-prose-linter-in-python.md.
"""
