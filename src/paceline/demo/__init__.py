"""The demo: `paceline demo` compares sync models in live runs that train on handwritten digits."""
