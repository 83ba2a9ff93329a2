"""The state of a run as a table of plain values, for displays."""
