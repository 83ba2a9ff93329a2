"""The demo, `paceline demo`, which compares sync models in live runs that train on handwritten digits."""
