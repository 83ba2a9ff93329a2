"""The processes of a run and the programs beside it: how they are started, what they are told, and how they end."""
