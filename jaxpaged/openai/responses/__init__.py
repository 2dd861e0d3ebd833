"""/v1/responses: its items, events and stored answers, over the same chat requests."""
