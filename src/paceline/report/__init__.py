"""Pictures and tables that show the results of runs. The functions that draw them have no side effects."""
