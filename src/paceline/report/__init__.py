"""Pictures and tables that show the results of runs. Only `canvas.save` writes files."""
