"""Models that turn texts into vectors or scores: their batches, engine, process and interface."""
