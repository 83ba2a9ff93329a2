"""The demo, `paceline demo`: sync models compared in live runs that learn handwritten digits."""
