"""Finds token ids of text prompts, so that routing can look up their prefixes."""
