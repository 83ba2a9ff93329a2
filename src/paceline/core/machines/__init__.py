"""The machines and workers of a run: who takes part, who is lost, and what their clocks say."""
