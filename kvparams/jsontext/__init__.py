"""JSON as bytes: finding, checking and replacing members without decoding the rest."""
