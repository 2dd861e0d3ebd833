"""OpenAI's request and answer shapes: what the server and the batch job both speak."""
