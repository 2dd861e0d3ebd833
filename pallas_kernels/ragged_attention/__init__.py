"""The op `ragged_paged_attention`: contract, checks, and the choice of what runs it."""
