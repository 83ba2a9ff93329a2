"""Reproductions of the papers' tables and figures. Run `python -m reproductions --list` in a checkout to list them.

Also searches for hyper-parameters, which the demo and the papers' comparisons need. The installed package does not
contain any of this.
"""
