"""One exact optimizer step, the batches it eats, and the loop around them. Emits plain records; never prints."""
