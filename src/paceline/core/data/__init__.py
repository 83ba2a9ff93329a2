"""The data of a run: how epochs are split, who has which batches, and which batches belong to a push."""
