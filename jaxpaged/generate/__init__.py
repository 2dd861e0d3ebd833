"""`python -m jaxpaged.generate`: answers a file of prompts, or one prompt."""
