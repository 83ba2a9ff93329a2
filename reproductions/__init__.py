"""Reproductions of the papers' tables and figures. Run `python -m reproductions --list` in a checkout to list them.

This package also searches for hyper-parameters for the demo and for the comparisons in the papers. The installed
package does not contain the reproductions.
"""
