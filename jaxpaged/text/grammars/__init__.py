"""Languages that an answer can be held to, and how many tokens their shortest endings take."""
