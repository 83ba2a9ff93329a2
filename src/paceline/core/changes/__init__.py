"""What changes a run while it goes on: joins, changes of the sync model, extensions and edits of the model."""
