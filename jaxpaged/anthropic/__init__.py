"""Anthropic's messages: their shape, read into a chat request, and answers written in it."""
