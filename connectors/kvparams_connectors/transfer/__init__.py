"""The connector: saves, finds and loads the pages of a prompt."""
