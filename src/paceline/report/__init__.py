"""Pictures and tables of the results of runs. The functions that draw them have no side effects."""
