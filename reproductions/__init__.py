"""Reproductions of the papers' tables and figures. Run `python -m reproductions --list` in a checkout to list them.

This package also contains searches for the demo's hyper-parameters and for SpecSync's abort time and rate. It is not
part of the installed `paceline` package.
"""
