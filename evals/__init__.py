"""Evals: what a cache costs and what it saves, on a real model. Run from a checkout as `python -m evals.NAME`.

They judge kvplug's caches and transformers' own by one yardstick, and so must never reach into a cache's internals for
a figure that can be measured from outside.
"""
