"""Reproductions of the papers' tables and figures. Run `python -m reproductions --list` in a checkout to list them.

This folder also contains searches for the demo's hyper-parameters and for SpecSync's abort time and rate. The
installed `paceline` package does not contain the folder.
"""
