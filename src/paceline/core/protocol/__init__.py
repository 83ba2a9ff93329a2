"""The messages between processes, the values in them, their legal order, and the requests of the cores."""
