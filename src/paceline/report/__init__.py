"""Pictures and tables of what runs have left behind. Pure: figures in, a picture or a table out."""
